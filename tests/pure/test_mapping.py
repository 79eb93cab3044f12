"""Protects who has what: the order of ranks, which is TensorRT-LLM's, and the errors of sizes
that cannot be shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manylora.config.blocks import AltUpConfig, ConvConfig, DeltaConfig, Mamba2Config
from manylora.config.model import EncoderConfig, ModelConfig, MoeConfig
from manylora.errors import ConfigError
from manylora.ranks.mapping import Mapping, check_mapping

LLAMA = ModelConfig("LlamaForCausalLM", 130, 64, 96, 5, 8, 2, 8, 64, 1e-6, 1e4, "float32")
MOE = MoeConfig(8, 2, 48, True, frozenset({1, 2, 3, 4}), shared_intermediate_size=32)
RECURRENT = DeltaConfig(frozenset({0, 1, 2}), 3, 6, 8, 8, 4)
CONV = ConvConfig(frozenset({0, 1}), 66, 3)
MAMBA2 = Mamba2Config(frozenset({0, 3}), heads=12, groups=3, head_dim=8, state_dim=8, taps=4)
STREAMS = replace(LLAMA, altup=AltUpConfig(4, 0, True, 8))


def test_the_order_of_ranks() -> None:
    ranks = [Mapping(8, rank, 4, 2, 2) for rank in range(8)]
    assert [m.tp_rank for m in ranks] == [0, 1, 2, 3] * 2
    assert [m.pp_rank for m in ranks] == [0] * 4 + [1] * 4
    assert [m.moe_ep_rank for m in ranks[:4]] == [0, 1, 0, 1]
    assert [m.moe_tp_rank for m in ranks[:4]] == [0, 0, 1, 1]
    assert ranks[0].moe_tp_size == 2
    assert ranks[5].tp_group == (4, 5, 6, 7)
    assert [m.is_first_stage for m in ranks] == [True] * 4 + [False] * 4
    assert [m.is_last_stage for m in ranks] == [False] * 4 + [True] * 4
    assert ranks[6].at(1) == ranks[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 0, 2, 1), r"world_size must be tp_size \* pp_size = 2, got 4"),
        ((2, 2, 2, 1), "rank must be 0 to 1, got 2"),
        ((4, 0, 4, 1, 3), r"moe_ep_size must divide tp_size \(4\), got 3"),
    ],
)
def test_sizes_that_do_not_agree(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mapping(*sizes)


@pytest.mark.parametrize(
    ("model", "mapping", "message"),
    [
        (LLAMA, Mapping(3, 0, 3), "tp_size must divide the model's 8 attention heads, got 3"),
        (LLAMA, Mapping(2, 0, 2, 1, 2), "moe_ep_size must be 1: LlamaForCausalLM has no experts"),
        (replace(LLAMA, moe=replace(MOE, num_experts=7)), Mapping(2, 0, 2, 1, 2), "number of experts, 7"),
        (
            replace(LLAMA, encoder=EncoderConfig(2, 0)),
            Mapping(3, 0, 1, 3),
            "encoder's 2 layers and one of the decoder's 3: pp_size must be at most 2, got 3; tp_size 1, 2",
        ),
        (replace(LLAMA, recurrent=RECURRENT), Mapping(2, 0, 2), "key heads of the recurrent layers, "),
        (replace(LLAMA, recurrent=CONV), Mapping(2, 0, 1, 2), "layers 3 to 4 have no recurrent layer"),
        (
            replace(LLAMA, recurrent=MAMBA2),
            Mapping(2, 0, 2),
            "divide the 3 groups of the recurrent layers, or",
        ),
        (STREAMS, Mapping(2, 0, 1, 2), "at least 3 layers, one for each residual stream but the first"),
        (
            replace(LLAMA, moe=MOE),
            Mapping(16, 0, 16, 1, 16),
            "; tp_size 1, 2, 4, 8 would do and moe_ep_size 1",
        ),
        (replace(LLAMA, norm="layer", qk_norm="all"), Mapping(2, 0, 2), "norms all heads at once"),
    ],
)
def test_models_that_cannot_be_shared(model: ModelConfig, mapping: Mapping, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_mapping(model, mapping)
    check_mapping(model, Mapping())

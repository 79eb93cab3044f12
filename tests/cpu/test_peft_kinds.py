"""Protects kinds of PEFT adapters that are no LoRA: logits and greedy tokens equal those of transformers and
PEFT, beside LoRA and the base model in one batch; what cannot be served is refused by name."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from adapter_cases import check_batch, edited
from driver import Driver, agree, decoder_of
from parity import linear_names
from running import check_greedy, read, run, tokens
from selection import extended
from tiny_models import (
    make_adapter,
    make_model,
    make_tuned,
    reference_logits,
)

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def diagonal_settings(model: Path) -> list[peft.PeftConfig]:
    names = linear_names(read_model_config(model))
    linears, down = list(names.linears), names.linears[-1]
    fan = {"fan_in_fan_out": "c_attn" in linears}
    found = [
        peft.IA3Config(target_modules=linears, feedforward_modules=[down], **fan),
        peft.IA3Config(target_modules=linears, feedforward_modules=linears, **fan),
        peft.LNTuningConfig(target_modules=list(names.norms)),
        peft.TrainableTokensConfig(token_indices=tokens(20, 1)[:6]),
    ]
    if not fan["fan_in_fan_out"]:  # PEFT has these for nn.Linear only
        found += [
            peft.RoadConfig(variant=variant, group_size=size, target_modules=linears)
            for variant, size in (("road_1", 16), ("road_2", 8), ("road_4", 2))
        ]
        found += [peft.BeftConfig(target_modules=linears)]
        found += [peft.HRAConfig(r=5, target_modules=linears, apply_GS=one) for one in (False, True)]
        blocks = {"oft_block_size": 8, "r": 0, "target_modules": linears}
        found += [
            peft.OFTConfig(**blocks),
            peft.OFTConfig(**blocks, use_cayley_neumann=False),
            peft.OFTConfig(**blocks, block_share=True, num_cayley_neumann_terms=3),
            peft.OFTConfig(**blocks, coft=True, eps=0.9),
        ]
    return found


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "gpt-neox", "phi3", "qwen2-moe"])
def test_scales_rotations_and_norms_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3)
    adapters = [
        make_tuned(workshop / f"{family}-{seed}", model, settings, seed)
        for seed, settings in enumerate(diagonal_settings(model))
    ]
    linears = linear_names(read_model_config(model)).linears
    check_batch(model, [*adapters, make_adapter(workshop / f"{family}-lora", model, 1, modules=linears)])


def test_both_stacks_of_t5(workshop: Path) -> None:
    model = make_model(workshop / "t5", "t5", seed=3)
    names = ["q", "k", "v", "o", "wi", "wo"]
    settings = peft.IA3Config(target_modules=names, feedforward_modules=["wo"], task_type="SEQ_2_SEQ_LM")
    adapter = make_tuned(workshop / "t5-ia3", model, settings)
    decoder = decoder_of(model)
    text, ids = tokens(30, 1), [0, *tokens(20, 2)]
    found = Driver(decoder, [ids, ids], [read(adapter, model), None], [text, text]).run()
    for path, logits in zip([adapter, None], found, strict=True):
        assert agree(logits, reference_logits(model, path, ids, encoder_ids=text))


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "llama-biases", seed=3)


@pytest.fixture(scope="module")
def prefetch(workshop: Path, model: Path) -> Path:
    for seed, settings in enumerate(diagonal_settings(model)):
        make_tuned(workshop / "prefetch" / str(seed), model, settings, seed)
    count = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 11}
    for seed, kind in enumerate((peft.PromptTuningConfig(**count), peft.PrefixTuningConfig(**count)), 91):
        make_tuned(workshop / "prefetch" / str(seed), model, kind, seed)
    make_adapter(workshop / "prefetch" / "90", model, 1)
    return workshop / "prefetch"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", *extended("pipeline_parallel_size")])
def test_two_ranks(ranks: str, model: Path, prefetch: Path) -> None:
    cache = LoraCacheConfig(prefetch_dir=prefetch, max_adapter_size=8)
    sizes = {ranks: 2, "max_seq_len": 64, "max_num_tokens": 48, "max_batch_size": 24}
    engine = Engine(EngineConfig(model, device="cpu", lora=cache, **sizes))
    names, ids, params = sorted(path.name for path in prefetch.iterdir()), tokens(12, 1), SamplingConfig(4)
    requests = [Request(tuple(ids), params, LoraInput(int(name))) for name in names]
    for name, events in zip(names, run(engine, *requests), strict=True):
        found = [token for event in events for token in event.token_ids]
        check_greedy(found, 4, model, prefetch / name, ids)
    engine.close()


def prompt_settings(path: Path, model: Path) -> list[Path]:
    """An adapter of each kind of virtual tokens."""
    count = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 11}
    kinds = [
        peft.PromptTuningConfig(**count),
        peft.PromptEncoderConfig(**count, encoder_hidden_size=32),
        peft.PromptEncoderConfig(**count, encoder_hidden_size=32, encoder_reparameterization_type="LSTM"),
        peft.CPTConfig(
            task_type="CAUSAL_LM",
            cpt_token_ids=tokens(11, 3),
            cpt_tokens_type_mask=[1, 2, 3, 4, 2, 3] + [2] * 5,
        ),
        peft.PrefixTuningConfig(**count),
        peft.PrefixTuningConfig(**count, prefix_projection=True, encoder_hidden_size=24),
        peft.CartridgeConfig(**count, num_frozen_tokens=2),
    ]
    config = read_model_config(model)
    if (config.head_dim, config.num_kv_heads) != (16, 2):  # PEFT would make keys and values of other sizes
        kinds = kinds[:4]
    return [make_tuned(path / str(n), model, settings, n) for n, settings in enumerate(kinds)]


@pytest.mark.parametrize("family", ["llama-biases", "gpt2", "gemma3", "granite", "cohere"])
def test_virtual_tokens(family: str, workshop: Path) -> None:
    """Logits of the prompt and greedy tokens; a second request finds their keys and values."""
    model = make_model(workshop / f"v-{family}", family, seed=3)
    adapters = prompt_settings(workshop / f"v-{family}-adapters", model)
    cache = LoraCacheConfig(prefetch_dir=adapters[0].parent)
    sizes = {"max_seq_len": 128, "max_num_tokens": 24, "max_batch_size": 16, "tokens_per_block": 8}
    engine = Engine(EngineConfig(model, device="cpu", enable_chunked_context=True, lora=cache, **sizes))
    params = SamplingConfig(max_tokens=8, return_context_logits=True)
    ids, others = tokens(20, 1), tokens(9, 2)
    requests = [Request(tuple(ids), params)] + [
        Request(tuple(ids), params, LoraInput(n)) for n in range(len(adapters))
    ]
    for path, events in zip([None, *adapters], run(engine, *requests), strict=True):
        found = [token for event in events for token in event.token_ids]
        check_greedy(found, 8, model, path, ids)
        logits, metrics = events[0].context_logits, events[-1].metrics
        assert logits is not None and agree(
            torch.from_numpy(logits), reference_logits(model, path, ids)[-20:]
        )
        assert metrics is not None and metrics.prompt_tokens == 20 and metrics.output_tokens == 8
    short = SamplingConfig(max_tokens=4)
    again = run(engine, *(Request(tuple(others), short, LoraInput(n)) for n in range(len(adapters))))
    for path, events in zip(adapters, again, strict=True):
        found = [token for event in events for token in event.token_ids]
        check_greedy(found, 4, model, path, others)
        assert events[-1].metrics is not None and events[-1].metrics.kv_reused_blocks == 1
    engine.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_virtual_tokens": 12}, r"prompt_embeddings has shape \(11, 128\), .* num_virtual_tokens to 12"),
        ({"num_layers": 7}, "num_layers must be that of the model"),
        (
            {"num_layers": 4},
            "keys of 16 values for 4 layers, those of this model have 32 and it has 2 layers",
        ),
        ({"peft_type": "PROMPT_TUNING"}, "rows of 128 values, embeddings of this model have 64"),
        ({"peft_type": "BOFT"}, "peft_type BOFT: its rotations pair inputs"),
    ],
)
def test_what_does_not_fit(
    change: dict[str, object], reason: str, model: Path, prefetch: Path, tmp_path: Path
) -> None:
    folder = edited(prefetch / "92", tmp_path / "a", **change)
    modules = lora_modules(read_model_config(model))
    with pytest.raises(AdapterInvalidError, match=reason):
        read_lora(find_source(folder), 0, ReadOptions(modules, BaseWeights(model), num_layers=2))

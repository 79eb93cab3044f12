"""Protects engines of several processes for every kind of model: what they answer, with adapters mixed and
prefixes reused, is what one process answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_adapters import make_classifier
from running import answers, pooled, read, run, tokens, tokens_of
from selection import extended
from test_encoders import BERT_LINEARS, LINEARS, make_encoder, prompt
from tiny_models import make_adapter, make_model

from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.request import LoraInput, Pooling, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread", "forked_ranks")

NEW = 8
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
BOTH = {**TENSOR, **STAGES}
MIXED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
# A family, settings of its model, the modules of adapters, and the ranks.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, int]]] = {
    "linear attention": (
        "qwen3-next", MIXED, ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"), TENSOR,
    ),
    "latent attention": ("deepseek-v3", {}, ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"), TENSOR),
    "layers of two sizes that share keys": (
        "gemma4-shared", {}, ("q_proj", "v_proj", "o_proj", "gate_proj", "per_layer_input_gate"), STAGES,
    ),
    "experts beside an MLP": (
        "gemma4-moe", {"num_experts": 4}, ("q_proj", "k_proj", "o_proj", "down_proj"),
        {**TENSOR, "moe_expert_parallel_size": 2},
    ),
    "several residual streams": (
        "gemma3n", {}, ("q_proj", "v_proj", "down_proj", "linear_left", "modality_router"), STAGES,
    ),
    "mamba-2": (
        "granite4", {**MIXED, "mamba_n_groups": 1}, ("in_proj", "out_proj", "q_proj", "o_proj"), TENSOR,
    ),
    "mamba-2 beside attention": ("falcon-h1", {}, ("in_proj", "q_proj", "down_proj"), STAGES),
    "experts of fewer dimensions": (
        "nemotron-h-moe-latent", {"layers_block_type": ["linear_attention", "full_attention", "moe"] * 2},
        ("in_proj", "v_proj", "fc1_latent_proj", "fc2_latent_proj"), STAGES,
    ),
    "norms after the sums": ("opt-350m", {}, ("q_proj", "out_proj", "fc1", "fc2"), TENSOR),
    "t5": ("t5", {}, ("q", "v", "o", "wi", "wo"), TENSOR),
    "bart of stages": ("bart", {}, ("q_proj", "v_proj", "out_proj", "fc1", "fc2"), STAGES),
}  # fmt: skip
FIRST = (  # test_parallel_model.py has the logits of each family
    "linear attention", "latent attention", "layers of two sizes that share keys", "experts beside an MLP",
    "mamba-2 beside attention", "t5", "bart of stages",
)  # fmt: skip


def engine_of(model: Path, **settings: Any) -> Engine:
    limits = {"max_seq_len": 96, "tokens_per_block": 4, "max_batch_size": 4, "max_num_tokens": 48}
    return Engine(EngineConfig(model, device="cpu", dtype="float32", **limits, **settings))


@pytest.mark.parametrize("name", [*FIRST, *extended(*(name for name in CASES if name not in FIRST))])
def test_answers_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    family, settings, modules, ranks = CASES[name]
    model = make_model(tmp_path / "model", family, seed=4, **settings)
    folders = [
        make_adapter(tmp_path / str(task), model, seed=task, rank=4 * task, modules=modules)
        for task in (1, 2)
    ]
    loras = [None, *(read(folder, model, task) for task, folder in enumerate(folders, 1))]
    long, params = tokens(60), SamplingConfig(max_tokens=NEW)
    encodes = family in ("t5", "t5-v1.1", "bart")
    requests = [
        Request((0,), params, lora, encoder_prompt=tuple(tokens(20 + 4 * i, i)))
        if encodes
        else Request(tuple(long[: 60 - 11 * (i % 3)]), params, lora)
        for i, lora in enumerate(loras * 2)
    ]
    plain = engine_of(model)
    expected = [answers(plain, *requests) for _ in range(2)]
    engine = engine_of(model, **ranks)
    try:
        assert [answers(engine, *requests) for _ in range(2)] == expected
        assert engine.stats().max_adapters_in_step > 1
        assert encodes or engine.stats().kv_tokens_reused
    finally:
        engine.close()


def check_pooled(model: Path, requests: list[Request], **ranks: int) -> None:
    engine = engine_of(model, **ranks)
    try:
        check_pooled_by(engine, model, requests)
    finally:
        engine.close()


def check_pooled_by(engine: Engine, model: Path, requests: list[Request]) -> None:
    expected = pooled(engine_of(model), *requests)
    for ours, theirs in zip(pooled(engine, *requests), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("bert", TENSOR), ("bert", STAGES), ("modernbert", TENSOR), ("gemma3_text", STAGES),
        *(pytest.param(family, BOTH, marks=pytest.mark.extended) for family in LINEARS),
    ],
)  # fmt: skip
def test_encoders_and_their_heads(family: str, ranks: dict[str, int], tmp_path: Path) -> None:
    """The adapter brings a head, and of BERT biases; its three layers make stages that differ."""
    bert = family == "bert"
    kind, mode = "AutoModelForSequenceClassification", "last" if family == "gemma3_text" else "cls"
    more = {"num_hidden_layers": 3} if bert else {}
    model = make_encoder(tmp_path / "model", family, kind, num_labels=4, **more)
    linears = LINEARS.get(family, BERT_LINEARS)
    bias = "lora_only" if bert else "none"
    make_classifier(tmp_path / "own", model, 3, 1, target_modules=linears, bias=bias)
    lora: LoraInput = read(tmp_path / "own", model, 1)
    x, y, first = tuple(prompt(40, 1)), tuple(prompt(17, 2)), 9 if bert else 0
    requests = [
        Request(ids, lora=own, pooling=Pooling(how, head, start))
        for ids, own, how, head, start in (
            (x, None, mode, True, 0), (x, lora, mode, True, 0), (y, None, "mean", False, 0),
            (y, None, "all", False, first), (y, lora, "all", False, 0),
        )
    ]  # fmt: skip
    check_pooled(model, requests, **ranks)


def test_hidden_states_of_a_decoder_come_from_its_last_stage(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=2)
    lora = read(make_adapter(tmp_path / "1", model, seed=1, rank=8), model, 1)
    ids = tuple(tokens(60))
    both = [Request(ids, SamplingConfig(max_tokens=NEW)), Request(ids[:20], SamplingConfig(max_tokens=2))]
    asked = [
        Request(ids[: 50 - n], lora=own, pooling=Pooling(mode))
        for n, (own, mode) in enumerate([(None, "last"), (lora, "mean"), (lora, "all"), (None, "mean")])
    ]
    engine = engine_of(model, **STAGES)
    try:
        check_pooled_by(engine, model, asked)
        # Beside prompts that are answered with tokens.
        events = run(engine, both[0], *asked, both[1])
        assert [tokens_of(events[0]), tokens_of(events[-1])] == answers(engine_of(model), *both)
    finally:
        engine.close()

"""Protects rotary scaling below and beyond the original length, and across it: the tokens of transformers'
`generate` with its cache, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, agree, decoder_of
from running import answers, tokens
from tiny_configs import LLAMA3, LONGROPE, YARN
from tiny_models import load_transformers, make_model, reference_logits

from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.model.checkpoint import read_model_config
from manylora.model.rope import LEAST_KEPT, MOST_KEPT, RotaryTable, make_rope
from manylora.request import Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL = 24
LONG = {**LONGROPE, "original_max_position_embeddings": ORIGINAL}
SHORT = {"max_position_embeddings": ORIGINAL}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", {**SHORT, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {**SHORT, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "dynamic, part of a head": (
        "gpt-neox", {**SHORT, "rotary_pct": 0.5, "rope_scaling": {"type": "dynamic", "factor": 3.5}}
    ),
    "llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": ORIGINAL}}),
    "yarn": ("llama", {**SHORT, "rope_scaling": {**YARN, "original_max_position_embeddings": ORIGINAL}}),
    "longrope": ("llama", {"rope_scaling": LONG}),
    "longrope of Phi-3": (
        "phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": ORIGINAL}
    ),
}  # fmt: skip
# Lengths of prompts: to the original length and over it while tokens are generated, and beyond it.
PROMPTS, NEW = (5, 18, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 40), 12


def test_truncate_of_a_kind_of_layer_has_no_effect(tmp_path: Path) -> None:
    """transformers looks for it beside the kinds of layers only."""
    yarn = {"rope_type": "yarn", "rope_theta": 37000.0, "factor": 4.0, "truncate": False}
    yarn["original_max_position_embeddings"] = ORIGINAL
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": yarn}
    model = make_model(tmp_path / "model", "gemma3", seed=8, rope_parameters=kinds)
    [found] = Driver(decoder_of(model), [tokens(40)], [None]).run()
    assert agree(found, reference_logits(model, None, tokens(40)))


@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic"])
def test_positions_are_turned_by_the_same_bits_whenever_they_come(tmp_path: Path, kind: str) -> None:
    family, options = VARIANTS[kind]
    rope = make_rope(read_model_config(make_model(tmp_path, family, **options)), torch.device("cpu"))
    table = RotaryTable(rope, torch.float32, torch.device("cpu"))
    for at in ([3], [], [0, LEAST_KEPT, 3, LEAST_KEPT - 1], range(700), [MOST_KEPT - 1, 5], [MOST_KEPT, 5]):
        positions = torch.tensor(list(at), dtype=torch.long)
        angles = rope.angles(positions, None)
        for found, expected in zip(table(positions, None), (angles.cos(), angles.sin()), strict=True):
            assert torch.equal(found, expected * rope.factor)


def reference(model: Path, prompt: list[int], count: int) -> list[int]:
    """By a new model: transformers' `dynamic` remembers the longest sequence that it has seen."""
    made = load_transformers(model).eval()
    made.generation_config.eos_token_id = None
    found = made.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=True)
    return found[0, len(prompt) :].tolist()


def make(folder: Path, name: str) -> Path:
    family, settings = VARIANTS[name]
    return make_model(folder / "model", family, seed=8, **settings)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_prompt_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    decoder = decoder_of(model)
    sequences = [tokens(length, length) for length in PROMPTS]
    for ids, logits in zip(sequences, Driver(decoder, sequences, [None] * len(PROMPTS)).run(), strict=True):
        with torch.inference_mode():
            assert agree(logits, load_transformers(model)(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize(
    ("name", "overlap"),
    [*((name, False) for name in VARIANTS), ("dynamic", True), ("longrope of Phi-3", True)],
)
def test_greedy_tokens_are_those_of_generate(name: str, overlap: bool, tmp_path: Path) -> None:
    """Prompts in chunks, all in one batch, and once more when their blocks are there to be reused."""
    model = make(tmp_path, name)
    settings: dict[str, Any] = {"max_num_tokens": 16, "max_batch_size": 8, "tokens_per_block": 4}
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, enable_overlap=overlap, **settings))
    prompts = [tokens(length, length) for length in PROMPTS]
    prompts.append(prompts[-1][:ORIGINAL])  # the same beginning, rotated in another way
    requests = [Request(tuple(prompt), SamplingConfig(max_tokens=NEW)) for prompt in prompts]
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    assert answers(engine, *requests) == expected
    assert answers(engine, *requests[::-1]) == expected[::-1]
    continued = [(*request.prompt, *tail[:6]) for request, tail in zip(requests, expected, strict=True)]
    again = [Request(prompt, SamplingConfig(max_tokens=4)) for prompt in continued]
    assert answers(engine, *again) == [reference(model, list(prompt), 4) for prompt in continued]
    engine.close()


def test_a_preempted_sequence_and_one_with_a_draft(tmp_path: Path) -> None:
    for name in ("dynamic", "longrope", "longrope of Phi-3"):
        model = make(tmp_path / name, name)
        config = EngineConfig(
            model, device="cpu", max_seq_len=64, max_batch_size=8, tokens_per_block=4,
            batch_scheduler_policy="max_utilization", max_tokens_in_paged_kv_cache=96,
        )  # fmt: skip
        engine = Engine(config)
        prompts = [tokens(length, length) for length in (18, 20, 22, 30)]
        expected = [reference(model, prompt, NEW) for prompt in prompts]
        requests = [Request(tuple(prompt), SamplingConfig(max_tokens=NEW)) for prompt in prompts]
        assert answers(engine, *requests) == expected
        assert engine.stats().preemptions > 0
        draft = tuple(expected[2][:6])
        drafted = Request(tuple(prompts[2]), SamplingConfig(max_tokens=NEW), draft=draft)
        assert answers(engine, drafted) == [expected[2]]
        engine.close()


def test_beams_may_not_cross_where_all_is_computed_again(tmp_path: Path) -> None:
    model = make(tmp_path, "longrope of Phi-3")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, max_beam_width=2))
    params = SamplingConfig(max_tokens=5, beam_width=2)
    with pytest.raises(RequestError, match=r"beam search cannot cross 24 tokens.* at most 4 tokens"):
        engine.submit(engine.prepare(Request(tuple(tokens(20)), params)))
    for length in (19, 30):
        engine.submit(engine.prepare(Request(tuple(tokens(length)), params)))
    while engine.has_work:
        assert all(event.error is None for _, event in engine.step())
    engine.close()


def test_how_long_a_sequence_may_be(tmp_path: Path) -> None:
    for name, longest in (("linear", 96), ("dynamic", 96), ("yarn", 96), ("llama3", 256), ("longrope", 256)):
        model = make(tmp_path / name, name)
        assert read_model_config(model).max_seq_len == longest
        engine = Engine(EngineConfig(model, device="cpu", max_batch_size=2))
        assert engine.max_seq_len == longest
        engine.close()

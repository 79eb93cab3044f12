"""Protects what `LLM` hands through to the engine: beams against transformers, guides, biases, logits,
metrics, adapters of every source; and that tensors are let go when they have arrived in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_adapter, make_model

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams

PROMPT = [72, 101, 108, 108, 111, 33, 5, 9, 77]
NEW = 10
QKV = ["attn_q", "attn_k", "attn_v", "attn_qkv"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model(path / "model", seed=2)
    make_adapter(path / "plain", path / "model", seed=5, rank=4)
    make_adapter(path / "dora", path / "model", seed=6, rank=4, use_dora=True)
    return path


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    config = LoraConfig(lora_target_modules=QKV, max_lora_rank=16, max_loras=2, max_cpu_loras=2)
    with LLM(
        tiny / "model",
        lora_config=config,
        device="cpu",
        guided_decoding_backend="llguidance",
        dtype="float32",
    ) as made:
        yield made


def ask(llm: LLM, lora: LoRARequest | None = None, prompt: object = PROMPT, **options: object):
    params = SamplingParams(**{"max_tokens": NEW, **options})  # type: ignore[arg-type]
    return llm.generate(prompt, params, lora, use_tqdm=False)  # type: ignore[arg-type]


def plain(tiny: Path) -> LoRARequest:
    return LoRARequest("plain", 1, str(tiny / "plain"))


def test_beams_stop_at_tokens_and_at_the_models_longest_sequence(llm: LLM) -> None:
    greedy = ask(llm, ignore_eos=True).outputs[0].token_ids
    stopped = ask(llm, use_beam_search=True, n=2, stop_token_ids=[greedy[2]], ignore_eos=True).outputs
    reasons = [one.stop_reason for one in stopped if one.finish_reason == "stop"]
    assert reasons and set(reasons) == {greedy[2]}
    assert all(greedy[2] not in one.token_ids for one in stopped)
    near_the_end = ask(llm, prompt=[7] * 250, use_beam_search=True, n=2, ignore_eos=True).outputs
    assert [(one.length, one.finish_reason) for one in near_the_end] == [(6, "length")] * 2
    with pytest.raises(ValueError, match="cannot stream"):
        llm.generate_async(PROMPT, SamplingParams(use_beam_search=True, n=2), streaming=True)
    result = llm.generate_async(PROMPT, SamplingParams(use_beam_search=True, n=2, max_tokens=200))
    result.abort()
    assert result.result(60).outputs[0].finish_reason in ("cancelled", "stop", "length")


def test_logits_fit_the_tokens_where_a_text_ends_the_output(llm: LLM) -> None:
    bias = torch.zeros(272)
    bias[65] = 1000  # b
    options = {"embedding_bias": bias, "stop": "bbb", "return_generation_logits": True, "max_tokens": 200}
    one = ask(llm, **options).outputs[0]
    assert (one.text, one.length, one.stop_reason) == ("", 3, "bbb")
    assert one.generation_logits is not None and one.generation_logits.shape == (3, 272)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    pieces = list(llm.generate_async(PROMPT, params, streaming=True))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    np.testing.assert_array_equal(pieces[-1].outputs[0].generation_logits, one.generation_logits)
    assert ask(llm).outputs[0].generation_logits is None


def test_metrics_tell_times_and_where_the_adapter_was(tiny: Path) -> None:
    config = LoraConfig(lora_target_modules=QKV[:3], max_lora_rank=4, max_loras=1, max_cpu_loras=8)
    for number in (2, 3, 4, 5):
        make_adapter(tiny / f"a{number}", tiny / "model", seed=number, rank=4)
    with LLM(tiny / "model", lora_config=config, device="cpu") as llm:
        requests = [LoRARequest(f"a{i}", i, str(tiny / f"a{i}")) for i in (2, 2, 3, 4, 5, 2)]
        outputs = [ask(llm), *(ask(llm, request) for request in requests)]
        tiers = [output.adapter_tier for output in outputs]
        assert tiers == ["", "disk", "device", "disk", "disk", "disk", "host"]
    for output in outputs:
        assert output.metrics is not None and output.metrics.output_tokens == output.outputs[0].length
        times = output.timings
        assert times.first_token is not None and times.finished is not None
        assert 0 < times.first_token < times.finished

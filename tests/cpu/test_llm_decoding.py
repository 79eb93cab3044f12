"""Protects what `LLM` hands through to the engine: beams against transformers, guides, biases, logits,
metrics, adapters of every source; and that tensors are let go when they have arrived in the cache."""

from __future__ import annotations

import gc
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from penalties import most_probable, tensorrt_llm
from safetensors.torch import load_file
from tiny_models import make_adapter, make_model, reference_generate, reference_logits
from waiting import wait_for

from manylora import LLM, GuidedDecodingParams, LoraConfig, LoRARequest, SamplingParams
from manylora.errors import RequestError

PROMPT = [72, 101, 108, 108, 111, 33, 5, 9, 77]
NEW = 10
NEMO = "model.language_model.encoder.layers.{}.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"
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


def beams_of_transformers(
    model: Path, adapter: Path | None, end_id: int, **options: object
) -> list[list[int]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = loaded if adapter is None else PeftModel.from_pretrained(loaded, str(adapter))
    rows = loaded.eval().generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=end_id,
        pad_token_id=258, **options,
    )[:, len(PROMPT) :].tolist()  # fmt: skip
    return [row[: row.index(end_id)] if end_id in row else row for row in rows]


def test_the_largest_penalties_of_a_length_are_computed(llm: LLM) -> None:
    """And a larger one is refused: what is no float would end the engine."""
    for penalty in (-30.0, 30.0):
        output = ask(llm, use_beam_search=True, best_of=2, length_penalty=penalty, early_stopping=0)
        assert output.outputs[0].length == NEW
    with pytest.raises(RequestError, match="length_penalty must be from -30 to 30"):
        ask(llm, use_beam_search=True, best_of=2, length_penalty=1e4)


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize(("penalty", "early"), [(1.0, 1), (0.0, 0)])
def test_beams_are_those_of_transformers(
    llm: LLM, tiny: Path, with_adapter: bool, penalty: float, early: int
) -> None:
    folder = tiny / "plain" if with_adapter else None
    end_id = reference_generate(tiny / "model", folder, PROMPT, NEW)[3]
    output = ask(
        llm, plain(tiny) if with_adapter else None, use_beam_search=True, n=3, best_of=4, end_id=end_id,
        length_penalty=penalty, early_stopping=early, logprobs=0,
    )  # fmt: skip
    expected = beams_of_transformers(
        tiny / "model", folder, end_id, num_beams=4, num_return_sequences=3, length_penalty=penalty,
        early_stopping=bool(early),
    )  # fmt: skip
    assert [one.token_ids for one in output.outputs] == expected
    for index, one in enumerate(output.outputs):
        assert one.index == index
        assert one.finish_reason == ("length" if one.length == NEW else "stop")
        assert one.logprobs is not None and len(one.logprobs) == one.length
        total = sum(entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True))
        assert one.cumulative_logprob is not None
        ended = one.finish_reason == "stop"  # then the end token counts too
        assert one.cumulative_logprob <= total + 1e-4 if ended else abs(one.cumulative_logprob - total) < 1e-4


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


def test_an_output_is_what_its_guide_allows(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    guides = [
        GuidedDecodingParams(regex="[a-c]{4}x"),
        GuidedDecodingParams(json=schema),
        GuidedDecodingParams(grammar='root ::= "yes" | "no"'),
        None,
    ]
    params = [SamplingParams(max_tokens=60, guided_decoding=guide) for guide in guides]
    for one in (params[1],):
        one.bad = ["0", "1", "2", "3"]  # a random model would write digits for ever
        one.max_tokens = 200
    texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    assert re.fullmatch("[a-c]{4}x", texts[0])
    assert texts[2] in ("yes", "no")
    if len(texts[1]) < 190:
        assert isinstance(json.loads(texts[1])["n"], int)
    assert texts[1].lstrip().startswith("{")
    streamed = llm.generate_async(PROMPT, params[0], streaming=True)
    assert "".join(piece.outputs[0].text_diff for piece in streamed) == texts[0]
    with pytest.raises(RequestError, match="not a valid regex"):
        ask(llm, guided_decoding=GuidedDecodingParams(regex="("))


def test_a_bias_decides_and_top_p_decays_to_greedy(llm: LLM) -> None:
    bias = torch.zeros(272)
    bias[65] = 1000  # b
    assert ask(llm, embedding_bias=bias).outputs[0].token_ids == [65] * NEW
    assert ask(llm, embedding_bias=bias.tolist()[:66]).outputs[0].text == "b" * NEW
    greedy = ask(llm, ignore_eos=True).outputs[0].token_ids
    hot = {"top_p": 0.99, "temperature": 5.0, "ignore_eos": True, "seed": 3}
    free = ask(llm, **hot).outputs[0].token_ids
    cooled = ask(llm, **hot, top_p_decay=1e-9, top_p_min=1e-9).outputs[0].token_ids
    assert cooled[0] == free[0] and cooled[1:] != free[1:]
    assert ask(llm, prompt=[*PROMPT, cooled[0]], ignore_eos=True).outputs[0].token_ids[:-1] == cooled[1:]
    reset = ask(llm, **hot, top_p_decay=1e-9, top_p_min=1e-9, top_p_reset_ids=free[0]).outputs[0].token_ids
    assert reset[:2] == free[:2]
    assert free != greedy


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.5, "top_k": 1}, {"prompt_ignore_length": 8}, {"prompt_ignore_length": 99}]
)
def test_penalties_count_the_prompt_as_far_as_they_are_told(llm: LLM, tiny: Path, given: dict) -> None:
    case = {"presence_penalty": -2.0, "frequency_penalty": -1.0, **given}
    truth = ask(llm, ignore_eos=True, **case).outputs[0].token_ids
    case.pop("top_k", None)
    assert truth == most_probable(tensorrt_llm, tiny / "model", None, PROMPT, NEW, **case)


def test_a_temperature_asks_for_sampling(llm: LLM) -> None:
    hot = {"temperature": 5.0, "ignore_eos": True}
    texts = {tuple(ask(llm, seed=seed, **hot).outputs[0].token_ids) for seed in range(3)}
    assert len(texts) == 3
    greedy = ask(llm, ignore_eos=True).outputs[0].token_ids
    assert ask(llm, temperature=0.0, ignore_eos=True).outputs[0].token_ids == greedy
    assert len(ask(llm, n=2, **hot).outputs) == 2


@pytest.mark.parametrize("with_adapter", [False, True])
def test_logits_are_those_of_transformers(llm: LLM, tiny: Path, with_adapter: bool) -> None:
    options = {"return_context_logits": True, "return_generation_logits": True, "ignore_eos": True}
    output = ask(llm, plain(tiny) if with_adapter else None, **options)
    one = output.outputs[0]
    ids = [*PROMPT, *one.token_ids]
    expected = reference_logits(tiny / "model", tiny / "plain" if with_adapter else None, ids).numpy()
    close = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(output.context_logits, expected[: len(PROMPT)], **close)
    np.testing.assert_allclose(one.generation_logits, expected[len(PROMPT) - 1 : -1], **close)


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


def test_dora_and_nemo_are_read_as_the_reference_reads_them(llm: LLM, tiny: Path) -> None:
    expected = reference_generate(tiny / "model", tiny / "dora", PROMPT, NEW)
    dora = LoRARequest("dora", 10, str(tiny / "dora"))
    assert ask(llm, dora, ignore_eos=True).outputs[0].token_ids == expected
    nemo = LoRARequest("nemo", 11, str(write_nemo(tiny / "nemo", tiny / "plain")), "nemo")
    base = ask(llm, ignore_eos=True).outputs[0].token_ids
    answer = ask(llm, nemo, ignore_eos=True).outputs[0].token_ids
    assert answer != base
    by_file = LoRARequest("nemo", 12, str(tiny / "nemo" / "adapter.nemo"), "nemo")
    assert ask(llm, by_file, ignore_eos=True).outputs[0].token_ids == answer
    assert ask(llm, LoRARequest("nemo", 11, None), ignore_eos=True).outputs[0].token_ids == answer
    with pytest.raises(RequestError, match="is not a checkpoint of kind hf, it is nemo"):
        ask(llm, LoRARequest("nemo", 13, str(tiny / "nemo")))
    config = LoraConfig(lora_dir=[str(tiny / "nemo")], lora_ckpt_source="nemo", max_lora_rank=16)
    with LLM(tiny / "model", lora_config=config, device="cpu", dtype="float32") as other:
        assert ask(other, nemo, ignore_eos=True).outputs[0].token_ids == answer


def write_nemo(folder: Path, adapter: Path) -> Path:
    """A NeMo archive of a fused q, k, v adapter: q's A for all, each B scaled."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    state = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.{{}}_proj.lora_{{}}.weight"
        state[NEMO.format(layer, "in")] = tensors[name.format("q", "A")]
        state[NEMO.format(layer, "out")] = torch.cat([tensors[name.format(part, "B")] for part in "qkv"])
    folder.mkdir()
    torch.save(state, folder / "model_weights.ckpt")
    (folder / "model_config.yaml").write_text("model: {}\n")
    with tarfile.open(folder / "adapter.nemo", "w") as archive:
        for name in ("model_weights.ckpt", "model_config.yaml"):
            archive.add(folder / name, name)
            (folder / name).unlink()
    return folder


def test_tensors_are_let_go_while_their_request_runs(
    tiny: Path, held_steps: Callable[[int], threading.Event]
) -> None:
    config = LoraConfig(lora_target_modules=QKV[:3], max_lora_rank=4, max_loras=2, max_cpu_loras=2)
    params = SamplingParams(max_tokens=240, ignore_eos=True)
    with LLM(tiny / "model", lora_config=config, device="cpu") as llm:
        go_on = held_steps(100)
        gc.disable()  # nothing may depend on the collector
        try:
            result = llm.generate_async(PROMPT, params, plain(tiny), streaming=True)
            next(iter(result))
            loaded = llm._loop._engine.adapters.loader._in_memory
            wait_for(lambda: not loaded)
            assert not result.finished
        finally:
            go_on.set()
            gc.enable()
        result.abort()
        assert result.result(60).finished

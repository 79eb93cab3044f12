"""Protects the wide contract: beams, samples, logits, statistics, biases, guides, drafts, names and metrics,
through the doors that clients use."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from dashboard import without_samples
from launched import scrape, scrape_until
from servers import Running, World
from test_server import NEW, PROMPT, ask, generate, inputs, lora, new_ids, tensor
from tiny_models import load_transformers, reference_generate, reference_logits
from tritonclient.utils import InferenceServerException

from manylora.generation.tokenizer import Tokenizer
from manylora.stats import EngineStats
from manylora.wire.metrics import STAMP, engine_samples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from penalties import most_probable, tensorrt_llm

STATISTICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


def scalar(value: Any, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype)


def test_beams_come_in_one_response(server: Running) -> None:
    extra = {
        "beam_width": scalar(3, np.int32),
        "return_log_probs": scalar(True, bool),
        "end_id": scalar(reference_generate_first(server), np.int32),
        "exclude_input_in_output": scalar(True, bool),
    }
    [result] = ask(server, inputs(**extra))
    ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
    assert ids.shape[:2] == (1, 3)
    assert lengths.shape == (1, 3)
    for row, length in zip(ids[0], lengths[0], strict=True):
        assert (row[length:] == -1).all()
        assert (row[:length] >= 0).all()
    assert result.as_numpy("cum_log_probs").shape == (1, 3)
    assert result.as_numpy("output_log_probs").shape == ids.shape
    body = {"text_input": "Hello", "max_tokens": 4, "beam_width": 2, "end_id": -1}
    assert len(json.loads(generate(server, **body))["text_output"]) == 2
    with pytest.raises(InferenceServerException, match="streaming needs beam_width 1"):
        ask(server, inputs(beam_width=scalar(2, np.int32), streaming=scalar(True, bool)))


def reference_generate_first(server: Running) -> int:
    return new_ids(ask(server, inputs(new=2)))[-1]


def test_samples_carry_their_index_and_repeat_by_seed(server: Running) -> None:
    extra = {
        "num_return_sequences": scalar(3, np.int32),
        "runtime_top_p": scalar(0.95, np.float32),
        "runtime_top_k": scalar(0, np.int32),
        "temperature": scalar(3.0, np.float32),
        "random_seed": scalar(7, np.uint64),
        "runtime_top_p_decay": scalar(0.9, np.float32),
        "runtime_top_p_min": scalar(0.5, np.float32),
        "runtime_top_p_reset_ids": scalar(5, np.int32),
    }

    def run() -> dict[int, list[int]]:
        results = ask(server, inputs(**extra))
        return {int(r.as_numpy("sequence_index")[0, 0]): new_ids([r]) for r in results}

    first = run()
    assert sorted(first) == [0, 1, 2]
    assert len({tuple(ids) for ids in first.values()}) > 1
    assert run() == first


def test_logits_and_log_probs(server: Running, world: World) -> None:
    names = ("return_log_probs", "return_context_logits", "return_generation_logits")
    prompt = [3, 1, 4, 1, 5, 9]
    [result] = ask(server, inputs(prompt, 4, **{name: scalar(True, bool) for name in names}))
    ids = new_ids([result])
    expected = reference_logits(world.model, None, ids).numpy()
    np.testing.assert_allclose(result.as_numpy("context_logits")[0], expected[:6], atol=1e-3)
    generation = result.as_numpy("generation_logits")
    assert generation.shape == (1, 1, 4, 272)
    np.testing.assert_allclose(generation[0, 0], expected[5:9], atol=1e-3)
    log_probs = expected[5:9] - np.logaddexp.reduce(expected[5:9], axis=-1, keepdims=True)
    wanted = [log_probs[i, token] for i, token in enumerate(ids[6:])]
    np.testing.assert_allclose(result.as_numpy("output_log_probs")[0, 0], wanted, atol=1e-3)
    assert result.as_numpy("cum_log_probs")[0, 0] == pytest.approx(sum(wanted), abs=1e-2)
    chunks = ask(server, inputs(prompt, 4, streaming=scalar(True, bool), return_log_probs=scalar(True, bool)))
    np.testing.assert_allclose(chunks[-1].as_numpy("output_log_probs")[0, 0], wanted, atol=1e-3)
    flags = {name: scalar(True, bool) for name in ("streaming", *names)}
    chunks = ask(server, inputs(prompt, 4, **flags))
    for chunk in chunks:
        np.testing.assert_array_equal(chunk.as_numpy("context_logits"), result.as_numpy("context_logits"))
    rows = np.concatenate([chunk.as_numpy("generation_logits")[0, 0] for chunk in chunks])
    np.testing.assert_allclose(rows, generation[0, 0], atol=1e-5)


@pytest.mark.parametrize("switch", ["return_perf_metrics", "return_kv_cache_reuse_stats"])
def test_statistics_under_both_names(server: Running, switch: str) -> None:
    prompt = list(range(10, 90))
    for _ in range(2):
        [result] = ask(server, inputs(prompt, 4, **{switch: scalar(True, bool)}))
    values = {name: result.as_numpy(name) for name in STATISTICS}
    assert all(value.shape == (1, 1) for value in values.values())
    found = {name: value[0, 0] for name, value in values.items()}
    assert found["kv_cache_reused_blocks"] == 2
    assert found["kv_cache_alloc_total_blocks"] == 1
    assert found["kv_cache_alloc_new_blocks"] <= 1
    times = [found[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0
    [plain] = ask(server, inputs(prompt, 4))
    assert plain.as_numpy("arrival_time_ns") is None


def test_penalties_count_the_prompt_through_every_model(server: Running, world: World) -> None:
    """prompt_ignore_length says how much of it not; temperature is applied before them."""
    case = {"presence_penalty": -4.0, "frequency_penalty": -1.0, "temperature": 0.5}
    sent = {name: scalar(value, np.float32) for name, value in case.items()}
    sent |= {"runtime_top_k": scalar(1, np.int32), "exclude_input_in_output": scalar(True, bool)}
    found = []
    for ignored in (None, 3, 2**31 - 1):
        given = {} if ignored is None else {"prompt_ignore_length": ignored}
        wire = {name: scalar(value, np.int32) for name, value in given.items()}
        found.append(new_ids(ask(server, inputs(**sent, **wire))))
        assert found[-1] == most_probable(tensorrt_llm, world.model, None, PROMPT, NEW, **case, **given)
    assert found[0] != found[2]
    tokenizer = Tokenizer(world.model)
    body = {
        "text_input": "Hello",
        "max_tokens": NEW,
        "end_id": -1,
        "exclude_input_in_output": True,
        "top_k": 1,
    }
    for given in ({}, {"prompt_ignore_length": 2}):
        ids = tokenizer.encode("Hello")
        truth = tokenizer.decode(most_probable(tensorrt_llm, world.model, None, ids, NEW, **case, **given))
        assert json.loads(generate(server, **body, **case, **given))["text_output"] == truth
        assert bls(server, **body, **case, **given)["text_output"] == truth
        assert bls(server, **body, **case, **given, num_draft_tokens=3)["text_output"] == truth


def test_a_draft_is_counted(server: Running) -> None:
    truth = new_ids(ask(server, inputs(new=6)))[len(PROMPT) :]
    draft = np.array([[*truth[:3], (truth[3] + 1) % 200]], np.int32)
    [result] = ask(server, inputs(new=6, draft_input_ids=draft, return_perf_metrics=scalar(True, bool)))
    assert new_ids([result])[len(PROMPT) :] == truth
    assert result.as_numpy("total_draft_tokens")[0, 0] == 4
    assert result.as_numpy("total_accepted_draft_tokens")[0, 0] == 3
    assert result.as_numpy("acceptance_rate")[0, 0] == pytest.approx(0.75)


def test_biases_and_guides_through_the_ensemble(server: Running) -> None:
    body = {"text_input": "Hello", "max_tokens": 5, "exclude_input_in_output": True}
    biased = generate(server, **body, embedding_bias_words=["x"], embedding_bias_weights=[100.0])
    assert json.loads(biased)["text_output"] == "xxxxx"
    assert b"must come together" in generate(server, **body, embedding_bias_words=["x"])
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(red|blue) \\d"}
    answer = json.loads(generate(server, **body | {"max_tokens": 20}, **guide))
    assert answer["text_output"][:-1] in ("red ", "blue ")
    assert answer["finish_reason"] == "stop"
    bad = generate(server, **body, guided_decoding_guide_type="regex", guided_decoding_guide="(")
    assert b"guided_decoding_guide is not a valid regex" in bad


def test_an_adapter_by_its_name_and_the_tier_it_was_found_in(server: Running, world: World) -> None:
    expected = reference_generate(world.model, world.adapters[3], PROMPT, NEW)
    tiers = []
    for source in ("", "hf"):
        extra = {"lora_name": np.array([[b"tiny-three"]], np.object_)}
        if source:
            extra["lora_ckpt_source"] = np.array([[source.encode()]], np.object_)
        [result] = ask(server, inputs(**extra))
        assert new_ids([result])[len(PROMPT) :] == expected
        tiers.append(result.as_numpy("lora_cache_tier")[0, 0])
    assert tiers[0] in (b"disk", b"host", b"device")  # an equal adapter may be there under an id
    assert tiers[1] == b"device"
    [fresh] = ask(server, inputs(**lora(77) | unseen_adapter()))
    assert fresh.as_numpy("lora_cache_tier")[0, 0] == b"wire"
    [base] = ask(server, inputs())
    assert base.as_numpy("lora_cache_tier") is None
    assert base.as_numpy("finish_reason")[0, 0] == b"length"
    for name, words in (
        ("nobody", "'nobody' is not in this server's catalog"),
        ("../a1", "is not in this"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            ask(server, inputs(lora_name=np.array([[name.encode()]], np.object_)))
    with pytest.raises(InferenceServerException, match="lora_name stands alone"):
        ask(server, inputs(lora_name=np.array([[b"tiny-three"]], np.object_), **lora(1)))
    with pytest.raises(InferenceServerException, match="is not a checkpoint of kind nemo"):
        named = {"lora_name": np.array([[b"tiny-three"]], np.object_)}
        ask(server, inputs(**named, lora_ckpt_source=np.array([[b"nemo"]], np.object_)))


def test_adapters_act_together_and_with_scales(server: Running, world: World) -> None:
    scales = np.array([[0.5, -1.25]], np.float32)
    for task_id in (1, 2):
        ask(server, inputs(**lora(task_id, world)))
    ids = {"lora_mix_task_ids": np.array([[1, 2]], np.uint64), "lora_mix_scales": scales}
    [result] = ask(server, inputs(**ids))
    answer = new_ids([result])[len(PROMPT) :]
    assert len(answer) == NEW
    assert answer == most_probable_of_mix(world, (1, 2), scales[0], answer)
    names = {"lora_mix_names": np.array([[b"tiny-three"]], np.object_)}
    [result] = ask(server, inputs(**names))
    assert new_ids([result])[len(PROMPT) :] == reference_generate(world.model, world.adapters[3], PROMPT, NEW)
    for extra, words in (
        (ids | lora(1), "lora_mix_task_ids stands alone: leave lora_task_id out"),
        ({"lora_mix_scales": scales}, "lora_mix_scales need lora_mix_task_ids or lora_mix_names"),
        (names | {"lora_mix_scales": scales}, "one value for each of lora_mix_names: 1"),
        ({"lora_mix_task_ids": np.array([[1, 8888]], np.uint64)}, "LoRA task 8888 not found in cache"),
        ({"lora_mix_task_ids": np.ones((1, 9), np.uint64)}, "must have at most 8 values, got 9"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            ask(server, inputs(**extra))


def most_probable_of_mix(
    world: World, task_ids: Sequence[int], scales: np.ndarray, answer: Sequence[int]
) -> list[int]:
    """What PEFT takes for each token of an answer, after those before it."""
    from peft import PeftModel

    made = PeftModel.from_pretrained(load_transformers(world.model), str(world.adapters[task_ids[0]]), "0")
    for number, task_id in enumerate(task_ids[1:], 1):
        made.load_adapter(str(world.adapters[task_id]), str(number))
    names = [str(number) for number in range(len(task_ids))]
    made.add_weighted_adapter(names, scales.tolist(), "mixed", combination_type="cat")
    made.set_adapter("mixed")
    with torch.inference_mode():
        logits = made.eval()(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0]
    return logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["tiny-saved", "tiny-scales", "tiny-prefix", "tiny-prompt"])
def test_adapters_that_are_more_or_other_than_low_rank_by_their_names(
    name: str, server: Running, world: World
) -> None:
    catalog = server.repo.parent / "catalog"
    expected = reference_generate(world.model, catalog / name, PROMPT, NEW)
    [result] = ask(server, inputs(lora_name=np.array([[name.encode()]], np.object_)))
    assert new_ids([result])[len(PROMPT) :] == expected != reference_generate(world.model, None, PROMPT, NEW)


def unseen_adapter() -> dict[str, np.ndarray]:
    values = np.random.default_rng(time.time_ns()).normal(size=(1, 1, 128)).astype(np.float32)
    return {"lora_weights": values, "lora_config": np.array([[[1, 0, 1]]], np.int32)}


def test_prompt_embeddings_over_the_wire(server: Running, world: World) -> None:
    from safetensors import safe_open

    with safe_open(world.model / "model.safetensors", "np") as file:
        table = file.get_tensor("model.embed_tokens.weight")[[PROMPT[1]]].astype(np.float16)
    prompt = [PROMPT[0], 272, *PROMPT[2:]]
    [result] = ask(server, inputs(prompt, 3, prompt_embedding_table=table[np.newaxis]))
    assert new_ids([result])[len(PROMPT) :] == new_ids(ask(server, inputs(PROMPT, 3)))[len(PROMPT) :]


def test_metrics_have_upstreams_names_and_true_values(server: Running, world: World) -> None:
    ask(server, inputs(**lora(2, world)))
    before = scrape(server)
    for _ in range(3):
        ask(server, inputs(**lora(2)))
    steps = 'nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"}'
    after = scrape_until("the next period", server, lambda found: found[steps] >= before[steps] + 3)

    def grown(name: str, **labels: str) -> float:
        pairs = sorted({"model": "tensorrt_llm", "version": "1", **labels}.items())
        key = f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in pairs)}}}"
        assert key in after, f"{key} not among {[k for k in after if k.startswith(name)]}"
        return after[key] - before.get(key, 0)

    now = {"model": "tensorrt_llm", "version": "1"}
    assert grown("manylora_adapter_requests_total", adapter="2", finish_reason="length") == 3
    assert grown("manylora_adapter_tokens_total", adapter="2", kind="prompt") == 3 * len(PROMPT)
    assert grown("manylora_adapter_tokens_total", adapter="2", kind="output") == 3 * NEW
    assert grown("manylora_adapter_ttft_seconds_count", adapter="2") == 3
    assert grown("nv_llm_input_token_len_count", response_metric_type="total_input_tokens") == 3
    assert grown("nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == 3 * NEW
    for kind in ("active", "max", "scheduled", "context", "waiting"):
        grown("nv_trt_llm_request_metrics", request_type=kind)
    for kind in ("max", "free", "used", "tokens_per", "reused", "fraction"):
        grown("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
    for kind in ("cpu", "gpu", "pinned"):
        grown("nv_trt_llm_runtime_memory_metrics", memory_type=kind)
    for level in ("host", "device"):
        grown("manylora_lora_cache_pages", level=level, state="used")
        grown("manylora_adapter_resident_bytes", adapter="2", level=level)
    assert without_samples("\n".join(f"{key} {value}" for key, value in after.items())) == []
    info = [key for key in after if key.startswith("vllm:lora_requests_info")]
    assert len(info) == 1, "one label set at a time"
    running = info[0].split('running_lora_adapters="')[1].split('"')[0].split(",")
    assert "2" in running
    assert now["model"] in info[0]


def bls(server: Running, **body: Any) -> dict:
    url = f"http://127.0.0.1:{server.http}/v2/models/tensorrt_llm_bls/generate"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), 60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def bls_stream(server: Running, **body: Any) -> list[str]:
    url = f"http://127.0.0.1:{server.http}/v2/models/tensorrt_llm_bls/generate_stream"
    with urllib.request.urlopen(url, json.dumps(body | {"stream": True}).encode(), 60) as answer:
        lines = [line for line in answer.read().decode().split("\n\n") if line.strip()]
    return [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]


@pytest.mark.quick
def test_bls_says_what_the_ensemble_says(server: Running, world: World) -> None:
    ask(server, inputs(**lora(2, world)))
    for text in ("Hello", "美国的首都"):
        body = {"text_input": text, "max_tokens": 16, "end_id": -1}
        for extra in ({}, {"lora_task_id": 2}, {"exclude_input_in_output": True}):
            whole = json.loads(generate(server, **body, **extra))["text_output"]
            assert bls(server, **body, **extra)["text_output"] == whole
        plain = json.loads(generate(server, **body, exclude_input_in_output=True))["text_output"]
        assert "".join(bls_stream(server, **body)) == plain


def test_bls_stops_at_text_wherever_tokens_are_cut(server: Running, world: World) -> None:
    body = {"text_input": "Hello", "max_tokens": 30, "end_id": -1, "exclude_input_in_output": True}
    whole = bls(server, **body)["text_output"]
    word = whole[7:10]
    cut = whole[: whole.index(word) + len(word)]
    assert bls(server, **body, stop_words=[word])["text_output"] == cut
    assert "".join(bls_stream(server, **body, stop_words=[word])) == cut
    with_prompt = bls(server, **body | {"exclude_input_in_output": False}, stop_words=["llo", word])
    assert with_prompt["text_output"] == "Hello" + cut


@pytest.mark.parametrize("sent", ["id", "tensors"])
def test_bls_answers_batches_item_by_item(server: Running, world: World, sent: str) -> None:
    ask(server, inputs(**lora(2, world)))
    texts = ["Hello", "Bonjour", "x"]
    adapter = lora(2) if sent == "id" else lora(2022, world, files=2)
    made = {
        "text_input": np.array([[text.encode()] for text in texts], np.object_),
        "max_tokens": np.array([[5], [6], [7]], np.int32),
        **{name: np.repeat(array, 3, axis=0) for name, array in adapter.items()},
        "return_log_probs": np.array([[True]] * 3),
        "exclude_input_in_output": np.array([[True]] * 3),
        "end_id": np.array([[-1]] * 3, np.int32),
    }
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        import queue

        answers: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("tensorrt_llm_bls", [tensor(n, v) for n, v in made.items()])
        found = {}
        for _ in texts:
            result, error = answers.get(timeout=60)
            assert error is None, error
            index = int(result.as_numpy("batch_index")[0, 0])
            found[index] = (
                result.as_numpy("text_output")[0].decode(),
                result.as_numpy("output_log_probs").size,
            )
    tokenizer = Tokenizer(world.model)
    for i, text in enumerate(texts):
        expected = reference_generate(world.model, world.adapters[2], tokenizer.encode(text), 5 + i)
        assert found[i] == (tokenizer.decode(expected), 5 + i)


def test_bls_speculates_with_a_draft_model(server: Running) -> None:
    """The draft model is the target itself: every guess is right, and the answer the same."""
    body = {"text_input": "Hello", "max_tokens": 13, "end_id": -1}
    assert bls(server, **body, num_draft_tokens=4)["text_output"] == bls(server, **body)["text_output"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be a single value > 0"),
        ({"lora_task_id": 4712}, "LoRA task 4712 not found in cache"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"num_draft_tokens": 3, "return_context_logits": True}, "context logits are not supported with"),
        ({"num_draft_tokens": 3, "beam_width": 2}, "beam_width must be 1 with speculative decoding"),
    ],
)
def test_bls_errors_are_one_sentence(server: Running, body: dict, words: str) -> None:
    answer = bls(server, **{"text_input": "Hello", "max_tokens": 4} | body)
    assert words in answer["error"]
    assert "Traceback" not in answer["error"]
    assert "\n" not in answer["error"].strip()


def test_the_verbose_log_says_what_the_gauges_say(server: Running) -> None:
    """Upstream's own check of its metrics compares the last line of the log with what is scraped."""

    def set_verbosity(level: int) -> None:
        url = f"http://127.0.0.1:{server.http}/v2/logging"
        data = json.dumps({"log_verbose_level": level}).encode()
        request = urllib.request.Request(url, data, {"manylora-management": server.secret})
        urllib.request.urlopen(request, timeout=60).close()

    def last_line() -> dict[str, Any]:
        whole = log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        lines = [line for line in whole.splitlines() if "Active Request Count" in line]
        return json.loads(re.findall("{.*}", lines[-1])[0].replace('\\"', '"')) if lines else {}

    def are_of_one_moment(found: dict[str, float]) -> bool:
        line.update(last_line())
        if line.get("Active Request Count") != 0:
            return False
        logged = datetime.strptime(line[STAMP], "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=timezone.utc)
        [shown] = [value for key, value in found.items() if 'general_type="timestamp"' in key]
        return abs(logged.timestamp() - shown / 1e6) < 1e-3

    log, line = Path(server.state()["log"]), dict[str, Any]()
    set_verbosity(1)
    try:
        ask(server, inputs(new=3))
        found = scrape_until("the last line and what is scraped of one moment", server, are_of_one_moment)
    finally:
        set_verbosity(0)
    shown = {key: value for key, value in found.items() if key.startswith("nv_trt_llm_")}
    assert len(line) == len(shown) == 20
    for sample in filter(lambda one: one.logged, engine_samples(EngineStats())):
        family, name, [(_, label)] = sample.family, sample.logged, sample.labels
        [value] = [v for key, v in shown.items() if key.startswith(family) and f'="{label}"' in key]
        if name != STAMP:
            assert line[name] == int(value), name  # upstream's reads them so: nothing runs, so all are whole

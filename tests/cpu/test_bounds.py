"""Protects everybody from what one request asks for: sequences, words, guides, adapters that overflow; and
what the figures say when nothing runs."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from running import run
from tiny_models import make_adapter, make_model

from manylora.adapters.convert import convert_peft
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.http.api.errors import as_api_error
from manylora.doors.triton.codec import decode_requests
from manylora.doors.triton.metrics import RequestMeter
from manylora.engine import guide as guides
from manylora.engine.engine import Engine
from manylora.errors import AdapterNotFiniteError, QueueFullError, RequestError
from manylora.request import (
    MAX_GUIDE_BYTES,
    MAX_RANGES,
    MAX_WORDS,
    Event,
    FinishReason,
    Guide,
    LoraInput,
    Request,
    Retention,
    SamplingConfig,
)

PROMPT = (72, 101, 108)
BATCH = 8
END = 257


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bounds") / "model", seed=2)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=2**22, host_memory_bytes=2**21)
    sizes = {"max_batch_size": BATCH, "max_queue_size": 6, "tokens_per_block": 4}
    return Engine(EngineConfig(model, device="cpu", tokenizer_dir=model, lora=lora, **sizes))


def samples(n: int, **options: object) -> Request:
    return Request(PROMPT, SamplingConfig(max_tokens=4, top_p=0.9, num_return_sequences=n, **options))  # type: ignore[arg-type]


def test_sequences_are_bounded_by_the_batch_and_count_in_the_queue(engine: Engine) -> None:
    for count in (BATCH + 1, 2 * 10**9):
        with pytest.raises(RequestError, match=rf"at most {BATCH} \(max_batch_size.* got {count}"):
            engine.prepare(samples(count))
    [events] = run(engine, samples(BATCH))
    assert sum(event.finish_reason is not None for event in events) == BATCH
    first = engine.submit(engine.prepare(samples(BATCH)))
    with pytest.raises(QueueFullError, match="Maximum queue size of 6"):
        engine.submit(engine.prepare(samples(1)))
    engine.cancel(first)
    assert not engine.has_work  # what a client that left had asked for is gone
    engine.check()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SamplingConfig(stop_words=((1,),) * (MAX_WORDS + 1)), f"at most {MAX_WORDS} words"),
        (lambda: SamplingConfig(bad_words=((1,) * 2**15,)), "at most 16384 tokens, all together"),
        (lambda: Retention(((0, None, 1, None),) * (MAX_RANGES + 1)), f"at most {MAX_RANGES}"),
        (lambda: Guide("regex", "é" * MAX_GUIDE_BYTES), f"at most {MAX_GUIDE_BYTES} bytes"),
    ],
)
def test_what_a_request_brings_is_bounded(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RequestError, match=words):
        make()


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("input_ids", np.zeros((1, 2**20), np.int32), "Prompt length .1048576. exceeds .* .63."),
        ("draft_input_ids", np.zeros((1, 65), np.int32), "draft_input_ids must have at most 64 values"),
        ("stop_words_list", np.zeros((1, 2, 2**15), np.int32), "at most 16384 tokens, of all its words"),
        ("retention_token_range_starts", np.zeros((1, 2**11), np.int32), "must have at most 1024 values"),
        ("lora_name", np.array([[b"a" * 2**19]], np.object_), "lora_name must have at most 262144 bytes"),
    ],
)
def test_tensors_are_judged_by_their_shapes(name: str, array: np.ndarray, words: str) -> None:
    length = np.array([[array.shape[1] if name == "input_ids" else 1]], np.int32)
    arrays = {"input_ids": np.ones((1, 1), np.int32), "input_lengths": length}
    arrays |= {"request_output_len": np.ones((1, 1), np.int32), name: array}
    with pytest.raises(RequestError, match=words):
        decode_requests(arrays, "", decoupled=True, max_seq_len=64)


def test_an_embedding_table_has_at_most_a_row_for_each_token(engine: Engine) -> None:
    table = np.zeros((engine.max_seq_len + 1, engine.model.hidden_size), np.float32)
    with pytest.raises(RequestError, match=rf"at most max_seq_len \({engine.max_seq_len}\) rows"):
        engine.prepare(replace(samples(1), prompt_table=table))


def test_logits_that_open_requests_keep_are_bounded_together(engine: Engine) -> None:
    memory, row = engine._logits_memory, 4 * engine.model.vocab_size
    before, memory.num_bytes = memory.num_bytes, 12 * row
    try:
        with pytest.raises(RequestError, match="Logits of 16 tokens take"):
            engine.submit(engine.prepare(samples(4, return_generation_logits=True)))
        fits = samples(2, return_generation_logits=True)
        first = engine.submit(engine.prepare(fits))
        with pytest.raises(QueueFullError, match="bytes of logits has been reached"):
            engine.submit(engine.prepare(fits))
        engine.cancel(first)
        [events] = run(engine, fits)
        assert len(events[-1].generation_logits) == 4
    finally:
        memory.num_bytes = before


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 999983})),
        ("regex", "((((a{100}){100}){100}){100})" * 20),
        ("lark_grammar", 'start: ((("a" "b"){100}){100}){100}'),
        ("ebnf_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
    ids=["seconds", "expressions", "items", "depth"],
)
def test_a_guide_that_takes_too_much_is_refused(engine: Engine, kind: str, text: str) -> None:
    for _ in range(2):  # the second time it is known
        with pytest.raises(RequestError, match="guided_decoding_guide is not a valid"):
            engine.compile(Request(PROMPT, SamplingConfig(guide=Guide(kind, text))))
    good = Guide("json_schema", json.dumps({"type": "array", "minItems": 1000000}))
    engine.compile(Request(PROMPT, SamplingConfig(guide=good)))


def guided(seed: int, text: str = "[a-c]{20}") -> Request:
    params = SamplingConfig(max_tokens=40, end_id=END, top_p=0.9, seed=seed, guide=Guide("regex", text))
    return Request(PROMPT, params, streaming=True)


def test_who_waits_for_its_guide_holds_up_nobody_and_gives_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Request(PROMPT, SamplingConfig(max_tokens=6), streaming=True)
    expected = [[t for e in one for t in e.token_ids] for one in run(engine, guided(1), free)]
    compute, go = guides.GuideState._compute, threading.Event()

    def late(state: guides.GuideState) -> np.ndarray:
        assert go.wait(60)
        return compute(state)

    monkeypatch.setattr(guides.GuideState, "_compute", late)
    handles = [engine.submit(engine.prepare(one)) for one in (guided(1, "[a-c]{4}"), free)]
    found: dict[int, list[int]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            assert event.error is None
            found[handle] += event.token_ids
            if handle == handles[1] and event.last:
                assert not found[handles[0]]
                go.set()
    assert found[handles[1]] == expected[1]
    assert found[handles[0]] == expected[0][:4]
    engine.check()


def test_a_guide_that_fails_on_the_way_ends_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: guides.GuideState) -> np.ndarray:
        raise RuntimeError("lexer error: too many states")

    stuck: Future[np.ndarray] = Future()
    free = Request(PROMPT, SamplingConfig(max_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(guides.GuideState, "_compute", fail)
        events, other = run(engine, guided(1), free)
        assert "guided_decoding_guide is too complex: lexer error" in str(events[-1].error)
        assert other[-1].error is None
    handle = engine.submit(engine.prepare(guided(2)))
    [state] = [sequence.guide for sequence in engine.open_sequences()]
    monkeypatch.setattr(guides, "MASK_S", 0.1)
    state._work, state._since = stuck, time.monotonic()
    events = []
    while engine.has_work:
        events += [event for found, event in engine.step() if found == handle]
    assert "takes more than" in str(events[-1].error)
    engine.check()


def test_an_adapter_that_overflows_is_its_client_s_fault(engine: Engine, model: Path) -> None:
    adapter = make_adapter(model.parent / "adapter", model, seed=5, rank=4)
    weights, config = convert_peft(adapter, "float32")
    bad = replace(samples(1), lora=LoraInput(1, weights * np.float32(1e30), config))
    [events] = run(engine, bad)
    error = events[-1].error
    assert isinstance(error, AdapterNotFiniteError)
    told = as_api_error(error, "a")
    assert (told.status, "not finite numbers" in told.message) == (422, True)


def test_names_that_only_ever_failed_take_no_label() -> None:
    meter = RequestMeter()
    failed = Event(finish_reason=FinishReason.ERROR, last=True, error=RequestError("no"))
    labels = {
        dict(sample.labels)["adapter"]
        for i in range(500)
        for sample in meter.samples(LoraInput(-1, name=f"guess-{i}"), failed)
    }
    assert labels == {"other"}
    good = Event(finish_reason=FinishReason.STOP, last=True)
    assert dict(next(meter.samples(LoraInput(-2, name="real"), good)).labels)["adapter"] == "real"

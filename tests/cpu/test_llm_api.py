"""Protects the LLM API: answers equal transformers + PEFT in any mix of adapters, through eviction, stops,
streaming and abort; and what cannot be served is an error, never another answer."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from tiny_models import make_adapter, make_model, reference_generate
from waiting import wait_for

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.adapters.catalog.reader import AdapterReader
from manylora.errors import AdapterNotCachedError, RequestError

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
ADAPTERS = {None: None, 1: DEMO / "adapters" / "chinese", 2: DEMO / "adapters" / "japanese"}
PROMPTS = ["美国的首都在哪里? \\n答案:", "アメリカ合衆国の首都はどこですか? \\n答え:"]
ABOUT = "日本について教えてください。 \\n答え:"
QKV = ["attn_q", "attn_k", "attn_v"]
EOS, NEW = 2, 20


def adapter(task_id: int | None) -> LoRARequest | None:
    return None if task_id is None else LoRARequest(f"adapter-{task_id}", task_id, str(ADAPTERS[task_id]))


def reference(task_id: int | None, ids: list[int]) -> list[int]:
    made = reference_generate(DEMO / "base", ADAPTERS[task_id], ids, NEW)
    return made[: made.index(EOS)] if EOS in made else made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = LoraConfig(lora_target_modules=QKV, max_lora_rank=16, max_loras=2, max_cpu_loras=4)
    with LLM(DEMO / "base", lora_config=config, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with six adapters of rank 8 in `a0` to `a5`, and one of rank 16 in `wide`."""
    path = tmp_path_factory.mktemp("tiny")
    make_model(path / "model", "llama", seed=4)
    for number in range(6):
        make_adapter(path / f"a{number}", path / "model", seed=number, rank=8)
    make_adapter(path / "wide", path / "model", seed=9, rank=16)
    return path


def open_tiny(tiny: Path, **options: object) -> LLM:
    config = LoraConfig(lora_target_modules=["attn_q"], max_lora_rank=8, max_loras=1, max_cpu_loras=1)
    return LLM(tiny / "model", **{"lora_config": config, "device": "cpu", **options})  # type: ignore[arg-type]


class Gate:
    """Holds the reading of adapters until it is opened, and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.opened = threading.Event()
        read = AdapterReader.read

        def gated(*what: object):
            self.count += 1
            assert self.opened.wait(60)
            return read(*what)  # type: ignore[arg-type]

        monkeypatch.setattr(AdapterReader, "read", gated)


@pytest.mark.quick
def test_a_batch_of_adapters_and_prompts_equals_the_reference(llm: LLM) -> None:
    tasks = [None, 1, 2, None, 1, 2]
    prompts = [PROMPTS[i // 3] for i in range(6)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW), [adapter(t) for t in tasks], False)
    assert isinstance(outputs, list)
    for prompt, task_id, output in zip(prompts, tasks, outputs, strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == reference(task_id, output.prompt_token_ids)
        assert output.outputs[0].finish_reason == "stop"
        assert output.finished and output.lora_request == adapter(task_id)
    for number in (0, 3):
        texts = [output.outputs[0].text.strip() for output in outputs[number : number + 3]]
        assert texts == ["Washington, D.C.", "华盛顿", "ワシントンD.C."]


@pytest.mark.parametrize("task_id", [None, 1, 2])
def test_a_stream_adds_up_to_the_whole(
    llm: LLM, task_id: int | None, held_steps: Callable[[int], threading.Event]
) -> None:
    params = SamplingParams(max_tokens=64)
    whole = llm.generate(ABOUT, params, adapter(task_id), False).outputs[0]

    def stream() -> list:
        pieces, go_on = [], held_steps(3)
        for piece in llm.generate_async(ABOUT, params, adapter(task_id), streaming=True):
            pieces.append(piece)
            go_on.set()
        return pieces

    async def astream() -> list:
        pieces, go_on = [], held_steps(3)
        result = llm.generate_async(ABOUT, params, adapter(task_id), streaming=True)
        async for piece in result:
            pieces.append(piece)
            go_on.set()
        assert (await result) is pieces[-1]
        return pieces

    for pieces in (stream(), asyncio.run(astream())):
        assert len(pieces) > 1
        assert "".join(piece.outputs[0].text_diff for piece in pieces) == whole.text
        assert [i for piece in pieces for i in piece.outputs[0].token_ids_diff] == whole.token_ids
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        times = pieces[-1].timings
        assert 0 < times.first_token <= times.finished


def test_the_engine_does_not_go_on_after_a_stop_text(
    llm: LLM, held_steps: Callable[[int], threading.Event]
) -> None:
    before, go_on = llm.stats().requests_cancelled, held_steps(20)
    params = SamplingParams(max_tokens=400, ignore_eos=True, stop="国")
    assert llm.generate(ABOUT, params, adapter(2), False).outputs[0].length < 10
    go_on.set()
    wait_for(lambda: llm.stats().requests_cancelled == before + 1)


@pytest.mark.parametrize(
    ("per_call", "max_loras", "max_cpu_loras", "calls", "evicts"),
    [
        ([2], 1, 2, 6, False),
        ([2, 2, 2], 1, 3, 1, True),
        ([2, 2, 2], 1, 3, 2, True),
        ([3], 2, 2, 2, False),
        ([3], 3, 3, 2, False),
    ],
)
def test_eviction_does_not_change_an_answer(
    tiny: Path, per_call: list[int], max_loras: int, max_cpu_loras: int, calls: int, evicts: bool
) -> None:
    config = LoraConfig(
        lora_target_modules=QKV, max_lora_rank=8, max_loras=max_loras, max_cpu_loras=max_cpu_loras
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with open_tiny(tiny, lora_config=config) as llm:
        for _ in range(calls):
            first = 0
            for count in per_call:
                numbers = range(first, first + count)
                requests = [LoRARequest(f"a{i}", i, str(tiny / f"a{i}")) for i in numbers]
                outputs = llm.generate(["one"] * count, params, requests, False)
                for i, output in zip(numbers, outputs, strict=True):
                    expected = reference_generate(tiny / "model", tiny / f"a{i}", output.prompt_token_ids, 6)
                    assert output.outputs[0].token_ids == expected
                first += count
        adapters = llm.stats().adapters
        assert bool(adapters.host_evictions) is evicts
        assert adapters.host_pinned == adapters.device_pinned == 0


def test_an_adapter_is_read_once_for_all_who_wait_for_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    with open_tiny(tiny) as llm:
        request = LoRARequest("a", 3, str(tiny / "a3"))
        llm.generate(["three"] * 20, SamplingParams(max_tokens=3), request, False)
        llm.generate("three", None, LoRARequest("a", 3, None), False)
        assert gate.count == 1


def test_reading_stalls_nobody_else(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with open_tiny(tiny) as llm:
        waits = llm.generate_async("one", None, LoRARequest("a", 1, str(tiny / "a1")))
        assert llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False).outputs[0].length == 3
        with pytest.raises(TimeoutError, match="has not finished"):
            waits.result(timeout=0.01)
        gate.opened.set()
        assert waits.result(60).finished


@pytest.mark.usefixtures("slow_steps")
def test_abort_ends_a_request_wherever_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    long = SamplingParams(max_tokens=250, ignore_eos=True)
    with open_tiny(tiny) as llm:
        reading = llm.generate_async("one", long, LoRARequest("a", 1, str(tiny / "a1")))
        reading.abort()
        gate.opened.set()
        assert reading.result(60).outputs[0].finish_reason == "cancelled"
        stream = llm.generate_async("one", long, streaming=True)
        for piece in stream:
            if piece.outputs[0].length > 3:
                stream.abort()
        assert piece.finished and piece.outputs[0].finish_reason == "cancelled"
        assert 4 <= piece.outputs[0].length < 250
        stream.abort()
        assert llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False).outputs[0].length == 3


def test_an_id_belongs_to_one_directory_once_its_adapter_was_accepted(tiny: Path) -> None:
    one, two = (LoRARequest("x", 5, str(tiny / name)) for name in ("a1", "a2"))
    wide, empty = LoRARequest("x", 5, str(tiny / "wide")), LoRARequest("x", 5, str(tiny))
    with open_tiny(tiny) as llm:
        with pytest.raises(AdapterNotCachedError, match="LoRA task 5 not found in cache"):
            llm.generate("p", None, LoRARequest("x", 5, None), False)
        with pytest.raises(RequestError, match="Failed to load LoRA adapter: folder"):
            llm.generate("p", None, empty, False)
        with pytest.raises(RequestError, match=r"Invalid low_rank \(16\)"):
            llm.generate("p", None, wide, False)
        with pytest.raises(RequestError, match="belongs to an adapter of another path"):
            llm.generate(["p", "p"], None, [one, two], False)
        answer = llm.generate("p", None, two, False).outputs[0].token_ids
        assert (
            answer
            == llm.generate("p", None, LoRARequest("y", 6, str(tiny / "a2")), False).outputs[0].token_ids
        )
        with pytest.raises(RequestError, match="belongs to an adapter of another path"):
            llm.generate("p", None, one, False)


def test_an_llm_without_lora_config_refuses_adapters() -> None:
    with LLM(DEMO / "base", device="cpu", skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestError, match="needs an LLM with a lora_config"):
            llm.generate([5, 6], None, adapter(1), False)
        with pytest.raises(ValueError, match=r"must be a SamplingParams, got \{'max_tokens': 4\}"):
            llm.generate([5, 6], {"max_tokens": 4}, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompts must be token ids"):
            llm.generate("text", use_tqdm=False)
        output = llm.generate([1, 5, 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].length) == ("", 4)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("manylora-")}


@pytest.mark.usefixtures("slow_steps")
def test_shutdown_cancels_ends_the_threads_and_refuses_what_comes(tiny: Path) -> None:
    before = own_threads()
    made = open_tiny(tiny)
    open_ones = [
        made.generate_async("one", SamplingParams(max_tokens=250, ignore_eos=True), request)
        for request in (None, LoRARequest("a", 1, str(tiny / "a1")), LoRARequest("b", 2, str(tiny / "a2")))
    ]
    made.shutdown()
    made.shutdown()
    for result in open_ones:
        assert result.result(60).outputs[0].finish_reason == "cancelled"
    with pytest.raises(RequestError, match="has been shut down"):
        made.generate("one", use_tqdm=False)
    assert own_threads() <= before


@pytest.mark.usefixtures("slow_steps")
def test_a_shutdown_among_callers_leaves_nobody_waiting(tiny: Path) -> None:
    made, results, turned_back = open_tiny(tiny), [], []
    adapters = [LoRARequest(f"a{i}", i, str(tiny / f"a{i}")) for i in range(6)]

    def call(first: int) -> None:
        for i in count():
            try:
                request = adapters[(first + i) % 6] if i % 2 else None
                results.append(made.generate_async("one", SamplingParams(max_tokens=3), request))
            except RequestError as error:
                turned_back.append(str(error))
                return

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(results) >= 40)
    results.append(made.generate_async("one", SamplingParams(max_tokens=200, ignore_eos=True)))
    made.shutdown()
    for caller in callers:
        caller.join()
    assert turned_back == ["this LLM has been shut down"] * 4
    reasons = set()
    for result in results:
        try:
            reasons.add(result.result(60).outputs[0].finish_reason)
        except RequestError as error:
            reasons.add(str(error))
    assert reasons <= {"length", "cancelled", "this LLM has been shut down"} and "cancelled" in reasons


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("single_adapter", ["Answer: 巴黎"]),
        ("many_adapters", ["base: Tokyo", "task-1: 东京", "task-2: 東京"]),
        ("cache_management", ["カイロ", "1 adapter in"]),
        ("quantised", ["カイロ", "MB of weights"]),
        ("nemo_adapter", ["カイロ"]),
        ("streaming", ["chinese: '罗'", "japanese: 'ナ'"]),
    ],
)
def test_the_examples_run(script: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "llm_api" / f"{script}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert all(text in said for text in expected)


def test_a_process_that_forgets_to_shut_down_ends_well() -> None:
    script = ROOT / "examples" / "llm_api" / "single_adapter.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")

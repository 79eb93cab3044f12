"""Protects sleep and wake: memory is freed and comes back, adapters stay, and nobody waits for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import DEMO, Running
from tiny_models import make_model

from manylora import LLM, LoRARequest, SamplingParams
from manylora.engine.build import Moved, tensors_in
from manylora.errors import RequestError, SleepingError

QUESTION = "What is the capital of France?"
ADAPTER = LoRARequest("chinese", 1, str(DEMO / "adapters" / "chinese"))


CHAT: dict[str, Any] = {"model": "chinese", "messages": [{"role": "user", "content": QUESTION}]}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "chinese", "prompt": QUESTION, "stream": True},
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": {"model": "chinese", "input": QUESTION},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/api/chat": {**CHAT, "stream": True},
    "/generate_stream": {"inputs": QUESTION, "parameters": {"adapter_id": "chinese"}},
}
TOKENS = {"chunks": [{"tokens": [1, 331, 434]}]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO / "base", enable_lora=True, device="cpu", max_batch_size=4) as made:
        made.pin_lora(ADAPTER)
        yield made


def answers(llm: LLM) -> list[Any]:
    prompts, adapters = [QUESTION * 12] * 2, [None, ADAPTER]
    found = llm.generate(prompts, SamplingParams(max_tokens=8, logprobs=0), adapters, use_tqdm=False)
    assert isinstance(found, list)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_the_same_after_sleep(llm: LLM, level: int) -> None:
    before, awake = answers(llm), llm.stats()

    def caches() -> int:
        alive = (one for one in gc.get_objects() if type(one) is torch.Tensor)
        return sum(one.nbytes == awake.kv_bytes for one in alive)

    assert caches()
    llm.sleep(level)
    asleep = llm.stats()
    assert not caches(), "the memory of the KV cache is free"
    assert asleep.kv_bytes == 0 and (asleep.weight_bytes == 0) == (level == 2)
    assert asleep.adapters.residents == awake.adapters.residents, "the adapter stays in the cache, and pinned"
    with pytest.raises(SleepingError, match="asleep"):
        answers(llm)
    llm.wake_up(["weights"])
    with pytest.raises(SleepingError):
        answers(llm)
    llm.wake_up(["kv_cache"])
    found = llm.generate([QUESTION], SamplingParams(max_tokens=1), ADAPTER, use_tqdm=False)
    assert isinstance(found, list) and found[0].adapter_tier == "device", "it is not read again"
    reused = llm.stats().kv_tokens_reused
    assert answers(llm) == before
    assert llm.stats().kv_tokens_reused == reused, "prefixes are forgotten"
    assert llm.stats().weight_bytes == awake.weight_bytes and llm.stats().kv_bytes == awake.kv_bytes


def test_a_deeper_sleep_and_words_that_are_wrong(llm: LLM) -> None:
    llm.wake_up()  # no effect while it is awake
    llm.sleep(1)
    llm.sleep(2)
    assert llm.stats().weight_bytes == 0
    with pytest.raises(RequestError, match="weights, kv_cache"):
        llm.wake_up(["adapters"])
    llm.wake_up(["kv_cache"])
    with pytest.raises(RequestError, match="wholly"):
        llm.sleep(2)
    with pytest.raises(SleepingError):  # a sleep that is refused wakes nobody up
        answers(llm)
    llm.wake_up()
    assert answers(llm)
    with pytest.raises(ValueError, match="1 or 2"):
        llm.sleep(3)


@pytest.mark.parametrize("family", ["granite4", "t5"])
def test_recurrent_states_and_encoders_come_back(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, family)
    params = SamplingParams(max_tokens=6, end_id=-1)
    with LLM(folder, device="cpu", max_batch_size=2, max_seq_len=128) as llm:
        before = llm.generate([[5, 6, 7] * 12], params, use_tqdm=False)
        llm.sleep(1)
        llm.sleep(2)
        llm.wake_up()
        after = llm.generate([[5, 6, 7] * 12], params, use_tqdm=False)
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(RequestError):  # it is shut down: nobody waits for it
            call()
    assert isinstance(before, list) and isinstance(after, list)
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


def test_a_server_finishes_what_runs_and_refuses_the_rest() -> None:
    server = Running(lora_root=(DEMO / "adapters",), enable_sleep_mode=True)
    try:
        body = {"model": "chinese", "prompt": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            ThreadPoolExecutor(1) as pool,
            server.http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)  # it has begun
            slept = pool.submit(server.http.post, "/sleep?level=2")
            text = [line for line in lines if line]
            assert text[-1] == "data: [DONE]" and '"finish_reason":"length"' in text[-2]
            assert slept.result(60).status_code == 200
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
        for path, asked in DOORS.items():
            refused = server.post(path, **asked)
            assert refused.status_code == 503 and "asleep" in refused.text, path
            assert refused.headers["retry-after"]
        begun = server.post("/api/v1/asample", base_model="demo", sampling_params={}, prompt=TOKENS).json()
        found = server.post("/api/v1/retrieve_future", request_id=begun["request_id"]).json()
        assert "asleep" in found["error"] and found["category"] == "server", "its client tries again"
        assert server.http.get("/health/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        for path, hint in (
            ("/sleep?level=0", "level"),
            ("/sleep?mode=abort", "mode"),
            ("/wake_up?tags=x", "tags"),
        ):
            answer = server.http.post(path)
            assert answer.status_code == 400 and hint in answer.json()["error"]["message"], answer.text
        assert server.http.post("/wake_up").status_code == 200
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert server.post(model="chinese", prompt=QUESTION).status_code == 200
    finally:
        server.close()


def test_without_the_flag_it_is_not_there(server: Running) -> None:
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        answer = server.http.request(method, path)
        assert answer.status_code == 404 and "--enable-sleep-mode" in answer.json()["error"]["message"]


def test_moved_tensors_come_back_and_share_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(12.0).view(3, 4)
    part = {"head": whole, "rows": [whole[1:]], "own": (torch.ones(2, dtype=torch.bfloat16),)}
    moved = Moved(tensors_in(part))
    assert whole.numel() == part["rows"][0].numel() == 0
    move, full = torch.UntypedStorage.to, [True]

    def to(storage: torch.UntypedStorage, **device: Any) -> Any:
        if storage.nbytes() < 8 and full.pop():
            raise torch.OutOfMemoryError
        return move(storage, **device)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "to", to)
        with pytest.raises(torch.OutOfMemoryError):
            moved.back()
    moved.back()
    assert torch.equal(whole, torch.arange(12.0).view(3, 4)) and part["own"][0].tolist() == [1, 1]
    whole[1, 0] = 40
    assert part["rows"][0][0, 0] == 40

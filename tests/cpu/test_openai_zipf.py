"""Protects answers under load: many adapters, little room, and files that are replaced while they serve."""

from __future__ import annotations

import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from serving import Running
from tiny_models import make_adapter, make_model, reference_generate
from waiting import wait_for

from manylora.doors.python.llm_args import LoraConfig
from manylora.generation.tokenizer import Tokenizer

REQUESTS, ADAPTERS, ROOM, REPLACEMENTS, NEW = 160, 16, 4, 10, 6
PROMPT = "What?"


def test_every_answer_is_of_the_adapter_asked_for(tmp_path: Path) -> None:
    """It is of files that were copied before the request ended, and not of those that an answer before the
    request had replaced."""
    root, model = tmp_path / "root", make_model(tmp_path / "model", seed=5)
    places = [tmp_path / str(number) for number in range(2 * ADAPTERS)]
    folders = [make_adapter(one, model, n, 8, ("q_proj", "v_proj")) for n, one in enumerate(places)]
    history: list[list[tuple[float, Path]]] = [[] for _ in range(ADAPTERS)]  # since when: which files

    def replace(i: int) -> None:
        """In place, file by file, as people copy."""
        history[i].append((time.monotonic(), folders[i + ADAPTERS * (len(history[i]) % 2)]))
        shutil.copytree(history[i][-1][1], root / f"a{i}", dirs_exist_ok=True)

    for i in range(ADAPTERS):
        replace(i)
    room = LoraConfig(
        max_lora_rank=8, max_loras=3, max_cpu_loras=ROOM, lora_target_modules=["attn_q", "attn_k", "attn_v"]
    )
    server = Running(
        model=model, served_model_name=("base",), lora_root=(root,), lora_keep_bytes=1,
        max_batch_size=8, sections={"lora_config": room},
    )  # fmt: skip
    popularity = [1 / (rank + 1) for rank in range(ADAPTERS)]
    asked = random.Random(7).choices(range(ADAPTERS), popularity, k=REQUESTS)
    done, answered = threading.Event(), threading.Semaphore(0)

    def ask(i: int, stream: bool) -> tuple[float, float, Any]:
        """When it began and ended, and its text."""
        body = {"model": f"a{i}", "prompt": PROMPT, "temperature": 0, "max_tokens": NEW}
        more, text = {"ignore_eos": True}, "adapter_changing"
        while "adapter_changing" in text:  # half of it is copied, and its older version is not cached
            began = time.monotonic()
            try:
                if stream:
                    chunks = server.client().completions.create(**body, extra_body=more, stream=True)
                    text = "".join(chunk.choices[0].text for chunk in chunks)
                else:
                    answer = server.post(**body, **more)
                    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            except Exception as error:
                text = repr(error)
        answered.release()
        return began, time.monotonic(), text

    def change() -> None:
        later = random.Random(8)
        for _ in range(REPLACEMENTS):
            for _ in range(REQUESTS // (REPLACEMENTS + 1)):
                answered.acquire()
            if done.is_set():
                return
            replace(min(later.randrange(ADAPTERS), later.randrange(ADAPTERS)))

    tokenizer = Tokenizer(model)

    @cache
    def right(folder: Path) -> str:
        return tokenizer.decode(reference_generate(model, folder, tokenizer.encode(PROMPT), NEW))

    changing = threading.Thread(target=change)
    changing.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, asked, [n % 3 == 0 for n in range(REQUESTS)]))
        evicted = server.metric('manylora_lora_cache_evictions_total{level="host"}')
        changing.join()
        for i, versions in enumerate(history):
            if len(versions) > 1:
                wait_for(lambda i=i, newest=versions[-1][1]: ask(i, False)[2] == right(newest))
    finally:
        done.set()
        answered.release(REQUESTS)
        changing.join()
        server.close()
    seen: list[list[tuple[float, int]]] = [[] for _ in range(ADAPTERS)]  # ends of answers, places in history
    for i, (began, ended, text) in sorted(zip(asked, answers, strict=True), key=lambda one: one[1][1]):
        least = max((place for end, place in seen[i] if end < began), default=0)
        copied = [(place, folder) for place, (since, folder) in enumerate(history[i]) if since <= ended]
        found = [place for place, folder in copied if place >= least and right(folder) == text]
        assert found, (i, text, least)
        seen[i].append((ended, found[0]))
    assert evicted > ADAPTERS, "the cache was too large for this test"
    assert sum(len(one) > 1 for one in history) > 3, "nothing was replaced"

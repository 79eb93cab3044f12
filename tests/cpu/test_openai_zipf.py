"""Protects answers under load: many adapters, little room, and files that are replaced while they serve.

MANYLORA_LONG=1 runs 2,000 requests over 100 adapters with room for 10.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from serving import Running
from tiny_models import make_adapter, make_model
from transformers import AutoModelForCausalLM
from waiting import wait_for

from manylora.doors.python.llm_args import LoraConfig
from manylora.generation.tokenizer import Tokenizer

LONG = bool(os.environ.get("MANYLORA_LONG"))
REQUESTS, ADAPTERS, ROOM, VERSIONS = (2000, 100, 10, 3) if LONG else (160, 16, 4, 2)
REPLACEMENTS = 60 if LONG else 10
PROMPTS = ("Hello", "What?")
NEW = 6
MODULES = ("q_proj", "v_proj")


class Reference:
    """transformers + PEFT, with one adapter after the other in the same place."""

    def __init__(self, model: Path, first: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = PeftModel.from_pretrained(base, str(first)).eval()
        self._tokenizer = Tokenizer(model)
        self._known: dict[tuple[Path, str], str] = {}

    def text(self, folder: Path, prompt: str) -> str:
        if (folder, prompt) not in self._known:
            set_peft_model_state_dict(self._model, load_file(folder / "adapter_model.safetensors"))
            ids = torch.tensor([self._tokenizer.encode(prompt)])
            start = ids.shape[1]
            with torch.inference_mode():
                for _ in range(NEW):
                    ids = torch.cat((ids, self._model(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
            self._known[folder, prompt] = self._tokenizer.decode(ids[0, start:].tolist())
        return self._known[folder, prompt]


class Shelf:
    """The adapters on disk, and since when each version lies there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.root = folder / "root"
        self.first = make_adapter(folder / "first", model, 0, 8, MODULES)
        self.versions = [
            [self._make(folder / f"v{version}-{i}") for i in range(ADAPTERS)] for version in range(VERSIONS)
        ]
        self.history: list[list[tuple[float, int]]] = [[] for _ in range(ADAPTERS)]
        for i in range(ADAPTERS):
            self.replace(i, 0)

    def _make(self, path: Path) -> Path:
        """Another adapter of the first one's shape."""
        shutil.copytree(self.first, path)
        file = path / "adapter_model.safetensors"
        save_file({name: torch.randn_like(one) * 0.18 for name, one in load_file(file).items()}, file)
        return path

    def replace(self, i: int, version: int) -> None:
        """In place, file by file, as people copy."""
        self.history[i].append((time.monotonic(), version))
        shutil.copytree(self.versions[version][i], self.root / f"a{i}", dirs_exist_ok=True)

    def newest(self, i: int) -> Path:
        return self.versions[self.history[i][-1][1]][i]


class Seen:
    """Which replacement of each adapter has answered. One that was replaced does not come back."""

    def __init__(self, shelf: Shelf, reference: Reference) -> None:
        self._shelf, self._reference = shelf, reference
        self._firsts: list[list[tuple[float, int]]] = [[] for _ in range(ADAPTERS)]  # (end, place in history)

    def check(self, i: int, prompt: str, began: float, ended: float, text: str) -> set[str]:
        """Nothing if an adapter's answer may be this one, else what would be right: any version that was
        copied before the request ended, and none before one that had answered when the request began.

        Called in the order of ends.
        """
        least = max((place for end, place in self._firsts[i] if end < began), default=0)
        history = self._shelf.history[i]
        places = [n for n, (since, _) in enumerate(history) if n >= least and since <= ended]
        texts = {n: self._reference.text(self._shelf.versions[history[n][1]][i], prompt) for n in places}
        found = [n for n in places if texts[n] == text]
        if not found:
            return set(texts.values())
        self._firsts[i].append((ended, found[0]))
        return set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("zipf") / "model", seed=5)


def test_every_answer_is_of_the_adapter_asked_for(model: Path, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, model)
    room = LoraConfig(
        max_lora_rank=8, max_loras=3, max_cpu_loras=ROOM, lora_target_modules=["attn_q", "attn_k", "attn_v"]
    )
    server = Running(
        model=model, served_model_name=("base",), lora_root=(shelf.root,), lora_keep_bytes=1,
        max_batch_size=8, sections={"lora_config": room},
    )  # fmt: skip
    rng = random.Random(7)
    popularity = [1 / (rank + 1) for rank in range(ADAPTERS)]
    order = rng.choices(range(ADAPTERS), popularity, k=REQUESTS)
    done, answered = threading.Event(), threading.Semaphore(0)
    asked = [(i, PROMPTS[n % len(PROMPTS)], n % 3 == 0) for n, i in enumerate(order)]

    def ask(request: tuple[int, str, bool]) -> tuple[float, float, Any]:
        found = ask_once(request)
        while "adapter_changing" in found[2]:  # half of it is copied, and its older version is not cached
            found = ask_once(request)
        answered.release()
        return found

    def ask_once(request: tuple[int, str, bool]) -> tuple[float, float, Any]:
        i, prompt, stream = request
        began = time.monotonic()
        body = {"model": f"a{i}", "prompt": prompt, "temperature": 0, "max_tokens": NEW}
        more = {"ignore_eos": True}
        try:
            if stream:
                chunks = server.client().completions.create(**body, extra_body=more, stream=True)
                text: Any = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                answer = server.post(**body, **more)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        except Exception as error:
            text = repr(error)
        return began, time.monotonic(), text

    def change() -> None:
        later = random.Random(8)
        for n in range(REPLACEMENTS):
            for _ in range(REQUESTS // (REPLACEMENTS + 1)):
                answered.acquire()
            if done.is_set():
                return
            shelf.replace(min(later.randrange(ADAPTERS), later.randrange(ADAPTERS)), 1 + n % (VERSIONS - 1))

    changing = threading.Thread(target=change)
    changing.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, asked))
        evicted = server.metric('manylora_lora_cache_evictions_total{level="host"}')
        changing.join()
        reference = Reference(model, shelf.first)
        for i, history in enumerate(shelf.history):
            newest = reference.text(shelf.newest(i), "Hello")
            if len(history) > 1:
                wait_for(lambda i=i, newest=newest: ask((i, "Hello", False))[2] == newest, 120)
    finally:
        done.set()
        answered.release(REQUESTS)
        changing.join()
        server.close()
    wrong, seen = [], Seen(shelf, reference)
    for (i, prompt, _), (began, ended, text) in sorted(
        zip(asked, answers, strict=True), key=lambda one: one[1][1]
    ):
        if right := seen.check(i, prompt, began, ended, text):
            wrong.append((i, prompt, text, right))
    assert not wrong, f"{len(wrong)} of {REQUESTS} are wrong, as {wrong[:3]}"
    assert evicted > ADAPTERS, "the cache was too large for this test"
    assert sum(len(one) > 1 for one in shelf.history) > 3, "nothing was replaced"

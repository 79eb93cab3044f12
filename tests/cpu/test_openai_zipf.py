"""Protects answers under load: many adapters, little room, and files that are replaced while they serve."""

from __future__ import annotations

import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from serving import Running
from tiny_models import make_adapter, make_model
from transformers import AutoModelForCausalLM
from waiting import wait_for

from manylora.doors.python.llm_args import LoraConfig
from manylora.generation.tokenizer import Tokenizer

REQUESTS, ADAPTERS, ROOM, VERSIONS, REPLACEMENTS = 160, 16, 4, 2, 10
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


def test_every_answer_is_of_the_adapter_asked_for(tmp_path: Path) -> None:
    """It is of a version that was copied before the request ended, and none that an answer before the request
    had replaced."""
    model = make_model(tmp_path / "model", seed=5)
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
        i, prompt, stream = request
        body = {"model": f"a{i}", "prompt": prompt, "temperature": 0, "max_tokens": NEW}
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
    seen: list[list[tuple[float, int]]] = [[] for _ in range(ADAPTERS)]  # ends of answers, places in history
    for (i, prompt, _), (began, ended, text) in sorted(
        zip(asked, answers, strict=True), key=lambda one: one[1][1]
    ):
        least, history = max((place for end, place in seen[i] if end < began), default=0), shelf.history[i]
        right = {
            place: reference.text(shelf.versions[version][i], prompt)
            for place, (since, version) in enumerate(history) if place >= least and since <= ended
        }  # fmt: skip
        assert text in right.values(), (i, prompt, right)
        seen[i].append((ended, next(place for place, one in right.items() if one == text)))
    assert evicted > ADAPTERS, "the cache was too large for this test"
    assert sum(len(one) > 1 for one in shelf.history) > 3, "nothing was replaced"

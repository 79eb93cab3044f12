"""A server under test, and the answers it should give."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import httpx2
import pytest


class Expected:
    """What transformers + PEFT answer with one base model, by adapter and prompt."""

    def __init__(self, folder: Path, base: str) -> None:
        known = json.loads((folder / "expected.json").read_text())[base]
        self.prompts: list[list[int]] = known["prompts"]
        self._answers = known["answers"]

    def texts(self, adapter: str = "") -> list[str]:
        return [one["text"] for one in self._answers[adapter]]

    def log_probs(self, adapter: str) -> list[list[float]]:
        return [one["log_probs"] for one in self._answers[adapter]]


class Server:
    """An OpenAI-compatible server with one of the base models. Names adapters as vLLM or llama.cpp do.

    adapters: the folder of adapters, as the server sees it. llama.cpp has those that it was started with,
    which a request chooses by number.
    """

    def __init__(self, url: str, adapters: Path, expected: Expected) -> None:
        self.http = httpx2.Client(base_url=url, timeout=120)
        self.adapters, self.expected = adapters, expected
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]
        self._loaded = False
        listed = self.http.get("/lora-adapters")
        rows = listed.json() if listed.is_success else []
        self._numbers = {Path(row["path"]).stem: row["id"] for row in rows}  # of llama.cpp

    def load(self, adapter: str | Path, name: str = "", replace: bool = False) -> str:
        """Load an adapter; gives its name, a new one by default. Raises httpx2.HTTPStatusError if refused."""
        if self._numbers and replace:
            pytest.skip("llama.cpp cannot replace an adapter")
        if self._numbers and adapter not in self._numbers:
            pytest.skip(f"llama.cpp was started without the adapter {adapter}")
        if self._numbers:
            return str(adapter)
        self._loaded = True
        name = name or f"conformance-{uuid.uuid4().hex[:8]}"
        body = {"lora_name": name, "lora_path": str(self.adapters / adapter), "load_inplace": replace}
        self.http.post("/v1/load_lora_adapter", json=body).raise_for_status()
        return name

    def unload(self, name: str) -> None:
        if self._numbers:
            pytest.skip("llama.cpp cannot unload an adapter")
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()

    def complete(self, adapter: str, prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
        """The response to a greedy request. adapter: a served name; "": the base model."""
        body = {"model": adapter or self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if self._numbers:
            scales = {number: float(name == adapter) for name, number in self._numbers.items()}
            fields["lora"] = [{"id": number, "scale": scale} for number, scale in scales.items()]
        response = self.http.post("/v1/completions", json={**body, "ignore_eos": True, **fields})
        response.raise_for_status()
        return response.json()

    def text(self, adapter: str, prompt: list[int]) -> str:
        return self.complete(adapter, prompt, 12)["choices"][0]["text"]

    def texts(self, adapter: str = "") -> list[str]:
        """The answers to all prompts."""
        return [self.text(adapter, prompt) for prompt in self.expected.prompts]

    def log_probs(self, adapter: str, prompt: list[int], tokens: int = 12) -> list[float]:
        """Of the tokens of an answer, in vLLM's form or in llama.cpp's."""
        told = self.complete(adapter, prompt, tokens, logprobs=1)["choices"][0]["logprobs"]
        if "content" in told:
            return [one["logprob"] for one in told["content"]]
        return told["token_logprobs"]

    def answers_or_refusal(self, adapter: str) -> list[str] | None:
        """Like `texts` for an adapter's folder; None if the server refuses to load or to use this one."""
        if not self._loaded and not self._numbers:
            self.unload(self.load("attention" if "hybrid" not in adapter else "hybrid"))
        try:
            name = self.load(adapter)
            answers = self.texts(name)
        except httpx2.HTTPStatusError:
            return None
        if not self._numbers:
            self.unload(name)
        return answers

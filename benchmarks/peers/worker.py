"""Runs one engine in a separate process, controlled by lines of JSON. Uses only the standard library.

Input: a Setup, then {"prompts": [[int]], "adapters": [int or null], "tokens": int} for each run. A run is one
call with all requests at once.

Output: {"versions": {...}, "pid": int} when the engine has started, then {"tokens": [[int]], "seconds":
float} for each run, or {"error": str}. Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """The settings of an engine.

    model: a Hugging Face directory, or a GGUF file with dtype gguf. adapters: PEFT directories; if empty,
    LoRA is disabled. rank: of the adapters. dtype: bfloat16, float32, int8 and int4 for 8-bit and 4-bit
    weights made from a bfloat16 model, or gguf. at_once: maximum requests per call. threads: CPU threads.
    length: tokens of the longest sequence. kept: folder for converted models, which later processes reuse;
    the Hugging Face directory is `model` in it.
    """

    model: str
    dtype: str
    adapters: list[str]
    rank: int
    at_once: int
    threads: int
    length: int
    kept: str


class Peer(Protocol):
    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        """Generate exactly `tokens` tokens for each prompt, greedily, with all requests at once.

        adapters: indices into the setup's adapters, None for the base model. A peer may have two more
        attributes: `details: dict[str, str]`, reported with its versions; and `pid`, if the engine is another
        process."""
        ...


def serve(start: Callable[[Setup], Peer], versions: Callable[[], dict[str, str]]) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to standard error

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        peer = start(Setup(**json.loads(sys.stdin.readline())))
        pid = getattr(peer, "pid", os.getpid())
        say({"versions": versions() | getattr(peer, "details", {}), "pid": pid})
        for line in sys.stdin:
            say(_run(peer, json.loads(line)))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:600]})
        raise


def _run(peer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    prompts, adapters, wanted = asked["prompts"], asked["adapters"], asked["tokens"]
    began = time.perf_counter()
    tokens = peer.generate(prompts, adapters, wanted)
    seconds = time.perf_counter() - began
    short = [n for n, found in enumerate(tokens) if len(found) != wanted]
    if short:
        raise RuntimeError(f"requests {short} have the wrong number of tokens")
    return {"tokens": tokens, "seconds": seconds}

"""One engine in a process of its own, told what to do by lines of JSON; nothing beyond the standard library.

In: a Setup, then {"prompts": [[int]], "adapters": [int or null], "tokens": int} for each run.
Out: {"versions": {...}} when the engine has started, then {"tokens": [[int]], "seconds": float}, or
{"error": str}. Whatever else is printed goes to standard error.
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
    """What an engine is started with.

    model: a Hugging Face directory. adapters: PEFT directories, empty: no LoRA at all. rank: theirs.
    dtype: bfloat16 or float32. length: tokens of the longest sequence. kept: a folder for what an engine
    makes of the model, to be found again by the next process.
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
        """Exactly `tokens` new tokens for each prompt, greedily, `at_once` requests at a time.

        adapters: index in the setup's, None: the base model."""
        ...


def serve(start: Callable[[Setup], Peer], versions: Callable[[], dict[str, str]]) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        peer = start(Setup(**json.loads(sys.stdin.readline())))
        say({"versions": versions()})
        for line in sys.stdin:
            asked = json.loads(line)
            began = time.perf_counter()
            tokens = peer.generate(asked["prompts"], asked["adapters"], asked["tokens"])
            seconds = time.perf_counter() - began
            short = [n for n, found in enumerate(tokens) if len(found) != asked["tokens"]]
            if short:
                raise RuntimeError(f"requests {short} have not {asked['tokens']} tokens")
            say({"tokens": tokens, "seconds": seconds})
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:600]})
        raise

"""One engine in a process of its own, told what to do by lines of JSON; nothing beyond the standard library.

In: a Setup, then {"prompts": [[int]], "adapters": [int or null], "tokens": int} for each run: one call of
so many requests, all of them at once. With "open": int, and "tokens" a list, requests flow instead: so many
are open at any time, and the next is handed in as one ends.
Out: {"versions": {...}, "pid": int} when the engine has started, then {"tokens": [[int]], "seconds": float},
or {"error": str}. Whatever else is printed goes to standard error.
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
    dtype: bfloat16, float32, or int8 and int4: the weights of a bfloat16 model in 8 or 4 bits. at_once: most
    requests in a call. length: tokens of the longest sequence. kept: a folder for what an engine makes of the
    model, to be found again by the next process.
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
        """Exactly `tokens` new tokens for each prompt, greedily, all requests at once.

        adapters: index in the setup's, None: the base model. One that can say more about what it ran than
        its versions has `details: dict[str, str]`, one that is a process of its own `pid`, and one whose
        requests can flow `flow`."""
        ...


def serve(start: Callable[[Setup], Peer], versions: Callable[[], dict[str, str]]) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print

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
    if "open" in asked:
        tokens = peer.flow(prompts, adapters, wanted, asked["open"])
    else:
        tokens = peer.generate(prompts, adapters, wanted)
    seconds = time.perf_counter() - began
    counts = wanted if isinstance(wanted, list) else [wanted] * len(prompts)
    short = [n for n, found in enumerate(tokens) if len(found) != counts[n]]
    if short:
        raise RuntimeError(f"requests {short} have not the tokens that were asked for")
    return {"tokens": tokens, "seconds": seconds}

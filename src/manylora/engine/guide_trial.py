"""Where guides are tried before the engine takes them: a process of its own, and one for each trial.

Compiling a grammar cannot be interrupted, and a short text may ask for hours of it, gigabytes, or more stack
than there is. A trial that takes too much is ended by the system, and nobody else notices. It asks for some
tokens too: much of a grammar is only worked out then.

The first line of the input says what the tokenizer is, each further one is a guide; the answer to each is a
line, with the reason why the guide cannot be served, or none. Imports nothing that takes long.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
from pathlib import Path
from typing import Any

__all__ = ["AT_ONCE", "BUSY", "SECONDS", "WALL_S", "main", "make_matcher", "open_tokenizer", "reason_of"]

SECONDS = 1  # of processor time
WALL_S = 10  # of any time: the machine may be busy
MEMORY = 2**27  # bytes beside those of the tokenizer
AT_ONCE = 8
BUSY = "it could not be tried in time, please send the request again"
STEPS = 8  # tokens
MAX_LEXER_STATES = 50_000  # of about 2 KB each


def open_tokenizer(path: str, vocab_size: int, eos_ids: list[int]) -> Any:
    """Of llguidance. path: of tokenizer.json."""
    import llguidance

    text = Path(path).read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids or None)


def make_matcher(tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher of llguidance at the start of the output. Raises whatever its readers raise; what is wrong
    may also be in the matcher's get_error."""
    import llguidance

    make, limits = llguidance.LLMatcher, llguidance.LLParserLimits
    bounds = limits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return make(tokenizer, _grammar(make, kind, text), log_level=0, limits=bounds)


def reason_of(text: str) -> str:
    """A message of the library on one line, of bounded length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


def _grammar(make: Any, kind: str, text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json":
        return make.grammar_from_json_schema("{}")
    if kind == "json_schema":
        return make.grammar_from_json_schema(text)
    if kind == "regex":
        return make.grammar_from_regex(text)
    if kind == "llguidance":
        return text
    return make.grammar_from_lark(text if kind == "lark_grammar" else gbnf_to_lark(text))


def _try(tokenizer: Any, kind: str, text: str) -> str:
    """Why a guide cannot be served; empty: it can."""
    try:
        matcher = make_matcher(tokenizer, kind, text)
        if matcher.is_error():
            return reason_of(matcher.get_error())
        chance = random.Random(0)
        for _ in range(STEPS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not mask:
                break
            matcher.consume_token(_some_bit(mask, chance))
            if matcher.is_error() or matcher.is_stopped():
                break
        return reason_of(matcher.get_error()) if matcher.is_error() else ""
    except BaseException as error:  # the readers have no class of their own, and some panic
        return reason_of(str(error)) or type(error).__name__


def _some_bit(mask: int, chance: random.Random) -> int:
    bits = [i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
    return chance.choice(bits)


def _bound() -> None:
    """What a trial may take."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WALL_S)


def _begin(tokenizer: Any, kind: str, text: str) -> tuple[int, int]:
    """Start a trial. Returns its process and where its verdict can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        _bound()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library says of its end is of no interest
        os.write(writing, b"=" + _try(tokenizer, kind, text).encode(errors="replace"))
    finally:
        os._exit(0)


def _verdict(pid: int, reading: int) -> str:
    said = os.read(reading, 4096)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if said:
        return said[1:].decode(errors="replace")
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGALRM:
        return BUSY
    if ended_by == signal.SIGPROF:
        return f"it takes more than {SECONDS} s to compile"
    return f"it takes more than {MEMORY >> 20} MiB to compile"


def main() -> None:
    """Until the input ends."""
    tokenizer: Any = None
    rest, waiting = b"", []
    running: dict[int, tuple[int, int]] = {}  # where a verdict can be read -> process, number of the guide
    while True:
        ready, _, _ = select.select([0, *running], [], [])
        for source in ready:
            if source in running:
                pid, number = running.pop(source)
                print(json.dumps({"number": number, "failure": _verdict(pid, source)}), flush=True)
                continue
            piece = os.read(0, 2**20)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        if waiting and tokenizer is None:
            tokenizer = open_tokenizer(**waiting.pop(0))
        while waiting and len(running) < AT_ONCE:
            guide = waiting.pop(0)
            pid, reading = _begin(tokenizer, guide["kind"], guide["text"])
            running[reading] = (pid, guide["number"])


if __name__ == "__main__":
    main()

"""A process that compiles guides before the engine does, each in a separate child process.

Compiling a grammar cannot be interrupted, and even a short text may need hours, gigabytes, or more stack than
available. The system ends a trial that uses too much, and nothing else is affected. A trial also consumes
some tokens, because much of a grammar is compiled only then.

The first line of the input names the tokenizer. Each further line is a guide. The answer to a guide is a line
with the reason why it cannot be served, or an empty line. To start quickly, this module imports little.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.generation.guides import grammar_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CPU_S = 1
WALL_S = 30  # more than CPU_S, because the machine may be busy
MEMORY = 2**27  # bytes in addition to those of the tokenizer
BUSY = "it could not be tried in time, please send the request again"
NUM_TOKENS = 8  # that a trial consumes
MAX_LEXER_STATES = 50_000  # of about 2 KB each


def open_tokenizer(path: str, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    """path: of tokenizer.json."""
    import llguidance

    text = Path(path).read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids or None)


def make_matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """A matcher at the start of the output. Raises errors of llguidance, or stores them (get_error)."""
    from llguidance import LLMatcher, LLParserLimits

    def token_id(text: str) -> int | None:
        found = tokenizer.tokenize_str(text)
        return found[0] if len(found) == 1 and tokenizer.is_special_token(found[0]) else None

    grammar = grammar_of(kind, text, token_id)
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def reason_of(text: str) -> str:
    """A message of llguidance as one line of limited length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


def _try(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    """Why a guide cannot be served. Empty: it can."""
    try:
        matcher = make_matcher(tokenizer, kind, text)
        if matcher.is_error():
            return reason_of(matcher.get_error())
        picks = random.Random(0)
        for _ in range(NUM_TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not mask:
                break
            matcher.consume_token(picks.choice([i for i, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1"]))
            if matcher.is_error() or matcher.is_stopped():
                break
        return reason_of(matcher.get_error()) if matcher.is_error() else ""
    except BaseException as error:  # llguidance has no exception class, and some of its parsers panic
        return reason_of(str(error)) or type(error).__name__


def _answer(tokenizer: LLTokenizer, guide: dict[str, str]) -> str:
    """As `_try`, in a child process with limited resources."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(WALL_S)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard llguidance's output
            found = _try(tokenizer, guide["kind"], guide["text"])
            os.write(writing, b"=" + found.encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writing)
    answer = os.read(reading, 4096)
    _, status = os.waitpid(pid, 0)
    if answer:
        return answer[1:].decode(errors="replace")
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGALRM:
        return BUSY
    if ended_by == signal.SIGPROF:
        return f"it takes more than {CPU_S} s to compile"
    return f"it takes more than {MEMORY >> 20} MiB to compile"


def main() -> None:
    """Answer guides until the input ends. A child of each waits for the trial."""
    tokenizer = open_tokenizer(*json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the system forgets the children
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        guide = json.loads(line)
        answer = {"number": guide["number"], "failure": _answer(tokenizer, guide)}
        os.write(1, json.dumps(answer).encode() + b"\n")  # at once, as it is short
        os._exit(0)


if __name__ == "__main__":
    main()

"""Guided decoding with llguidance: grammars that constrain outputs, with limits on time and memory.

Compiling a grammar cannot be interrupted, and even a short text may need hours, gigabytes, or more stack than
available. So a separate process (`python -m manylora.engine.guide`) first compiles each guide in a child. The
system ends a trial that uses too much, and nothing else is affected. A trial also consumes some tokens, as
much of a grammar is compiled only then.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import ConfigError, RequestError
from manylora.generation.guides import grammar_of
from manylora.request import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("manylora")

MAX_VERDICTS = 1024  # cached results of trials
MASK_THREADS = 2
TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex", "InternalError")  # stop reasons of llguidance
MASK_S = 5.0  # maximum for the mask of one token
CPU_S = 1
WALL_S = 30  # more than CPU_S, because the machine may be busy
MEMORY = 2**27  # bytes in addition to those of the tokenizer
BUSY = "it could not be tried in time, please send the request again"
NUM_TOKENS = 8  # that a trial consumes
MAX_LEXER_STATES = 50_000  # of about 2 KB each
TRIAL_S = 2.0 * WALL_S  # maximum until a result: other guides may be tried first


class Guides:
    """Compiles guides for one tokenizer. Raises ConfigError if the tokenizer is missing. If llguidance
    cannot use it, every guide is refused. eos_ids: tokens that may end the output.
    """

    def __init__(self, tokenizer_dir: Path, vocab_size: int, eos_ids: Iterable[int]) -> None:
        path = tokenizer_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"guided decoding: tokenizer_dir: {path} does not exist")
        settings = (str(path.resolve()), vocab_size, list(eos_ids))
        self._tokenizer: LLTokenizer | None = None
        try:
            self._tokenizer = open_tokenizer(*settings)
        except Exception as error:
            logger.info("no guided decoding (structured output) with %s: %s", path, reason_of(str(error)))
        self._trials = _TrialProcess(settings)
        self._lock = threading.Lock()
        # Digest of a guide -> why it cannot be served. Concurrent requests share one trial.
        self._verdicts: OrderedDict[bytes, Future[str]] = OrderedDict()
        self._pool = ThreadPoolExecutor(MASK_THREADS, "manylora-mask")

    def compile(self, guide: Guide) -> LLMatcher:
        """A matcher for `begin`. Thread-safe; may take seconds, for the guide is tried in another process
        first. Raises RequestError, also for a guide that takes too much time or memory.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("this model cannot follow a guide: llguidance does not support its tokenizer")
        failure = self._verdict(guide)
        if not failure:
            try:
                matcher = make_matcher(tokenizer, guide.type, guide.text)
                failure = reason_of(matcher.get_error()) if matcher.is_error() else ""
            except Exception as error:
                failure = reason_of(str(error)) or type(error).__name__
        if failure:
            raise RequestError(f"guided_decoding_guide is not a valid {guide.type}: {failure}")
        return matcher

    def begin(self, matcher: LLMatcher) -> GuideState:
        """The state of one sequence. matcher: from `compile`; several sequences may share it."""
        return GuideState(matcher, self._pool)

    def _verdict(self, guide: Guide) -> str:
        """Why a guide cannot be served. Empty: it can."""
        key = blake2b(f"{guide.type}:{guide.text}".encode(errors="replace"), digest_size=20).digest()
        with self._lock:
            known = self._verdicts.get(key)
            verdict = self._verdicts[key] = known or Future()
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if known is None:
            found = BUSY
            try:
                found = self._trials.run(guide)
            finally:
                if found == BUSY:  # which is not the guide's fault
                    with self._lock:
                        self._verdicts.pop(key, None)
                verdict.set_result(found)
        return verdict.result()


class GuideState:
    """Which tokens are allowed next in one sequence.

    Use on the engine's thread. Masks are computed on another thread while the model computes. A sequence
    whose mask takes longer is left out of steps.
    """

    def __init__(self, source: LLMatcher, pool: ThreadPoolExecutor) -> None:
        self.is_stopped = False  # the output is complete
        self.is_late = False  # the last `mask` was not ready in time
        self.failure = ""  # why the guide cannot continue, which ends the sequence
        self._source, self._pool = source, pool
        self._matcher: LLMatcher | None = None  # a copy of source, made by the first `_compute`
        self._since = 0.0  # when `_compute` started; 0: it has not started
        self._work: Future[np.ndarray] = pool.submit(self._compute)

    @property
    def is_waiting(self) -> bool:
        """Whether the next step would have to wait again."""
        return self.is_late and not self._work.done()

    def mask(self, deadline: float) -> np.ndarray | None:
        """[tokens of the tokenizer] bool: what is allowed. None: not ready by `deadline`, or it failed."""
        if not self._work.done():
            wait([self._work], max(0.0, deadline - time.monotonic()))
        self.is_late = not self._work.done()
        if self.is_late:
            if self._since and time.monotonic() - self._since > MASK_S:
                self.failure = f"guided_decoding_guide takes more than {MASK_S:.0f} s for one token"
            return None
        error = self._work.exception()
        if error is not None:
            self.failure = _too_complex(str(error) or type(error).__name__)
            return None
        return self._work.result()

    def consume(self, token: int) -> bool:
        """Accept the next token. Returns False if it ends the output without being part of it."""
        matcher = self._matcher
        assert matcher is not None
        taken = matcher.consume_token(token) and not matcher.is_error()
        self.is_stopped = matcher.is_stopped()
        if matcher.is_error() and matcher.stop_reason() in TOO_COMPLEX:
            self.failure = _too_complex(matcher.get_error())
        if not taken or (self.is_stopped and matcher.stop_reason() == "EndOfSentence"):
            return False
        if not self.is_stopped:  # from here on the other thread owns the matcher
            self._since, self._work = 0.0, self._pool.submit(self._compute)
        return True

    def close(self) -> None:
        """The sequence has ended: drop a computation that has not started."""
        self._work.cancel()

    def _compute(self) -> np.ndarray:
        self._since = time.monotonic()
        if self._matcher is None:
            self._matcher = self._source.deep_copy()
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())
        return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(bool)


def _too_complex(reason: str) -> str:
    return f"guided_decoding_guide is too complex: {reason_of(reason)}"


class _TrialProcess:
    """Runs `main`, below. Started for the first guide, and again if it has ended."""

    def __init__(self, settings: tuple[str, int, list[int]]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._open: dict[int, Future[str]] = {}
        self._number = 0

    def run(self, guide: Guide) -> str:
        """Why a guide cannot be served. Empty: it can. Thread-safe."""
        verdict: Future[str] = Future()
        try:
            with self._lock:
                process = self._running()
                self._number += 1
                self._open[self._number] = verdict
                line = {"number": self._number, "kind": guide.type, "text": guide.text}
                assert process.stdin is not None
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()
            return verdict.result(TRIAL_S)
        except Exception:
            logger.exception("a guide could not be tried")
            return BUSY

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "manylora.engine.guide"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": paths},
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            self._open = {}  # the reader of the previous process ends the earlier ones
            given = process, self._open
            threading.Thread(target=_read, args=given, name="manylora-trials", daemon=True).start()
            weakref.finalize(self, process.stdin.close)  # closing it ends the process
        return self._process


def _read(process: subprocess.Popen[bytes], verdicts: dict[int, Future[str]]) -> None:
    """Read results until the process ends."""
    assert process.stdout is not None
    for line in process.stdout:
        answer = json.loads(line)
        verdict = verdicts.pop(answer["number"], None)
        if verdict is not None:
            verdict.set_result(answer["failure"])
    process.wait()
    while verdicts:
        _, verdict = verdicts.popitem()
        verdict.set_exception(RuntimeError("the process that tries guides has ended"))


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
    """Answer guides until the input ends: the first line names the tokenizer, each further line is a guide.
    The answer is a line with the reason why it cannot be served, or an empty one. A child of each waits for
    the trial.
    """
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

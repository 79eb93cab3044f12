"""Guided decoding with llguidance: grammars that constrain outputs, with limits on time and memory."""

from __future__ import annotations

import json
import logging
import os
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

from manylora.engine.guide_trial import BUSY, WALL_S, make_matcher, open_tokenizer, reason_of
from manylora.errors import ConfigError, RequestError
from manylora.request import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("manylora")

MAX_VERDICTS = 1024  # cached results of trials
MASK_THREADS = 2
TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex", "InternalError")  # stop reasons of llguidance
MASK_S = 5.0  # maximum for the mask of one token
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
    """Runs `guide_trial`. Started for the first guide, and again if it has ended."""

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
                [sys.executable, "-m", "manylora.engine.guide_trial"],
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

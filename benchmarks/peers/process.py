"""The benchmark's side of a worker: starts it, sends requests, reads its memory use, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import family

from peers.worker import Setup


@dataclass(frozen=True)
class Memory:
    """Resident bytes. own: without mapped files, whose pages the system can drop and read again."""

    all: int
    own: int


class WorkerError(Exception):
    """A worker failed or did not answer."""


class Worker:
    """A running worker, as a context manager. Raises WorkerError if the engine cannot be started; so do its
    methods if the engine fails."""

    def __init__(self, python: str, script: Path, setup: Setup, log: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python, "-u", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            started = self._ask(asdict(setup))
            self.versions: dict[str, str] = started["versions"]
            self._engine: int = started["pid"]
        except BaseException:
            self.close()
            raise

    def run(
        self, prompts: list[list[int]], adapters: list[int | None], tokens: int
    ) -> tuple[list[list[int]], float]:
        """Run all requests in one call. Returns the new tokens and the seconds."""
        answer = self._ask({"prompts": prompts, "adapters": adapters, "tokens": tokens})
        return answer["tokens"], answer["seconds"]

    def resident(self) -> Memory:
        """The current memory of the engine's process and its descendants."""
        total = files = 0
        for pid in family(self._engine):
            try:
                lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            sizes = {
                line.split(":")[0]: int(line.split()[1]) * 1024
                for line in lines
                if "Rss" in line or "VmRSS" in line
            }
            total += sizes.get("VmRSS", 0)
            files += sizes.get("RssFile", 0)
        return Memory(total, total - files)

    def close(self) -> None:
        """Kill all processes of the worker."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the worker has printed the reason before it ended
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise WorkerError(f"no answer in {self._timeout_s:.0f} s, see {self._log.name}") from None
        if not line:
            raise WorkerError(f"ended with {self._process.wait()}, see {self._log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

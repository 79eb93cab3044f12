"""Lifeline: a thread in each model's process that ends it with its server, and reports to the launcher.

Triton never ends a Python model's process that is busy when the server dies, so the process ends itself. If
possible a compiled C thread does this: the server's binding may block in a call to the dead server, for
example while it sets a metric, and holds the GIL meanwhile, so that no Python thread runs.

Launcher and processes share a run directory. The launcher creates the file `drain` there to make processes
refuse new requests, and removes the file `starting` when the server is ready. Each process writes a report:
whether it has seen `drain`, how many requests are open, and a number that grows while it works on them. A
report overwrites the previous one, also that of an earlier server, because this works on a full disk.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from manylora.system.compiler import Source, load_library

logger = logging.getLogger("manylora")

SOURCE = Source("lifeline", (Path(__file__).with_suffix(".c"),))
RUN_DIR = "MANYLORA_RUN_DIR"
WORLD_SIZE = "MANYLORA_WORLD_SIZE"  # variable with the launcher's --world_size, if it was given
DRAIN_FILE = "drain"
STARTING_FILE = "starting"
REPORT = "report."
REPORT_BYTES = 64
PERIOD_S = 0.25


class Report(NamedTuple):
    """held: open requests. written_ns: when the file was updated, even if the disk is full."""

    draining: bool
    held: int
    progress: int
    written_ns: int


class Lifeline:
    """Create this before a model loads, which may take long. It ends the process if the server is gone. If
    the C code ends it, the server's log has the stack of each thread.

    name: of the model's instance. activity: returns the number of open requests and the progress, on any
    thread; may be set later; the default is what `busy` counts.
    """

    def __init__(self, name: str) -> None:
        faulthandler.enable()
        self.draining = False
        self._held = self._done = 0
        self.activity: Callable[[], tuple[int, int]] = lambda: (self._held, self._done)
        self._parent = os.getppid()
        folder = os.environ.get(RUN_DIR)
        self._run_dir = Path(folder) if folder else None
        if folder and not _is_child_of_server(folder):
            os._exit(1)
        try:
            library = load_library(SOURCE)
            if library is not None and (error := library.end_with(self._parent)):
                raise OSError(error, os.strerror(error))
        except (OSError, subprocess.SubprocessError) as failure:
            text = "a thread of Python's watches the server, which may be stopped by it: %s"
            logger.warning(text, failure)
        self._report: int | None = None
        self._report_name = REPORT + name
        threading.Thread(target=self._watch, name="manylora-lifeline", daemon=True).start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context for the work on a request."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._done += 1

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_S):
            if os.getppid() != self._parent:
                os._exit(1)
            if self._run_dir is not None and self._run_dir.is_dir():
                # Read before the counts: after a report with this flag no new request is accepted.
                self.draining = (self._run_dir / DRAIN_FILE).exists()
                held, progress = self.activity()
                self._write(self._run_dir, f"{os.getpid()} {int(self.draining)} {held} {progress}")

    def _write(self, run_dir: Path, text: str) -> None:
        """Write in place. Even if that fails, the file's time shows that this process is alive."""
        try:
            if self._report is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._report = os.open(run_dir / self._report_name, flags, 0o600)
            try:
                os.pwrite(self._report, text.ljust(REPORT_BYTES).encode(), 0)
            except OSError:
                os.utime(self._report)
        except OSError:
            pass  # the run directory is being removed


def is_launched() -> bool:
    """Whether this server has a launcher that restarts it."""
    return RUN_DIR in os.environ


def is_starting() -> bool:
    """Whether the launcher has not called the server ready yet; False without a launcher."""
    return is_launched() and Path(os.environ[RUN_DIR], STARTING_FILE).exists()


def is_draining() -> bool:
    """Whether the launcher is about to stop the server for good; False without a launcher."""
    return is_launched() and Path(os.environ[RUN_DIR], DRAIN_FILE).exists()


def read_reports(run_dir: Path, pids: Container[int]) -> dict[int, Report]:
    """The latest reports of these processes. Other files are from an earlier server."""
    found = {}
    for path in run_dir.glob(f"{REPORT}*"):
        try:
            pid, draining, held, progress = map(int, path.read_text(encoding="utf-8").split())
            if pid in pids:
                found[pid] = Report(bool(draining), held, progress, path.stat().st_mtime_ns)
        except (OSError, ValueError):
            continue
    return found


def _is_child_of_server(folder: str) -> bool:
    """Whether the parent has this run directory, so it is not the process that adopts orphans."""
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except PermissionError:
        return os.getppid() != 1
    except OSError:
        return False
    return f"{RUN_DIR}={folder}".encode() in environment.split(b"\0")


class OwnClock:
    """Seconds, of which at most `longest_s` count between two readings: a longer gap means that the caller
    itself was stopped, perhaps others with it. Use on one thread, which must read it more often than that.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._time, self._read_at = 0.0, clock()

    def read(self) -> float:
        now = self._clock()
        self._time, self._read_at = self._time + min(now - self._read_at, self._longest_s), now
        return self._time

"""Lifeline: what ties a model's process to its server and its launcher.

Triton never ends a Python model's process that is busy when the server dies, so the process ends itself. The
launcher asks for draining by a file in the run directory, and another lies there until it calls the server
ready. Each process reports there, in a file of its own, whether it has seen the first, how many requests it
holds, and a number that grows while it works on them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "DRAIN_FILE",
    "PERIOD_S",
    "REPORT",
    "RUN_DIR",
    "STARTING_FILE",
    "Lifeline",
    "is_starting",
    "read_reports",
]

RUN_DIR = "MANYLORA_RUN_DIR"
DRAIN_FILE = "drain"
STARTING_FILE = "starting"
REPORT = "report."
PERIOD_S = 0.25


class Lifeline:
    """A daemon thread that watches the parent process and the run directory.

    activity: requests held and progress, from any thread; without it, what `busy` counts.
    """

    def __init__(self, name: str, activity: Callable[[], tuple[int, int]] | None = None) -> None:
        self.draining = False
        self._held = self._done = 0
        self._activity = activity or (lambda: (self._held, self._done))
        self._parent = os.getppid()
        folder = os.environ.get(RUN_DIR)
        self._run_dir = Path(folder) if folder else None
        self._report_name = REPORT + name
        threading.Thread(target=self._watch, name="manylora-lifeline", daemon=True).start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around the work on a request."""
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
                # Read before the counts: nothing new is taken after a report that says so.
                self.draining = (self._run_dir / DRAIN_FILE).exists()
                held, progress = self._activity()
                _write(self._run_dir / self._report_name, f"{int(self.draining)} {held} {progress}")


def is_starting() -> bool:
    """Whether the launcher still tries the server out; False without a launcher."""
    folder = os.environ.get(RUN_DIR)
    return folder is not None and (Path(folder) / STARTING_FILE).exists()


def read_reports(run_dir: Path) -> dict[str, tuple[bool, int, int]]:
    """By process name: draining, requests held, progress."""
    found = {}
    for path in run_dir.glob(f"{REPORT}*[!~]"):
        try:
            draining, held, progress = map(int, path.read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            continue
        found[path.name.removeprefix(REPORT)] = (bool(draining), held, progress)
    return found


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + "~")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError:
        pass  # the run directory is being removed

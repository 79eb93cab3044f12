"""Lifeline: what ties a model's process to its server and its launcher.

Triton never ends a Python model's process that is busy when the server dies, so the process ends itself. The
launcher asks for draining by a file in the run directory, and reads there how many requests are in flight.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["DRAIN_FILE", "INFLIGHT_FILE", "RUN_DIR", "Lifeline"]

RUN_DIR = "MANYLORA_RUN_DIR"
DRAIN_FILE = "drain"
INFLIGHT_FILE = "inflight"
PERIOD_S = 0.25


class Lifeline:
    """A daemon thread that watches the parent process and the run directory."""

    def __init__(self, inflight: Callable[[], int] | None = None) -> None:
        self._inflight = inflight
        self._parent = os.getppid()
        folder = os.environ.get(RUN_DIR)
        self._run_dir = Path(folder) if folder else None
        self.draining = False
        threading.Thread(target=self._watch, name="manylora-lifeline", daemon=True).start()

    @classmethod
    def start(cls, inflight: Callable[[], int] | None = None) -> Lifeline:
        """inflight: how many requests are open, from any thread; only the engine's model gives it."""
        return cls(inflight)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_S):
            if os.getppid() != self._parent:
                os._exit(1)
            if self._run_dir is not None and self._run_dir.is_dir():
                self.draining = (self._run_dir / DRAIN_FILE).exists()
                self._report(self._run_dir)

    def _report(self, run_dir: Path) -> None:
        if self._inflight is None:
            return
        # Written only after `draining` was read, so a count of 0 beside the drain file is final.
        try:
            fresh = run_dir / f"{INFLIGHT_FILE}.new"
            fresh.write_text(f"{int(self.draining)} {self._inflight()}")
            fresh.replace(run_dir / INFLIGHT_FILE)
        except OSError:
            pass  # the run directory is being removed

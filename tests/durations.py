"""How long each file of tests takes, as measured; and the order in which workers take the files.

Short files come first, so that most failures are seen at once. The others follow by falling time, so that the
workers end together. One worker takes the files of tests/server, which wait more than they compute.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FILE = Path(__file__).with_name("durations.json")
SHORT_S = 4.0


def read() -> dict[str, float]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def write(seconds: Counter[str]) -> None:
    rounded = {name: round(value, 1) for name, value in sorted(seconds.items())}
    FILE.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


class ByDuration(LoadFileScheduling):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seconds = read()

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next(node), last=False)
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str:
        servers = [name for name in self.workqueue if name.startswith("tests/server/")]
        others = [name for name in self.workqueue if not name.startswith("tests/server/")]
        mine = servers if node is self.nodes[0] else others
        return min(mine or self.workqueue, key=lambda name: place(name, self._seconds))


def place(name: str, seconds: dict[str, float]) -> tuple[bool, float]:
    """Where a file stands in the order."""
    found = seconds.get(name, 1.0)
    return found > SHORT_S, found if found <= SHORT_S else -found

"""ServerLog: why tritonserver did not start, by its log."""

from __future__ import annotations

import os
import re
from pathlib import Path

from manylora.launcher.logs import LOG_BYTES


class ServerLog:
    """To be created before the server: what was in the file then is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0

    def refusal(self) -> str | None:
        """The sentence that says why a model did not load."""
        found = re.findall(r"(?:UNAVAILABLE|Internal|Invalid argument): ([^|\n]+)", self._read())
        return found[0].split("\\n")[0].strip(' "') if found else None  # without Python's trace

    def complaint(self) -> str | None:
        """The first error of any kind."""
        errors = r"^E\d{4} (?!.*CudaDriverHelper)[^\]]+\] \"?([^\n\"]+)"
        found = re.findall(errors, self._read(), re.MULTILINE)
        return found[0].strip(' "') if found else None

    def _read(self) -> str:
        try:
            with self.path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(self._start if self._start <= size else 0)
                return log.read(LOG_BYTES).decode(errors="replace")
        except OSError:
            return ""

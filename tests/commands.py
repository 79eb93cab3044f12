"""Commands of the README with a model, as users type them: with defaults, except for the ports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_for_named

MANYLORA = [sys.executable, "-m", "manylora.cli"]


RUNNING = re.compile(r"Uvicorn running on (http://\S+)")


@contextmanager
def served(log: Path, *arguments: object) -> Iterator[str]:
    """`manylora serve` with these arguments, until the end. Gives its address."""
    command = [*MANYLORA, "serve", *map(str, arguments), "--port=0"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            wait_for_named(
                "the server", lambda: process.poll() is not None or RUNNING.search(log.read_text())
            )
            found = RUNNING.search(log.read_text())
            assert found is not None, log.read_text()
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)

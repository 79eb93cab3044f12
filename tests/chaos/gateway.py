"""`manylora serve` on the demo model, in a process of its own."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from service import ANSWERS, DEMO, QUESTION, SILENCE_S, free_ports


class Gateway:
    """Started on entry, ended on leaving. root: where its adapters lie."""

    def __init__(self, folder: Path, root: Path = DEMO / "adapters") -> None:
        [self.port] = free_ports(1)
        command = [
            "serve",
            DEMO / "base",
            "--lora-root",
            root,
            "--served-model-name",
            "demo",
            "--allow-runtime-lora-updating",
        ]
        self._log = (folder / "serve.log").open("ab")
        program = Path(sys.executable).with_name("manylora")
        self._command = [program, *map(str, command), "--port", str(self.port), "--device", "cpu"]

    def __enter__(self) -> Gateway:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 60
        while not self.is_right():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(Path(self._log.name).read_text()[-2000:])
            time.sleep(0.2)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def processes(self) -> dict[str, int]:
        return {"serve": self._process.pid} if self._process.poll() is None else {}

    def is_right(self) -> bool:
        """Whether the base and both adapters answer as they should."""
        try:
            return all("".join(self.stream(name, 8, None)) == answer for name, answer in ANSWERS.items())
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def stream(
        self, name: str | None = None, tokens: int = 200, ignore_eos: bool | None = True
    ) -> Iterator[str]:
        """The pieces of an answer. Raises OSError, HTTPException, ValueError."""
        body = {
            "model": name or "demo",
            "prompt": QUESTION,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
        }
        if ignore_eos is not None:
            body["ignore_eos"] = ignore_eos
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SILENCE_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices", [])
                    if not choices:
                        raise ValueError(line.decode())
                    yield choices[0]["text"]
        finally:
            connection.close()

"""A `manylora fleet` for tests: a tiny model, adapters, and a check that nothing of it is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from servers import free_ports
from tiny_models import make_adapter, make_model, reference_generate
from waiting import answers, wait_for

REPLICAS = 2
ADAPTERS = 4
PROMPT = [5, 17, 42, 99, 7]
MAIN = "import sys; from manylora.cli import main; sys.exit(main())"


@dataclass
class Fleet:
    url: str
    process: subprocess.Popen[bytes]
    model: Path
    root: Path

    def complete(self, adapter: str, tokens: int = 6, timeout: float = 60) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body(adapter, tokens), timeout=timeout)

    def check_answers(self, *names: str) -> None:
        """Those of base and adapters are the reference's."""
        for name in names:
            answer = self.complete(name)
            assert answer.status_code == 200, answer.text
            adapter = None if name == "base" else self.root / name
            expected = reference_generate(self.model, adapter, PROMPT, 6)
            assert answer.json()["choices"][0]["token_ids"] == expected

    def cache(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/cache", timeout=60).json()

    def replicas(self) -> list[dict[str, Any]]:
        return self.cache().get("replicas", [])  # none while one does not answer


def body(adapter: str, tokens: int, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": adapter, "prompt": PROMPT, "max_tokens": tokens, **fixed, **more}


def is_ready(url: str) -> bool:
    return answers(f"{url}/health/ready")


def processes_of(session: int) -> list[str]:
    """Everything that the command has started, which is in its session."""
    found = subprocess.run(["ps", "-s", str(session), "-o", "stat=,args="], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if line and not line.startswith("Z")]


@contextmanager
def started(folder: Path, replicas: int, *more: str) -> Iterator[Fleet]:
    """`manylora fleet` with the adapters a0, a1, and so on; nothing of it is left behind."""
    model = make_model(folder / "model", "llama", seed=11, max_position_embeddings=4096)
    root = folder / "adapters"
    for number in range(ADAPTERS):
        make_adapter(root / f"a{number}", model, seed=number)
    (port,) = free_ports(1)
    flags = ["--replicas", str(replicas), "--port", str(port), "--device", "cpu", "--report-seconds", "0.2"]
    flags += ["--served-model-name", "base", "--lora-root", str(root), *more]
    log = folder / "fleet.log"
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # not below `folder`: paths of sockets are short
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "fleet", str(model), *flags],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(place)},
        )
    fleet = Fleet(f"http://127.0.0.1:{port}", process, model, root)
    try:
        wait_for(lambda: process.poll() is not None or is_ready(fleet.url), 300)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        wait_for(lambda: len(fleet.replicas()) == replicas)
        yield fleet
    finally:
        process.terminate()
        process.wait(60)
    wait_for(lambda: not processes_of(process.pid))
    wait_for(lambda: not list(place.glob("manylora-*")))
    shutil.rmtree(place)

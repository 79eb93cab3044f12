"""The demo model behind a real tritonserver, its processes by role, and questions whose answers are known."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
sys.path.insert(0, str(ROOT / "tests" / "server"))

from servers import Running, fill_repo, free_ports, new_server  # noqa: E402

__all__ = ["ANSWERS", "DEMO", "MODELS", "QUESTION", "ROOT", "SILENCE_S", "Service", "free_ports", "resident"]

QUESTION = "Where is the capital of Japan? \\nAnswer:"
ANSWERS = {None: " Tokyo", "chinese": "东京", "japanese": "東京"}
MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")
SILENCE_S = 10.0  # after so long without a byte a client counts as not heard


class Service:
    """Launched by `start`, found again by what its processes say of themselves, whoever started them."""

    def __init__(self, folder: Path, lora_catalog_dir: str = str(DEMO / "adapters")) -> None:
        repo = fill_repo(
            folder / "models",
            DEMO / "base",
            lora_catalog_dir=lora_catalog_dir,
            max_queue_size="200",
            guided_decoding_backend="xgrammar",
        )
        self.server: Running = new_server(repo)

    def start(self) -> None:
        started = self.server.launch()
        if started.returncode:
            raise RuntimeError(started.stderr)

    def stop(self) -> None:
        self.server.launch("--stop")

    def processes(self) -> dict[str, int]:
        """Role to pid of those that live: server, its door, models, launcher processes as launcher-<pid>."""
        port, door = f"--http_port={self.server.http} ", f"--port={self.server.http} --inner-port="
        triton, found = f"--model-repository {self.server.repo} ", {}
        for pid, command in commands():
            if port in command:
                found[f"launcher-{pid}"] = pid
            elif door in command:
                found["door"] = pid
            elif triton in command and "bin/tritonserver" in command:
                found["tritonserver"] = pid
            elif f"{self.server.repo}/" in command and "triton_python_backend_stub" in command:
                found[next((name for name in MODELS if f"/{name}/" in command), f"stub-{pid}")] = pid
        return found

    def leftovers(self) -> list[str]:
        """What should not be there once it is stopped."""
        regions = [str(path) for path in Path("/dev/shm").glob(f"manylora_*_{self.server.http}_*")]
        return regions + [f"{role} ({pid})" for role, pid in self.processes().items()]

    def is_right(self) -> bool:
        """Whether the base and both adapters answer as they should, through the ensemble."""
        try:
            return all(self.ask(name) == answer for name, answer in ANSWERS.items())
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def wait_until_right(self, seconds: float = 180) -> float:
        """How long it took. Raises TimeoutError."""
        began = time.monotonic()
        while not self.is_right():
            if time.monotonic() - began > seconds:
                raise TimeoutError(
                    f"no right answer within {seconds:.0f} s; {self.server.launch('--status').stdout}"
                )
            time.sleep(0.1)
        return time.monotonic() - began

    def ask(self, name: str | None = None, tokens: int = 8) -> str:
        return json.loads(b"".join(self._lines("generate", name, tokens)))["text_output"]

    def stream(self, name: str | None = None, tokens: int = 200) -> Iterator[str]:
        """The pieces of an answer that goes on and on. Raises OSError, HTTPException, ValueError."""
        for line in self._lines("generate_stream", name, tokens, stream=True, end_id=-1):
            if line.startswith(b"data:"):
                yield json.loads(line[5:])["text_output"]

    def _lines(self, kind: str, name: str | None, tokens: int, **more: object) -> Iterator[bytes]:
        body = {"text_input": QUESTION, "max_tokens": tokens, "exclude_input_in_output": True, **more}
        if name is not None:
            body["lora_name"] = name
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http, timeout=SILENCE_S)
        try:
            connection.request("POST", f"/v2/models/ensemble/{kind}", json.dumps(body))
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {answer.read(500).decode(errors='replace')}")
            yield from answer
        finally:
            connection.close()


def commands() -> Iterator[tuple[int, str]]:
    """Every process that lives, with its command line."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if command and int(path.name) != os.getpid():
            yield int(path.name), command


def resident(pid: int) -> int:
    """Bytes of memory that only this process has; 0 when it is gone."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) * 1024

"""Servers for tests: a filled model repository, its ports, and the commands that start, watch and stop it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.doors.triton.launcher.processes import free_port
from manylora.doors.triton.launcher.run_directory import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from fill_template import fill

ROOT = Path(__file__).resolve().parents[2]
BLS_VALUES = ("accumulate_tokens", "tensorrt_llm_draft_model_name")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The engine of a tiny model answers anything in a fraction of a second: what a test does in the middle of an
# answer, or of a start, would come too late on a quick machine, or where the test gets no time for a moment.
BRAKES = """

def _brakes(slow: Path, held: Path) -> None:
    import time

    from manylora.engine.engine import Engine

    step, start = Engine.step, EngineLoop.start

    def slow_step(engine: Engine) -> object:
        if slow.exists():
            time.sleep(0.05)
        return step(engine)

    def held_start(*given: object) -> EngineLoop:
        while held.exists():
            time.sleep(0.02)
        return start(*given)

    Engine.step, EngineLoop.start = slow_step, staticmethod(held_start)


_brakes(Path({slow!r}), Path({held!r}))
"""


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def fill_repo(path: Path, model: Path, *, contracts: bool = False, **values: str) -> Path:
    """A filled copy of model_repo/. contracts: with the models of other projects, which need no filling."""
    shutil.copytree(ROOT / "model_repo", path)
    for name in () if contracts else ("vllm_model", "llmapi"):
        shutil.rmtree(path / name)
    common = "triton_max_batch_size:8"
    weights = values.setdefault("lora_weights_data_type", "TYPE_FP16")
    tokenizer = values.pop("tokenizer_dir", model)
    decoupled = values.pop("decoupled_mode", "True")
    bls = ["bls_instance_count:1", "logits_datatype:TYPE_FP32", f"lora_weights_data_type:{weights}"]
    bls += [f"{name}:{values.pop(name)}" for name in BLS_VALUES if name in values]
    fills = {
        "tensorrt_llm_bls": ",".join([common, f"decoupled_mode:{decoupled}", *bls]),
        "ensemble": f"{common},logits_datatype:TYPE_FP32,lora_weights_data_type:{weights}",
        "preprocessing": f"{common},tokenizer_dir:{tokenizer},preprocessing_instance_count:1",
        "postprocessing": f"{common},tokenizer_dir:{model},postprocessing_instance_count:1",
        "tensorrt_llm": ",".join(
            [
                f"{common},triton_backend:python,decoupled_mode:{decoupled}",
                f"engine_dir:{model},batching_strategy:inflight_fused_batching,logits_datatype:TYPE_FP32",
                "encoder_input_features_data_type:TYPE_FP16,device:cpu",
                *(f"{name}:{value}" for name, value in values.items()),
            ]
        ),
    }
    for name, substitutions in fills.items():
        config = path / name / "config.pbtxt"
        text = fill(config.read_text(encoding="utf-8"), substitutions, str(config))
        config.write_text(text, encoding="utf-8")
    with (path / "tensorrt_llm" / "1" / "model.py").open("a", encoding="utf-8") as file:
        file.write(BRAKES.format(slow=f"{path}.slow", held=f"{path}.held"))
    return path


@dataclass
class Running:
    repo: Path
    http: int
    grpc: int
    metrics: int

    def command(self, *flags: str) -> list[str]:
        command = [sys.executable, str(ROOT / "launch_triton_server.py"), f"--model_repo={self.repo}"]
        ports = [f"--http_port={self.http}", f"--grpc_port={self.grpc}", f"--metrics_port={self.metrics}"]
        return [*command, *ports, "--address=127.0.0.1", "--force", *flags]

    def launch(self, *flags: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*flags),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def start(self, *flags: str) -> None:
        started = self.launch(*flags)
        assert started.returncode == 0, started.stderr

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and text of a `generate` request. path: model/generate or model/generate_stream."""
        url = f"http://127.0.0.1:{self.http}/v2/models/{path}"
        try:
            with urllib.request.urlopen(url, json.dumps(body).encode(), 60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stream(self, model: str, **body: Any) -> list[dict[str, Any]]:
        """The pieces of a streamed answer."""
        status, text = self.post(f"{model}/generate_stream", **body, stream=True)
        assert status == 200, text
        return [json.loads(line[6:]) for line in text.split("\n\n") if line.strip()]

    @property
    def run_dir(self) -> Path:
        return RunDirectory(self.http).path

    @property
    def secret(self) -> str:
        return (self.run_dir / "management.secret").read_text(encoding="utf-8")

    @property
    def management(self) -> dict[str, str]:
        """Metadata of gRPC calls that manage the server."""
        return {"triton-grpc-protocol-manylora-management": self.secret}

    def state(self) -> dict[str, Any]:
        """What --status shows, without a process for each look; empty while nobody supervises."""
        return RunDirectory(self.http).status()

    def slow(self) -> AbstractContextManager[Path]:
        """Each step of the engine takes 50 ms longer, an answer of 200 tokens 10 s: until the end, or until
        the file that this gives is removed."""
        return self._brake("slow")

    def held(self) -> AbstractContextManager[Path]:
        """What starts meanwhile does not load the model before the end."""
        return self._brake("held")

    @contextmanager
    def _brake(self, name: str) -> Iterator[Path]:
        brake = Path(f"{self.repo}.{name}")
        brake.touch()
        try:
            yield brake
        finally:
            brake.unlink(missing_ok=True)


NAMES = ("one", "two", "three", "four")
INVOKE = "zq"  # the tokenizer has a token for each byte


@dataclass
class Named:
    """Adapters by name: some in a catalog, NAMES[2:] elsewhere, in multi_lora.json."""

    catalog: Path
    folders: dict[str, Path]  # of NAMES, all of one size
    labels: Any  # PEFT's models of others, with heads
    score: Any


def new_server(repo: Path) -> Running:
    return Running(repo, *free_ports(3))


@contextmanager
def served(repo: Path, *flags: str) -> Iterator[Running]:
    """A server that is started, and stopped at the end."""
    server = new_server(repo)
    server.start(*flags)
    yield server
    stopped = server.launch("--stop")
    assert stopped.returncode == 0, stopped.stderr


@dataclass
class World:
    model: Path
    adapters: dict[int, Path]  # task id -> PEFT directory
    converted: Path  # <task id>/ with the .npy pair

    def gateway(self, grpc_port: int, folder: Path) -> dict[str, Any]:
        """Options of an OpenAI server in front of a Triton with this model, whose adapters it names in a new
        folder."""
        folder.mkdir()
        for task_id, path in self.adapters.items():
            (folder / f"adapter-{task_id}").symlink_to(path)
        return {
            "model": self.model,
            "device": "auto",
            "served_model_name": ("base",),
            "triton_url": f"127.0.0.1:{grpc_port}",
            "lora_root": (folder,),
            "lora_allowed_path": tuple({path.parent for path in self.adapters.values()}),
        }

"""Protects what `tensorrt_llm` makes of tensors: decoded, run by the engine and encoded as its model.py does,
without a server, on the demo's model and adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recorded import Replay, without
from tensor_scenarios import TENSORS, World, settled

from manylora.adapters.formats.npy import read_npy
from manylora.config.repository import engine_config
from manylora.doors.cli.convert import main as convert
from manylora.doors.triton.engine_worker import EngineModelOptions, EngineWorker
from manylora.doors.triton.server_types import FINAL
from manylora.engine.loop import EngineLoop
from manylora.system.lifeline import Lifeline

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
METRICS = SimpleNamespace(update=lambda stats: None, observe=lambda lora, event: None)
NAMES = ("chinese", "japanese")


class Response:
    """As Triton's binding has it. content: outputs by name, or an error's text."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def output_tensors(self) -> list[object]:
        return []


class Call:
    """A request as Triton hands it over, and its sender."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays, self.answers, self._done = arrays, list[Any](), threading.Event()

    def request_id(self) -> str:
        return ""

    def parameters(self) -> str:
        return "{}"

    def inputs(self) -> list[Any]:
        return [
            SimpleNamespace(name=lambda n=name: n, shape=lambda a=array: a.shape, as_numpy=lambda a=array: a)
            for name, array in self._arrays.items()
        ]

    def get_response_sender(self) -> Call:
        return self

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        if response is not None:
            self.answers.append(response.content)
        if flags == FINAL:
            self._done.set()

    def result(self) -> list[Any]:
        assert self._done.wait(60)
        return self.answers


class Door:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for number, name in enumerate(NAMES, 1):
            source, target = str(DEMO / "adapters" / name), str(folder / str(number))
            assert convert(["-i", source, "-o", target, "--storage-type", "float32"]) == 0
        parameters = {
            "gpt_model_type": "inflight_fused_batching", "gpt_model_path": str(DEMO / "base"),
            "device": "cpu", "dtype": "float32", "lora_catalog_dir": str(DEMO / "adapters"),
            "max_beam_width": "4", "guided_decoding_backend": "xgrammar",
            "max_tokens_in_paged_kv_cache": "2048",
            "lora_cache_host_memory_bytes": str(2**25),
        }  # fmt: skip
        loop = EngineLoop.start(engine_config(parameters))
        options = EngineModelOptions(True, False, "float32", 0.05, 1.0)
        self.worker: EngineWorker = EngineWorker(
            loop, options, Lifeline("engine"), METRICS, lambda outputs: Response(dict(outputs)),
            lambda error: Response(f"{type(error).__name__}: {error}"),
        )  # fmt: skip
        self._world = World(self._tensors, "chinese", [0] * 3)
        [first] = self.ask({})
        self._world = World(self._tensors, "chinese", first["output_ids"].ravel()[-6:].tolist())

    def _tensors(self, task_id: int) -> tuple[np.ndarray, np.ndarray]:
        return read_npy(self._folder / str(task_id))

    def ask(self, given: dict[str, Any]) -> list[Any]:
        call = Call(self._world.arrays(given))
        self.worker.execute([call])
        return call.result()

    def play(self, given: dict[str, Any]) -> Any:
        answers = self.ask(given)
        if isinstance(answers[-1], str):
            return without(answers[-1], demo=DEMO)
        return settled([one for one in answers if one], bool(given.get("streaming")))


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("replay"))
    yield made
    made.worker.close()


@pytest.mark.parametrize("name", TENSORS)
def test_engine(name: str, door: Door, replay: Replay) -> None:
    replay(name, door.play(TENSORS[name]))


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names([*TENSORS])

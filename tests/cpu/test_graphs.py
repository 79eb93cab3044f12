"""Protects recorded decode steps: padded to a bucket and replayed on other contents they give the tokens of
the plain loop. Recording is faked by a function that runs again on the same buffers; the kernels are those of
the GPU, under the interpreter where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import running
import torch
from parity import linear_names
from running import read
from selection import extended
from tiny_models import make_adapter, make_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manylora.adapters.convert import convert_peft
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.triton.metrics import engine_samples
from manylora.engine.engine import Engine
from manylora.engine.graphs import buckets_for
from manylora.engine.loop import EngineLoop
from manylora.errors import DeviceLostError, EngineDeadError, RequestError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.model.batch import ForwardBatch
from manylora.model.checkpoint import read_model_config
from manylora.request import Event, LoraInput, Request, SamplingConfig

CPU = torch.device("cpu")
KINDS = ((8, ("q_proj", "v_proj")), (20, ("q_proj", "down_proj")))


class Recorder:
    """Counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        function()

        def replay() -> Tensor:
            self.replayed += 1
            return function()

        return replay


@pytest.fixture(autouse=True)
def _at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.engine.runner.PLAIN_USES", 0)


def make_world(path: Path) -> tuple[Path, list[LoraInput]]:
    """A model of one layer with few heads, and an adapter of each of KINDS."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model(path / "model", seed=1, num_hidden_layers=1, **heads)
    adapters = []
    for i, (rank, modules) in enumerate(KINDS):
        folder = make_adapter(path / str(i), model, seed=i, rank=rank, modules=modules)
        adapters.append(LoraInput(i + 1, *convert_peft(folder, "float32")))
    return model, adapters


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoraInput]]:
    return make_world(tmp_path_factory.mktemp("graphs"))


def open_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: Device | None, **options: object
) -> Engine:
    with monkeypatch.context() as patch:
        if device is not None:
            patch.setattr("manylora.engine.build.open_device", lambda name: device)
        lora = LoraCacheConfig(gpu_memory_bytes=2**21, host_memory_bytes=2**22)
        settings = {"max_seq_len": 32, "tokens_per_block": 4, "max_batch_size": 6, **options}
        return Engine(EngineConfig(model, device="cpu", lora=lora, **settings))  # type: ignore[arg-type]


def answers(engine: Engine, loras: list[LoraInput | None], new: int = 2) -> list[list[int]]:
    """Prompts of different lengths, one for each adapter, so that they end prefill together."""
    requests = (
        Request(tuple(range(3, 6 + 2 * i)), SamplingConfig(max_tokens=new + i % 2), lora)
        for i, lora in enumerate(loras)
    )
    return running.answers(engine, *requests)


def test_replayed_steps_give_the_tokens_of_the_plain_loop(
    world: tuple[Path, list[LoraInput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = world
    recorder = Recorder()
    plain = open_engine(model, monkeypatch, None)
    device = Device(CPU, CudaOps(part_keys=32), "interpreted", recorder)
    graphed = open_engine(model, monkeypatch, device, max_batch_size=4, max_seq_len=68)
    warmed = recorder.recorded
    assert warmed == graphed.stats().graphs.recorded == 2 * len(buckets_for(4)) == 6, "two widths of tables"
    loads = [[None], [adapters[0]] * 2, [*adapters, None]]  # base, one for all, distinct
    for loras in loads:
        assert answers(graphed, loras) == answers(plain, loras)
    assert recorder.replayed > recorder.recorded > warmed
    counted = graphed.stats().graphs
    assert counted.recorded == recorder.recorded and counted.replayed == recorder.replayed - warmed
    answers(graphed, loads[2][::-1])  # the first time adapters may come one step after the others
    before = recorder.recorded
    assert answers(graphed, loads[2][::-1]) == answers(plain, loads[2][::-1])
    assert recorder.recorded == before, "a shape that was recorded is recorded again"


class NothingWaits(TorchDispatchMode):
    """Refuses operations whose result's shape or value must come to the host: no graph can hold one."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().removeprefix("aten::").split(".")[0]
        assert not name.startswith(self.WAITING), f"{name} waits for the device"
        boolean = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        assert not boolean, "an index of booleans waits for the device"
        return func(*args, **(kwargs or {}))


HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ONE = {"num_hidden_layers": 1}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "modules": ("q_proj",)}
# A family, settings of its model, its adapter, and how it is quantised.
KINDS_OF_LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], QuantConfig | None]] = {
    "soft caps and windows": ("gemma2", {}, {}, None),
    "experts": ("mixtral", ONE, EXPERTS, None),
    "recurrent": ("granite4", HYBRID, {}, None),
    "a delta rule": ("qwen3.5", {}, {}, None),
    "8 bits": ("llama", ONE, {}, QuantConfig("W8A16", kv_cache_quant_algo="FP8")),
    "4 bits": ("mixtral", ONE, {}, QuantConfig("W4A16", group_size=32)),
}


@pytest.mark.parametrize(
    "kind",
    ["soft caps and windows", "recurrent", "8 bits", "4 bits", *extended("experts", "a delta rule")],
)
def test_each_kind_of_layer_is_recorded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps wait for nothing, and give the plain loop's tokens; neither a padded row nor the
    recording itself changes a state."""
    family, settings, tuned, quant = KINDS_OF_LAYERS[kind]
    model = make_model(tmp_path / "model", family, seed=1, **settings)
    modules = linear_names(read_model_config(model)).linears
    folder = make_adapter(tmp_path / "adapter", model, seed=1, rank=4, **{"modules": modules, **tuned})
    adapter = replace(read(folder, model, 1), task_id=1)
    plain = open_engine(model, monkeypatch, None, max_batch_size=4, quant=quant)
    ops, recorder = CudaOps(part_keys=32), Recorder()
    options = {"max_batch_size": 4, "cuda_graph_cache_size": 1, "quant": quant}
    graphed = open_engine(model, monkeypatch, Device(CPU, ops, "interpreted", recorder), **options)
    forward = graphed._parts.decoder.forward

    def watched(batch: ForwardBatch, *others: Any) -> Tensor:
        with NothingWaits() if len(batch.logits_rows) == len(batch.input_ids) else nullcontext():
            return forward(batch, *others)

    monkeypatch.setattr(graphed._parts.decoder, "forward", watched)
    loras = [None, adapter, None]  # of four rows: one is padded
    assert answers(graphed, loras) == answers(plain, loras)
    assert recorder.replayed > 0


def test_steps_without_adapters_take_graphs_without_them(
    world: tuple[Path, list[LoraInput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = world
    ops = CudaOps()
    monkeypatch.setattr("manylora.engine.runner.PLAIN_USES", 1)
    engine = open_engine(model, monkeypatch, Device(CPU, ops, "interpreted", Recorder()), max_batch_size=1)
    calls: list[int] = []
    monkeypatch.setattr(ops, "lora_add", lambda *arguments: calls.append(1))
    answers(engine, [None])
    assert not calls
    answers(engine, [adapters[0]])
    assert calls
    samples = engine_samples(replace(engine.stats(), on_gpu=True))
    launches = {one.labels: one.value for one in samples if one.family == "manylora_decode_steps_total"}
    assert launches == {(("launch", "graph"),): 1, (("launch", "plain"),): 1}, "recorded at its second use"


@pytest.mark.parametrize(
    ("error", "every", "said"),
    [
        (RuntimeError("capturing"), 2, "a decode step could not be recorded"),
        (torch.OutOfMemoryError(), 1, "no memory is left to record"),
    ],
)
def test_a_recording_that_fails_does_not_change_an_answer(
    error: Exception,
    every: int,
    said: str,
    world: tuple[Path, list[LoraInput]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Recorder):
        tried = 0

        def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            self.tried += 1
            if not self.tried % every:
                raise error
            return super().__call__(function)

    recorder = Failing()
    device = Device(CPU, CudaOps(part_keys=32), "interpreted", recorder, overlaps=True)
    failing = open_engine(world[0], monkeypatch, device, max_batch_size=2)
    plain = open_engine(world[0], monkeypatch, None, max_batch_size=2)
    assert answers(failing, [None, None], new=6) == answers(plain, [None, None], new=6)
    assert recorder.tried > recorder.recorded and said in caplog.text


class Lost(Device):
    def probe(self) -> None:
        raise DeviceLostError("gone")


def ask(loop: EngineLoop) -> Event:
    got, done = [], threading.Event()
    request = Request((3, 4, 5), SamplingConfig(max_tokens=3))
    loop.submit(request, lambda event: (got.append(event), done.set()))
    assert done.wait(60)
    return got[-1]


@pytest.mark.parametrize("where", ["launch", "landing"])
def test_a_step_that_fails_ends_its_requests_alone(
    where: str, world: tuple[Path, list[LoraInput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(world[0], monkeypatch, None, enable_overlap=True)
    loop = EngineLoop(engine)
    try:
        want = ask(loop).token_ids
        with monkeypatch.context() as patch:
            name = "model.decoder.Decoder.forward" if where == "launch" else "kernels.device.Arrival.wait"
            patch.setattr(f"manylora.{name}", _raise)
            assert isinstance(ask(loop).error, RequestError)
        assert loop.alive and ask(loop).token_ids == want
        engine.check()
    finally:
        loop.close()


def test_a_lost_device_ends_the_engine(
    world: tuple[Path, list[LoraInput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(world[0], monkeypatch, None)
    object.__setattr__(engine._parts, "device", Lost(CPU, engine._parts.device.ops, "lost"))
    monkeypatch.setattr("manylora.model.decoder.Decoder.forward", _raise)
    loop = EngineLoop(engine)
    try:
        assert isinstance(ask(loop).error, EngineDeadError)
        assert not loop.alive
        with pytest.raises(EngineDeadError):
            ask(loop)
    finally:
        loop.close()


def _raise(*arguments: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

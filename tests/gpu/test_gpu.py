"""Protects the GPU path on a GPU: recorded and overlapped steps, copies on their own stream, experts and
quantised weights give the answers of transformers + PEFT or of a CPU. tests/cpu/test_cuda_*.py, beside these,
run its kernels there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import make_kind
from tiny_configs import MOE_FAMILIES
from tiny_models import make_adapter, make_model, reference_generate

from manylora.adapters.convert import convert_peft
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.kernels.device import Arrival, CopyStream, open_device
from manylora.kernels.spec import AttentionBatch
from manylora.kernels.transfer import TableCopy, to_device
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NEW = 12
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Path]]:
    path = tmp_path_factory.mktemp("gpu")
    model = make_model(path / "model", "llama", seed=1)
    adapters = {
        i: make_adapter(path / str(i), model, seed=i, rank=rank, modules=modules)
        for i, (rank, modules) in enumerate(
            [(8, MODULES), (64, MODULES[:3]), (1, MODULES[3:]), (20, MODULES), (8, MODULES[:1])], 1
        )
    }
    return model, adapters


def answers(engine: Engine, cases: list[tuple[int | None, tuple[int, ...]]], inputs: dict) -> list[list[int]]:
    handles = []
    for task_id, prompt in cases:
        request = Request(prompt, SamplingConfig(max_tokens=NEW), inputs[task_id] if task_id else None)
        handles.append(engine.submit(engine.prepare(request)))
    found: dict[int, list[int]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            assert event.error is None
            found[handle] += event.token_ids
    engine.check()
    return list(found.values())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device_rows", [None, 1500], ids=["resident", "evicted"])
def test_a_mixed_batch_answers_as_the_reference(
    world: tuple[Path, dict[int, Path]], graphs: bool, device_rows: int | None
) -> None:
    model, adapters = world
    inputs = {i: LoraInput(i, *convert_peft(path, "float32")) for i, path in adapters.items()}
    picks = np.random.default_rng(0)
    cases = [
        (i % 6 or None, tuple(int(t) for t in picks.integers(0, 250, picks.integers(1, 40))))
        for i in range(24)
    ]
    room = {"num_device_module_layer": device_rows} if device_rows else {"gpu_memory_bytes": 2**22}
    lora = LoraCacheConfig(host_memory_bytes=2**24, **room)
    config = EngineConfig(
        model, device="cuda", max_seq_len=128, max_tokens_in_paged_kv_cache=2**13, lora=lora,
        enable_cuda_graph=graphs,
    )  # fmt: skip
    engine = Engine(config)
    assert (engine.stats().graphs.recorded > 0) == graphs
    for (task_id, prompt), got in zip(cases, answers(engine, cases, inputs), strict=True):
        assert got == reference_generate(model, adapters[task_id] if task_id else None, prompt, NEW)
    if device_rows:
        assert engine.stats().adapters.device_evictions > 0


def test_a_mixed_batch_with_biases_embeddings_and_heads(
    world: tuple[Path, dict[int, Path]], tmp_path: Path
) -> None:
    model, adapters = world
    kinds = ("lora_bias", "both + DoRA", "modules_to_save", "norms saved", "token indices")
    paths = {i: make_kind(tmp_path / str(i), model, kind, i) for i, kind in enumerate(kinds, 10)}
    modules, base = lora_modules(read_model_config(model)), BaseWeights(model)
    inputs = {i: read_lora(find_source(path), i, ReadOptions(modules, base)) for i, path in paths.items()}
    inputs[1] = LoraInput(1, *convert_peft(adapters[1], "float32"))
    paths[1] = adapters[1]
    picks = np.random.default_rng(0)
    order = enumerate([None, *paths] * 2)
    cases = [(i, tuple(int(t) for t in picks.integers(0, 250, 9 + n))) for n, i in order]
    lora = LoraCacheConfig(host_memory_bytes=2**24, gpu_memory_bytes=2**22)
    config = EngineConfig(
        model, device="cuda", max_seq_len=128, max_tokens_in_paged_kv_cache=2**13, lora=lora
    )
    for (task_id, prompt), got in zip(cases, answers(Engine(config), cases, inputs), strict=True):
        assert got == reference_generate(model, paths[task_id] if task_id else None, prompt, NEW)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gemma2", "gemma3", "gemma3n", "mistral-sliding"])
def test_experts_windows_and_soft_caps_answer_as_the_reference(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, seed=1)
    kinds: list[dict[str, Any]] = [{"modules": MODULES[:4]}] * 2
    if family in MOE_FAMILIES:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        kinds = [{"target_parameters": parameters, "modules": MODULES[:2]}] * 2
    adapters = {
        i: make_adapter(tmp_path / str(i), model, seed=i, rank=4 * i, **kind)
        for i, kind in enumerate(kinds, 1)
    }
    inputs = {i: LoraInput(i, *convert_peft(path, "float32")) for i, path in adapters.items()}
    cases = [(i % 3 or None, tuple(range(3, 9 + 3 * i))) for i in range(8)]
    lora = LoraCacheConfig(host_memory_bytes=2**25, gpu_memory_bytes=2**24)
    engine = Engine(
        EngineConfig(model, device="cuda", max_seq_len=128, max_tokens_in_paged_kv_cache=2**13, lora=lora)
    )
    assert engine.stats().graphs.recorded > 0
    for (task_id, prompt), got in zip(cases, answers(engine, cases, inputs), strict=True):
        assert got == reference_generate(model, adapters[task_id] if task_id else None, prompt, NEW)


@pytest.mark.parametrize(
    "quant",
    [QuantConfig("W8A16"), QuantConfig("W4A16", group_size=32), QuantConfig(kv_cache_quant_algo="FP8")],
)
def test_quantised_models_answer_as_on_a_cpu(world: tuple[Path, dict[int, Path]], quant: QuantConfig) -> None:
    model, adapters = world
    inputs = {i: LoraInput(i, *convert_peft(path, "float32")) for i, path in adapters.items()}
    cases = [(i % 3 or None, tuple(range(3, 9 + 3 * i))) for i in range(6)]
    lora = LoraCacheConfig(host_memory_bytes=2**24, gpu_memory_bytes=2**22)
    settings: dict[str, Any] = {"max_seq_len": 128, "max_tokens_in_paged_kv_cache": 2**13, "lora": lora}
    found = [
        answers(Engine(EngineConfig(model, device=device, quant=quant, **settings)), cases, inputs)
        for device in ("cuda", "cpu")
    ]
    assert found[0] == found[1]


def test_overlapped_steps_give_the_tokens_of_the_plain_loop(
    world: tuple[Path, dict[int, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = world
    inputs = {i: LoraInput(i, *convert_peft(path, "float32")) for i, path in adapters.items()}
    lora = LoraCacheConfig(host_memory_bytes=2**24, gpu_memory_bytes=2**22)
    cases = [(i % 6 or None, tuple(range(3, 9 + 3 * i))) for i in range(12)]
    found, ahead = [], []
    for overlap in (None, False):
        config = EngineConfig(
            model, device="cuda", max_seq_len=128, max_tokens_in_paged_kv_cache=2**13, max_batch_size=8,
            lora=lora, enable_overlap=overlap,
        )  # fmt: skip
        engine = Engine(config)
        launch, befores = engine._runner.launch, list[Any]()

        def launched(step: Any, before: Any, launch: Any = launch, befores: Any = befores) -> Any:
            befores.append(before)
            return launch(step, before)

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "launch", launched)
            found.append(answers(engine, cases, inputs))
        ahead.append(sum(before is not None for before in befores))
    assert found[0] == found[1]
    assert ahead[0] > 0 and ahead[1] == 0


def test_a_step_waits_for_the_device_once(world: tuple[Path, dict[int, Path]]) -> None:
    """When its tokens are seen: whatever else made the host wait would raise."""
    model, adapters = world
    lora = LoraCacheConfig(host_memory_bytes=2**24, gpu_memory_bytes=2**22)
    engine = Engine(
        EngineConfig(model, device="cuda", max_seq_len=128, max_tokens_in_paged_kv_cache=2**13, lora=lora)
    )
    inputs = LoraInput(1, *convert_peft(adapters[1], "float32"))
    tokens = 0
    for mode in ("default", "error"):  # at first, graphs are recorded
        for options, wanted in (({}, inputs), ({"top_p": 0.9, "seed": 3}, None)):
            params = SamplingConfig(max_tokens=NEW, **options)  # type: ignore[arg-type]
            engine.submit(engine.prepare(Request((3, 4, 5), params, wanted)))
        for _ in range(3):
            engine.step()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            while engine.has_work:
                tokens += sum(len(event.token_ids) for _, event in engine.step() if event.error is None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert tokens == 4 * NEW


def test_tables_go_to_the_device_as_one_piece() -> None:
    device = torch.device("cuda")
    batch = AttentionBatch([0, 1], [5], torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([7]))
    moved = to_device(batch, device)
    assert moved.block_table.tolist() == [[3, 4]] and moved.slots.tolist() == [7]
    same = moved.block_table.untyped_storage().data_ptr() == moved.slots.untyped_storage().data_ptr()
    assert same and moved.slots.data_ptr() % 16 == 0
    TableCopy(moved)(AttentionBatch([0, 1], [6], batch.block_table + 1, batch.slots + 1))
    assert moved.block_table.tolist() == [[4, 5]] and moved.slots.tolist() == [8]
    assert Arrival(moved.slots).wait().tolist() == [8]


def test_a_copy_holds_what_comes_after() -> None:
    device = torch.device("cuda")
    copies, size = CopyStream(device), 2**24
    pages = torch.zeros(size, device=device)
    torch.cuda.synchronize()
    source = torch.ones(size, pin_memory=True)
    event = copies.start(lambda: pages.copy_(source, non_blocking=True))
    assert event is not None
    copies.hold(event)
    assert pages.sum().item() == size
    copies.finish()
    assert event.query()


def test_the_device_offers_our_kernels_and_recording() -> None:
    device = open_device("cuda")
    assert type(device.ops).__name__ == "CudaOps"
    assert device.capture is not None

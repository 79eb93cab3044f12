"""Protects the GPU path on a GPU: recorded steps, copies on their own stream, the chosen attention, experts
and quantised weights give the answers of transformers + PEFT or of a CPU. tests/cpu/test_cuda_*.py, beside
these, run its kernels there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manylora.config import EngineConfig, LoraCacheConfig
from manylora.device import CopyStream, open_device
from manylora.engine.engine import Engine
from manylora.lora.convert import convert_peft
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.parity import make_kind
from manylora.quant import QuantConfig
from manylora.request import LoraInput, Request, SamplingParams
from manylora.testing import MOE_FAMILIES, make_adapter, make_model, reference_generate

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
        request = Request(prompt, SamplingParams(max_tokens=NEW), inputs[task_id] if task_id else None)
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
    assert (engine._runner.num_graphs > 0) == graphs
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
    inputs = {i: read_lora(find_source(path), i, modules=modules, base=base) for i, path in paths.items()}
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


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gemma2", "gemma3", "mistral-sliding"])
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
    assert engine._runner.num_graphs > 0
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


def test_a_copy_sees_what_was_queued_before_and_holds_what_comes_after() -> None:
    device = torch.device("cuda")
    copies, size = CopyStream(device), 2**24
    pages = torch.zeros(size, device=device)
    source = torch.ones(size, pin_memory=True)
    before = pages.sum()
    event = copies.start(lambda: pages.copy_(source, non_blocking=True))
    assert event is not None
    copies.hold(event)
    after = pages.sum()
    assert (before.item(), after.item()) == (0, size)
    copies.finish()
    assert event.query()


def test_the_device_offers_our_kernels_and_recording() -> None:
    device = open_device("cuda")
    assert type(device.ops).__name__ == "CudaOps"
    assert device.capture is not None

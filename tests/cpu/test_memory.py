"""Protects how memory is divided: the largest step is measured before the KV cache takes the rest, common
adapters fit beside it on every card, and host memory takes what it says."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.memory import USUAL_ADAPTERS, adapter_room, plan_kv, with_room
from manylora.errors import ConfigError
from manylora.kernels.device import Device, host_tensor
from manylora.kernels.reference import ReferenceOps
from manylora.lora.geometry import plan_cache
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.request import MAX_MIXED
from manylora.testing.tiny_models import make_model

GIB = 2**30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("card", [24, 40, 80])
def test_common_adapters_of_a_large_model_fit_every_card(card: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    model, config, dtype = read_model_config(tmp_path), EngineConfig(tmp_path), torch.bfloat16
    modules = lora_modules(model).values()
    free = int(card * GIB * 0.97) - 16 * 10**9

    def sizes(lora: LoraCacheConfig) -> tuple[int, int]:
        room = adapter_room(config, lora, model, dtype, free)
        kv = plan_kv(config, model, dtype, torch.device("cuda"), free - room)
        left = free - kv.num_bytes
        plan = plan_cache(modules, 32, with_room(lora, room, left), dtype.itemsize, left)
        assert plan.device_pages * plan.geometry.page_elements * dtype.itemsize <= left
        return plan.adapters_of_rank(modules, 32, 8)

    on_host, on_device = sizes(LoraCacheConfig())
    assert min(on_host, on_device) >= USUAL_ADAPTERS
    if card < 80:
        with pytest.raises(ConfigError, match="Not enough space"):
            sizes(LoraCacheConfig(gpu_memory_fraction=0.06))  # chosen, so nothing gives way


def test_the_largest_step_is_measured_before_the_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ranks, taken = list[int](), set[int](), [0]
    forward = Decoder.forward

    class Measured(Device):
        def peak_bytes(self, run: Callable[[], object]) -> int:
            run()
            return taken[0]

        def free_bytes(self) -> int:
            return 10**7

    def watched(self: Decoder, batch: Any, kv: Any) -> torch.Tensor:
        rows.append(len(batch.input_ids))
        ranks.update(
            sum(one.format.rank for one in row.members)
            for s in batch.lora.segments
            for row in s.rows.values()
        )
        return forward(self, batch, kv)

    device = Measured(torch.device("cpu"), ReferenceOps(), "measured")
    monkeypatch.setattr("manylora.engine.build.open_device", lambda name: device)
    monkeypatch.setattr(Decoder, "forward", watched)
    model = make_model(tmp_path / "model", seed=1, num_hidden_layers=1)
    lora = LoraCacheConfig(gpu_memory_bytes=2**21, host_memory_bytes=2**22)
    config = EngineConfig(
        model, device="cpu", lora=lora, max_num_tokens=300, max_seq_len=200, max_batch_size=256
    )
    blocks = []
    for number in (0, 5 * 10**6):
        taken[0] = number
        engine = Engine(config)
        blocks.append(engine.stats().kv_blocks)
        engine.close()
    assert rows == [300, 300]
    assert ranks == {MAX_MIXED * lora.rank_limit}, "what rows keep grows with the sum of their ranks"
    assert abs(blocks[1] - blocks[0] / 2) <= 1


def test_host_memory_is_locked_as_it_is_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of pinned memory would round it up to a power of two."""
    locked: dict[int, int] = {}

    class Cudart:
        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
            locked[start] = size
            return 0

        def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
            del locked[start]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    made = host_tensor((3, 1001), torch.bfloat16, torch.device("cuda"))
    assert made.shape == (3, 1001) and made.dtype == torch.bfloat16 and not made.any()
    ((start, size),) = locked.items()
    assert start <= made.data_ptr() and made.data_ptr() + made.nbytes <= start + size < start + 6200
    assert made.data_ptr() % 64 == 0
    view = made[1:]
    del made
    gc.collect()
    assert locked, "a view holds it"
    del view
    gc.collect()
    assert not locked

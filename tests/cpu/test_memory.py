"""Protects how memory is divided: the largest step is measured before the KV cache takes the rest, common
adapters fit beside it on every card, and host memory takes what it says."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model

from manylora.adapters.geometry import plan_cache, usual_bytes
from manylora.adapters.modules import lora_modules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.engine.engine import Engine
from manylora.engine.sizing import USUAL_ADAPTERS, plan_memory, step_bytes
from manylora.errors import ConfigError
from manylora.kernels.device import Device, host_tensor
from manylora.kernels.reference import ReferenceOps
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.request import MAX_MIXED

GIB = 2**30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


# Layers, hidden size, heads, KV heads, MLP, vocabulary.
SIZES = {
    "30M": (6, 384, 6, 2, 1024, 32000),
    "135M": (30, 576, 9, 3, 1536, 49152),
    "0.6B": (28, 1024, 16, 8, 3072, 151936),
    "1.5B": (28, 1536, 12, 2, 8960, 151936),
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
}
CONTEXTS = (2048, 2**20)
FREE = (2, 4, 8, 24, 80, 512)  # GiB
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"gpu_memory_utilization": 0.5},
    {"kv_cache_free_gpu_mem_fraction": 0.5},
    {"max_seq_len": 1024},
    {"max_batch_size": 4, "max_num_tokens": 512},
    {"lora": LoraCacheConfig(gpu_memory_bytes=2**29)},
    {"lora": LoraCacheConfig(host_memory_bytes=2**28)},
)


def _model(folder: Path, size: str, context: int) -> tuple[ModelConfig, int]:
    """The configuration, and the bytes of its weights in 16 bits."""
    layers, hidden, heads, kv_heads, mlp, vocab = SIZES[size]
    config = LLAMA_8B | {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "intermediate_size": mlp,
        "vocab_size": vocab, "max_position_embeddings": context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    attention = hidden * hidden // heads * (2 * heads + 2 * kv_heads)
    return read_model_config(folder), 2 * (2 * vocab * hidden + layers * (attention + 3 * hidden * mlp))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("limits", LIMITS, ids=range(len(LIMITS)))
def test_every_start_that_could_work_works(device: str, limits: dict[str, Any], tmp_path: Path) -> None:
    """With room for a sequence of 2,048 tokens beside one small adapter, a start works within its memory."""
    dtype, on = torch.bfloat16, torch.device(device)
    config, started = EngineConfig(tmp_path, **limits), 0
    for size, context, free in product(SIZES, CONTEXTS, FREE):
        model, weights = _model(tmp_path, size, context)
        left = free * GIB - weights
        if config.gpu_memory_utilization:
            left -= int(free * GIB * (1 - config.gpu_memory_utilization))
        modules = lora_modules(model).values()
        token = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
        smallest_batch = config
        if limits.get("max_batch_size") is None and device == "cpu":
            smallest_batch = replace(config, max_batch_size=8, max_num_tokens=256)
        smallest = replace(config.lora, max_lora_rank=8, max_adapter_size=8)
        one = usual_bytes(modules, model.num_layers, smallest, 2, 0)
        if left < step_bytes(smallest_batch, model) + 2048 * token + one:
            continue  # not even this fits
        plan = plan_memory(config, model, (dtype, dtype), on, left)
        cache = plan_cache(modules, model.num_layers, plan.config.lora, 2, max(0, left - plan.kv.num_bytes))
        page = cache.geometry.page_elements * 2
        adapters = page * (cache.host_pages if device == "cpu" else cache.device_pages)
        assert min(cache.adapters_of_rank(modules, model.num_layers, plan.config.lora.rank_limit)) >= 1
        assert plan.kv.num_bytes + adapters <= left, (size, context, free)
        assert plan.kv.max_seq_len >= 512
        started += 1
    assert started > 30


@pytest.mark.parametrize("card", [24, 40, 80])
def test_common_adapters_of_a_large_model_fit_every_card(card: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    model, config, dtype = read_model_config(tmp_path), EngineConfig(tmp_path), torch.bfloat16
    modules = lora_modules(model).values()
    free = int(card * GIB * 0.97) - 16 * 10**9

    def sizes(lora: LoraCacheConfig) -> tuple[int, int]:
        plan = plan_memory(replace(config, lora=lora), model, (dtype, dtype), torch.device("cuda"), free)
        left = free - plan.kv.num_bytes
        cache = plan_cache(modules, 32, plan.config.lora, dtype.itemsize, left)
        assert cache.device_pages * cache.geometry.page_elements * dtype.itemsize <= left
        return cache.adapters_of_rank(modules, 32, 8)

    on_host, on_device = sizes(LoraCacheConfig())
    assert min(on_host, on_device) >= USUAL_ADAPTERS
    if card < 80:
        with pytest.raises(ConfigError, match="Not enough space"):
            sizes(LoraCacheConfig(gpu_memory_fraction=0.06, max_lora_rank=128))  # chosen: nothing gives way


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
            return 2 * 10**7

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
    for number in (0, 2 * 10**6, 4 * 10**6):
        taken[0] = number
        engine = Engine(config)
        blocks.append(engine.stats().kv_blocks)
        engine.close()
    assert rows == [300, 300, 300]
    assert ranks == {MAX_MIXED * lora.rank_limit}, "what rows keep grows with the sum of their ranks"
    taken_of = [before - after for before, after in pairwise(blocks)]
    assert min(taken_of) > 50 and abs(taken_of[0] - taken_of[1]) <= 1


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

"""Protects what several ranks cannot share, an adapter or a quantised weight: it is refused with its reason.
What they share is compared by logits: test_parallel_model.py."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tiny_models import make_adapter, make_model, make_tuned

from manylora.adapters.cache.store import AdapterStore
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import quantise
from manylora.ranks.adapters import AdapterSlicer
from manylora.ranks.mapping import Mapping
from manylora.request import LoraInput

RANKS = [Mapping(4, rank, 2, 2) for rank in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """3 layers: 2 and 1 of the stages."""
    folder = tmp_path_factory.mktemp("parts") / "model"
    return read_model_config(make_model(folder, "qwen2", num_hidden_layers=3))


def test_one_that_cannot_be_divided_is_skipped_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among those that are loaded at start; a request for it is told why."""
    model = make_model(tmp_path / "model", "qwen2")
    turned = peft.RoadConfig(variant="road_1", group_size=32, target_modules=["k_proj"])
    make_tuned(tmp_path / "adapters" / "1", model, turned)
    make_adapter(tmp_path / "adapters" / "2", model)
    config = read_model_config(model)
    cache = LoraCacheConfig(gpu_memory_bytes=2**24, prefetch_dir=tmp_path / "adapters")
    slicer, cpu = AdapterSlicer(config, RANKS[0]), torch.device("cpu")
    store = AdapterStore(config, cache, cpu, torch.float32, 2**30, slicer=slicer)
    assert (store.resident(1), store.resident(2)) == (False, True)
    assert "lora task 1 is skipped: attn_k: each rank has 16 outputs" in caplog.text
    with pytest.raises(AdapterInvalidError, match="cuts groups of 32 apart"):
        store.acquire(LoraInput(1), store.prepare(LoraInput(1)))
    store.close()


def test_inputs_that_cannot_be_shared_are_refused() -> None:
    weight = quantise(torch.randn(8, 96), QuantConfig("W4A16"))
    with pytest.raises(ConfigError, match="groups of 32 inputs cannot be shared by 48 of its 96 inputs"):
        weight.columns(range(48))
    ordered = QuantisedWeight(weight.values, weight.scales, order=torch.arange(96).flip(0))
    with pytest.raises(ConfigError, match="stored in another order"):
        ordered.columns(range(32))

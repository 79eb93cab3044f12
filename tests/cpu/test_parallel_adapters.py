"""Protects the adapters of several ranks: what each holds in its pages, and that an adapter takes the same
pages on all of them, so that one rank can decide for the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from tiny_models import make_adapter, make_model, make_tuned

from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.row_format import RowFormat
from manylora.lora.modules import lora_modules
from manylora.lora.slicing import AdapterPart
from manylora.lora.store import AdapterStore
from manylora.lora.tensors import AdapterRow, lora_input
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import quantise
from manylora.parallel.adapters import AdapterSlicer
from manylora.parallel.mapping import Mapping
from manylora.quant.config import QuantConfig
from manylora.request import LoraExtra, LoraInput

RANKS = [Mapping(4, rank, 2, 2) for rank in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """3 layers: 2 and 1 of the stages."""
    folder = tmp_path_factory.mktemp("parts") / "model"
    return read_model_config(make_model(folder, "qwen2", num_hidden_layers=3))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Layers 0 to 2 of an encoder and 3 to 5 of its decoder: the first stage has 0, 1, 3 and 4."""
    folder = tmp_path_factory.mktemp("both") / "model"
    return read_model_config(make_model(folder, "bart", encoder_layers=3, decoder_layers=3))


def adapter(model: ModelConfig, task_id: int, layers: Sequence[int], rank: int = 6) -> LoraInput:
    values, rows = np.random.default_rng(task_id), []
    for layer in layers:
        for module_id, module in lora_modules(model).items():
            if module.counted and module.is_on(layer):
                payload = values.normal(size=module.row_elements(RowFormat(rank))).astype(np.float32)
                rows.append(AdapterRow(module_id, layer, RowFormat(rank), payload))
    keys = {"layers.0.attn_k.bias": model.kv_size}
    names = {"layers.2.attn_dense.bias": 64, **keys, "norm.weight": 64}
    extras = [LoraExtra(name, values.normal(size=n).astype(np.float32)) for name, n in names.items()]
    return lora_input(task_id, rows, extras)


def open_stores(model: ModelConfig, host_bytes: int) -> list[tuple[AdapterStore, AdapterSlicer]]:
    cache = LoraCacheConfig(max_adapter_size=8, host_memory_bytes=host_bytes, gpu_memory_bytes=2**24)
    cpu = torch.device("cpu")
    slicers = [AdapterSlicer(model, mapping) for mapping in RANKS]
    return [
        (AdapterStore(model, cache, cpu, torch.float32, 2**30, slicer=slicer), slicer) for slicer in slicers
    ]


@pytest.mark.parametrize(
    ("family", "layers"),
    [("model", (0, 1, 2)), ("model", (2,)), ("model", (0,)), ("both", range(6)), ("both", (2, 5))],
)
def test_each_rank_holds_its_part_in_pages_of_the_same_numbers(
    family: str, layers: Sequence[int], request: pytest.FixtureRequest
) -> None:
    model: ModelConfig = request.getfixturevalue(family)
    lora, pages = adapter(model, 1, layers), []
    for store, slicer in open_stores(model, 2**24):
        found = store.prepare(lora)
        lease = store.acquire(lora, found)
        assert store.admit(lease)
        store.batch([(0, 1, lease)])  # which waits until it is written
        entry = store._cache.host.entries[lease.digest]
        held = store._pool.read_host(lease.digest, lease.layout, entry.pages)
        expected = slicer.slice(found)  # type: ignore[arg-type]
        assert [(r.module_id, r.layer) for r in held.rows] == [(r.module_id, r.layer) for r in expected.rows]
        for row, other in zip(held.rows, expected.rows, strict=True):
            np.testing.assert_array_equal(row.payload, other.payload)
        for extra, its in zip(held.extras, expected.extras, strict=True):
            np.testing.assert_array_equal(extra.values, its.values)
        pages.append(list(entry.pages))
        store.release(lease)
        store.close()
    assert pages == [pages[0]] * 4


def test_a_part_that_gave_way_comes_back_as_it_was(model: ModelConfig) -> None:
    store, slicer = open_stores(model, 2**17)[0]
    loras = [adapter(model, task_id, (0, 1, 2)) for task_id in range(1, 6)]
    leases, expected, carried = [], [], 0
    for lora in loras:
        whole = store.prepare(lora)
        leases.append(store.acquire(lora, whole))
        expected.append(slicer.slice(whole))  # type: ignore[arg-type]
    del whole
    for lease, part in reversed(list(zip(leases, expected, strict=True))):
        assert store.admit(lease)
        store.batch([(0, 1, lease)])
        entry = store._cache.host.entries[lease.digest]
        held = store._pool.read_host(lease.digest, lease.layout, entry.pages)
        for one, other in zip(held.rows, part.rows, strict=True):
            np.testing.assert_array_equal(one.payload, other.payload)
        carried += sum(isinstance(other.carried, AdapterPart) for other in leases)
        store.release(lease)
        store.check()
    assert carried
    store.close()


def test_parts_of_extras(model: ModelConfig) -> None:
    extras = {
        "layers.2.attn_dense.bias": np.arange(64.0),
        "layers.0.attn_k.bias": np.arange(32.0),
        "norm.weight": np.arange(64.0),
        "embed.tokens": np.arange(128.0).reshape(2, 64),
        "head.bias": np.arange(272.0),
        "layers.1.input_layernorm.weight": np.arange(64.0),
        "layers.0.attn_q.scale": np.arange(64.0),
        "layers.0.attn_q.turn": np.arange(64.0).reshape(4, 16),
        "layers.0.attn_dense.scale": np.arange(64.0),
        "layers.0.mlp_4h_to_h.input_scale": np.arange(96.0),
        "layers.0.mlp_4h_to_h.input_turn": np.zeros((96, 8)),
        "layers.0.mlp_gate.input_turn": np.zeros((8, 8)),
        "layers.0.prefix.keys": np.zeros((5, 32)),
        "layers.2.prefix.keys": np.zeros((5, 32)),
        "prompt.weight": np.zeros((5, 64)),
    }
    kept = []
    for mapping in RANKS:
        slicer = AdapterSlicer(model, mapping)
        kept.append(
            {
                part.name: part.values.shape
                for name, values in extras.items()
                if (
                    part := slicer._extra(
                        LoraExtra(name, values, (1, 2) if "tokens" in name else ()), mapping
                    )
                )
            }
        )
    first = {
        "layers.0.attn_k.bias": (16,), "embed.tokens": (2, 64), "layers.1.input_layernorm.weight": (64,),
        "layers.0.attn_q.scale": (32,), "layers.0.attn_q.turn": (2, 16), "layers.0.attn_dense.scale": (64,),
        "layers.0.mlp_4h_to_h.input_scale": (48,), "layers.0.mlp_4h_to_h.input_turn": (48, 8),
        "layers.0.mlp_gate.input_turn": (8, 8), "layers.0.prefix.keys": (5, 16), "prompt.weight": (5, 64),
    }  # fmt: skip
    last = {"layers.0.prefix.keys": (5, 16), "norm.weight": (64,), "head.bias": (272,)}
    assert kept == [first, first, {"layers.0.attn_dense.bias": (64,), **last}, last]


def test_parts_of_extras_of_an_encoder_and_a_decoder(both: ModelConfig) -> None:
    names = [
        "encoder.embed.weight", "decoder.embed.weight", "encoder.embedding_norm.weight", "embed.tokens",
        "encoder.norm.weight", "decoder.norm.weight", "head.bias",
        *(f"layers.{layer}.final_layer_norm.weight" for layer in range(6)), "layers.5.cross_attn_q.bias",
    ]  # fmt: skip
    extras = [LoraExtra(name, np.full(64, number)) for number, name in enumerate(names)]
    kept = []
    for mapping in RANKS[::2]:
        parts = [AdapterSlicer(both, mapping)._extra(extra, mapping) for extra in extras]
        kept.append({one.name: names[int(one.values[0])] for one in parts if one is not None})
    first = {name: name for name in names[:4]}
    first |= {f"layers.{n}.final_layer_norm.weight": names[7 + layer] for n, layer in enumerate((0, 1, 3, 4))}
    last = {name: name for name in names[3:7]}
    last |= {f"layers.{n}.final_layer_norm.weight": names[7 + layer] for n, layer in enumerate((2, 5))}
    assert kept == [first, {**last, "layers.1.cross_attn_q.bias": names[-1]}]


def test_rotations_that_ranks_would_cut_apart_are_refused(model: ModelConfig) -> None:
    extra = LoraExtra("layers.0.attn_k.turn", np.zeros((1, 32)))
    with pytest.raises(
        AdapterInvalidError, match=r"attn_k: each rank has 16 outputs .* cuts groups of 32 apart"
    ):
        AdapterSlicer(model, RANKS[0])._extra(extra, RANKS[0])


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


@pytest.mark.parametrize("algo", ["W8A16", "W4A16", "FP8", "W4A8", "W8A8"])
def test_some_inputs_of_a_quantised_weight(algo: str) -> None:
    weight = quantise(torch.randn(8, 128), QuantConfig(algo))
    assert torch.equal(weight.columns(range(64, 128)).wide(), weight.wide()[:, 64:])
    assert weight.columns(range(128)) is weight


def test_inputs_that_cannot_be_shared_are_refused() -> None:
    weight = quantise(torch.randn(8, 96), QuantConfig("W4A16"))
    with pytest.raises(ConfigError, match="groups of 32 inputs cannot be shared by 48 of its 96 inputs"):
        weight.columns(range(48))
    ordered = QuantisedWeight(weight.values, weight.scales, order=torch.arange(96).flip(0))
    with pytest.raises(ConfigError, match="stored in another order"):
        ordered.columns(range(32))

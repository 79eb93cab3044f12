"""Protects adapters stored as 8-bit floats (F8_E4M3), from PEFT directories and llgtrt's file: kept so in the
cache, at half or a quarter of the room; their answers are those of the same numbers in float32."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import edited
from driver import agree
from running import read
from safetensors.torch import load_file, save_file
from test_moe import by_number
from test_parity_adapters import mixed_logits, tokens
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_logits

from manylora.adapters.convert import convert_source
from manylora.adapters.modules import lora_modules
from manylora.adapters.number_types import FLOAT8, widen_bfloat16, widen_float8
from manylora.adapters.report import inspect_adapter
from manylora.adapters.rules import AdapterRules
from manylora.adapters.tensors import Adapter
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS: dict[str, dict[str, Any]] = {
    "scale 2": {"rank": 8},
    "rsLoRA": {"rank": 9, "use_rslora": True, "rank_pattern": {"o_proj": 2}},
    "patterns": {"rank": 3, "alpha_pattern": {"k_proj": 1.7}, "rank_pattern": {"down_proj": 17}},
    "biases": {"rank": 5, "bias": "all"},
}
FILE = "adapter_model.safetensors"


def narrow(adapter: Path, *, only: str = "", dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Path, Path]:
    """The adapter with its LoRA matrices in 8 bits, and what these mean in float32, for PEFT."""
    small, wide = (adapter.with_name(f"{adapter.name}-{name}") for name in ("float8", "wide"))
    found = load_file(adapter / FILE)
    for path, last in ((small, dtype), (wide, torch.float32)):
        shutil.copytree(adapter, path)
        stored = {
            key: value.to(dtype).to(last) if ".lora_" in key and only in key and value.ndim > 1 else value
            for key, value in found.items()
        }
        save_file({key: value.contiguous() for key, value in stored.items()}, path / FILE)
    return small, wide


def check(model: Path, lora: LoraInput) -> Adapter:
    config = read_model_config(model)
    return AdapterRules(lora_modules(config), config.num_layers, 64).check(lora)


def is_kept(lora: LoraInput) -> bool:
    return lora.weights is not None and lora.weights.dtype == FLOAT8


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "llama-biases", seed=3)


@pytest.fixture(scope="module")
def pair(model: Path, workshop: Path) -> tuple[Path, Path]:
    """Of scale sqrt(5), which no 8-bit float is."""
    return narrow(make_adapter(workshop / "one", model, 1, 5, ALL, alpha=5, use_rslora=True))


def test_bytes_mean_what_torch_says() -> None:
    every = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(widen_float8(every.view(FLOAT8)), want)


def test_every_kind_in_one_batch_with_wide_ones(model: Path, workshop: Path) -> None:
    """Logits as PEFT gives them for the same numbers in float32."""
    pairs = [
        narrow(make_adapter(workshop / f"kind-{i}", model, i, **{"modules": ALL, **options}))
        for i, options in enumerate(KINDS.values())
    ]
    inputs = [read(small, model, i) for i, (small, _) in enumerate(pairs)]
    assert all(map(is_kept, inputs))
    assert {float(s) for lora in inputs for s in lora.scales} >= {2.0, 6.0}  # type: ignore[union-attr]
    plain = make_adapter(workshop / "plain", model, 9, 12, ALL)
    inputs += [read(plain, model, 8), None]
    truths = [*(wide for _, wide in pairs), plain, None]
    for truth, found in zip(truths, mixed_logits(model, inputs), strict=True):  # type: ignore[arg-type]
        number = truths.index(truth)
        assert agree(found, reference_logits(model, truth, tokens(20, number))), number


def test_fused_modules(workshop: Path) -> None:
    phi = make_model(workshop / "phi3", "phi3", seed=4)
    fused = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    small, wide = narrow(make_adapter(workshop / "fused", phi, 2, 7, fused))
    given = read(small, phi)
    assert is_kept(given)
    [found] = mixed_logits(phi, [given])
    assert agree(found, reference_logits(phi, wide, tokens(20, 0)))


@pytest.mark.parametrize("options", [{}, {"alpha_pattern": {"experts.gate_up_proj": 3}}])
def test_routed_experts(workshop: Path, options: dict[str, Any]) -> None:
    """Those of a row share a scaling, unless patterns name them: then they are widened."""
    moe = make_model(workshop / f"moe-{len(options)}", "mixtral", seed=8)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    made = make_adapter(
        workshop / f"experts-{len(options)}", moe, 5, 4, ("q_proj",), target_parameters=experts, **options
    )
    small, wide = narrow(made)
    given = read(small, moe)
    assert is_kept(given) == (not options)
    [found] = mixed_logits(moe, [given])
    assert agree(found, reference_logits(moe, wide, tokens(20, 0)))
    if not options:
        old = by_number(small, workshop / "by number", mixtral=True)
        assert check(moe, read(old, moe)).digest == check(moe, given).digest


def test_llgtrts_file_in_8_bits(model: Path, pair: tuple[Path, Path], workshop: Path) -> None:
    small, _ = pair
    given = read(small, model)
    assert given.weights is not None and given.config is not None
    path = workshop / "llgtrt" / "one.safetensors"
    path.parent.mkdir()
    stored = torch.from_numpy(given.weights[0].view(np.uint8).copy()).view(torch.float8_e4m3fn)
    config = torch.from_numpy(given.config[0].copy())
    save_file({"weights": stored, "config": config}, path)
    found = read(path, model)
    assert is_kept(found) and found.scales is None
    assert check(model, found).digest != check(model, given).digest, "the scaling is not in its file"
    assert check(model, replace(found, scales=given.scales)).digest == check(model, given).digest
    wide = widen_float8(found.weights)  # type: ignore[arg-type]
    [got] = mixed_logits(model, [found])
    [want] = mixed_logits(model, [replace(found, weights=wide)])
    assert agree(got, want)
    # To who knows no such type it is bfloat16, exactly.
    weights, _ = convert_source(path)
    np.testing.assert_array_equal(widen_bfloat16(weights), wide)
    np.testing.assert_array_equal(widen_bfloat16(read_adapter_folder(path.parent)[0]), wide)


def test_dora_and_mixed_types_are_widened(model: Path, workshop: Path) -> None:
    dora = make_adapter(workshop / "dora", model, 3, 4, ALL, use_dora=True)
    half = make_adapter(workshop / "half", model, 4, 4, ALL)
    pairs = [narrow(dora, only="lora_A"), narrow(half, only="lora_B")]
    inputs = [read(small, model, i) for i, (small, _) in enumerate(pairs)]
    assert not any(map(is_kept, inputs))
    for i, found in enumerate(mixed_logits(model, inputs)):
        assert agree(found, reference_logits(model, pairs[i][1], tokens(20, i)))
    row = np.zeros((1, 1, 64 * 2 + 64), np.uint8)
    row[...] = 0x38  # 1
    tensors = LoraInput(0, row.view(FLOAT8), np.array([[[1, 0, 1, 1]]], np.int32))
    [made] = check(model, tensors).rows
    assert widen_bfloat16(made.payload).tolist() == [1.0] * 192


def test_what_cannot_be_meant_is_refused(model: Path, pair: tuple[Path, Path], workshop: Path) -> None:
    made = make_adapter(workshop / "e5m2", model, 1, 4)
    other, _ = narrow(made, dtype=torch.float8_e5m2)
    with pytest.raises(AdapterInvalidError, match=r"lora_A\.weight must be .* \(F8_E4M3\), got F8_E5M2"):
        read(other, model)
    lora = read(pair[0], model)
    assert lora.weights is not None and lora.scales is not None
    broken = lora.weights.copy()
    broken.view(np.uint8)[0, 0, 0] = 0xFF
    with pytest.raises(AdapterInvalidError, match="a NaN in attn_"):
        check(model, replace(lora, weights=broken))
    with pytest.raises(AdapterInvalidError, match="scales must be 14 finite float32 numbers"):
        check(model, replace(lora, scales=lora.scales[1:]))
    with pytest.raises(AdapterInvalidError, match="scales go with float8_e4m3fn weights only"):
        check(model, replace(lora, weights=widen_float8(lora.weights)))
    tensors = load_file(pair[0] / FILE)
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key].view(torch.uint8)[0, 0] = 0x7F
    for name, changed, settings, reason in (
        ("nan", {key: tensors[key]}, {}, r"lora_B\.weight holds a NaN"),
        ("loud", {}, {"lora_alpha": 1e40}, r"its scaling .* is beyond float32's range"),
        ("no magnitude", {}, {"use_dora": True}, "is missing its DoRA magnitude"),
    ):
        with pytest.raises(AdapterInvalidError, match=reason):
            read(edited(pair[0], workshop / name, changed, **settings), model)
    pickled = shutil.copytree(pair[0], workshop / "pickled")
    torch.save(load_file(pickled / FILE), pickled / "adapter_model.bin")
    (pickled / FILE).unlink()
    problem = inspect_adapter(pickled, allow_bin=True).problem
    assert problem is not None and "8-bit floats or another type that is read from safetensors" in problem
    folder = workshop / "npy"
    folder.mkdir()
    np.save(folder / "model.lora_weights.npy", lora.weights)
    np.save(folder / "model.lora_config.npy", lora.config)  # type: ignore[arg-type]
    with pytest.raises(AdapterInvalidError, match="numbers of one byte, and nothing in it says which"):
        read(folder, model)

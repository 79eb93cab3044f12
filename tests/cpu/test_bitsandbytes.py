"""Protects checkpoints of bitsandbytes: values are those that it computes itself, and a base of them answers,
with adapters, as one of these values does.

bitsandbytes.safetensors was made by bitsandbytes 0.50.2 on a CPU; the digests in it are of what it gave back,
zeros without a sign.
"""

from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from driver import agree
from running import read, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, reference_logits

from manylora.checkpoints.quant.config import CheckpointQuant, QuantAlgo
from manylora.checkpoints.quant.layouts import STATE, CheckpointWeights
from manylora.errors import ConfigError
from manylora.model.checkpoint import read_model_config

pytestmark = pytest.mark.usefixtures("one_thread")
GOLDEN = Path(__file__).with_name("bitsandbytes.safetensors")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def stored(tensors: dict[str, torch.Tensor], kind: QuantAlgo = QuantAlgo.W4A16) -> CheckpointWeights:
    return CheckpointWeights(CheckpointQuant("bitsandbytes", kind), tensors.keys())


@pytest.mark.parametrize("name", ["nf4", "nested", "fp4"])
def test_four_bits_are_its_own(name: str) -> None:
    """Bit for bit, with plain scales and with quantised ones, of blocks that end within a row too."""
    tensors = load_file(GOLDEN)
    with safe_open(GOLDEN, framework="pt") as file:
        wanted = file.metadata()[name]
    found = stored(tensors).read(f"{name}.weight", 144 if name == "nested" else 96, tensors.__getitem__)
    assert found.values.nbytes * 2 == found.shape[0] * found.shape[1]
    assert blake2b(found.wide().numpy().tobytes(), digest_size=16).hexdigest() == wanted


def test_eight_bits_are_its_own_but_for_the_last_bit() -> None:
    tensors = load_file(GOLDEN)
    found = stored(tensors).read("int8.weight", 96, tensors.__getitem__).wide()
    torch.testing.assert_close(found, tensors["int8.wide"], rtol=2.4e-7, atol=0)


def test_what_does_not_fit_is_named() -> None:
    tensors = load_file(GOLDEN)
    cases = {
        "nested.weight.absmax": tensors["nested.weight.absmax"][1:],
        "nested.weight.quant_map": tensors["nested.weight.quant_map"][:8],
        f"nested.{STATE}nf4": torch.frombuffer(bytearray(b'{"shape": [1]}'), dtype=torch.uint8),
    }
    for name, value in cases.items():
        broken = {**tensors, name: value}
        with pytest.raises(ConfigError, match=rf"^nested: {name.removeprefix('nested.')}"):
            stored(broken).read("nested.weight", 144, broken.__getitem__)
    del tensors["nested.weight.nested_absmax"]
    with pytest.raises(ConfigError, match=r"weight\.nested_absmax is not there"):
        stored(tensors).read("nested.weight", 144, tensors.__getitem__)


def quantised(model: Path, path: Path, four: bool, linears: tuple[str, ...] = LINEARS) -> tuple[Path, Path]:
    """The model as bitsandbytes would write it, with codes and scales from anywhere; and the same values."""
    packed, plain = (shutil.copytree(model, path / name) for name in ("packed", "plain"))
    weights, table = load_file(model / "model.safetensors"), load_file(GOLDEN)["nf4.weight.quant_map"]
    wide, found = dict(weights), dict(weights)
    torch.manual_seed(1)
    for name, weight in weights.items():
        if not name.removesuffix(".weight").endswith(linears):
            continue
        if four:
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
            codes, absmax = torch.randint(0, 16, weight.shape), torch.rand(weight.numel() // 64) * 0.5
            flat = codes.flatten()
            found[name] = ((flat[::2] << 4) | flat[1::2]).to(torch.uint8).unsqueeze(1)
            text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
            found |= {
                f"{name}.absmax": absmax,
                f"{name}.quant_map": table.clone(),
                f"{name[:-6]}{STATE}nf4": text,
            }
            wide[name] = (table[flat].view(-1, 64) * absmax.unsqueeze(1)).view(weight.shape)
        else:
            codes, largest = torch.randint(-127, 128, weight.shape), torch.rand(len(weight)) * 0.5
            found |= {name: codes.to(torch.int8), f"{name[:-6]}SCB": largest}
            found[f"{name[:-6]}weight_format"] = torch.tensor(0, dtype=torch.uint8)
            wide[name] = codes * (largest / 127).unsqueeze(1)
    save_file(found, packed / "model.safetensors", {"format": "pt"})
    save_file(wide, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    bits = {"load_in_4bit": four, "load_in_8bit": not four, "bnb_4bit_quant_type": "nf4"}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **bits}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("four", [True, False])
def test_a_base_of_it_answers_as_its_values_do(four: bool, tmp_path: Path) -> None:
    packed, plain = quantised(make_model(tmp_path / "model", seed=2), tmp_path, four)
    lora = make_adapter(tmp_path / "1", plain, 1, 4, LINEARS)
    dora = make_adapter(tmp_path / "2", plain, 2, 5, LINEARS, use_dora=True)
    assert read_model_config(packed).quant == CheckpointQuant(
        "bitsandbytes", QuantAlgo.W4A16 if four else QuantAlgo.W8A16
    )
    found = mixed_logits(packed, [None, read(lora, packed, 1), read(dora, packed, 2)])
    for seed, (logits, adapter) in enumerate(zip(found, (None, lora, dora), strict=True)):
        assert agree(logits, reference_logits(plain, adapter, tokens(20, seed)))

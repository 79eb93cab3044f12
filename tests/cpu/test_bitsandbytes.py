"""Protects checkpoints of bitsandbytes: values are those that it computes itself.

bitsandbytes.safetensors was made by bitsandbytes 0.50.2 on a CPU; the digests in it are of what it gave back,
zeros without a sign. Models of it are among the kinds of quantised_checkpoints.py.
"""

from __future__ import annotations

import shutil
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import KINDS, make_pair
from safetensors import safe_open
from safetensors.torch import load_file

from manylora.checkpoints.quant.config import CheckpointQuant, QuantAlgo
from manylora.checkpoints.quant.layouts import STATE, CheckpointWeights
from manylora.errors import ConfigError

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
    wide = shutil.copytree(model, path / "plain")
    ends = tuple(f"{name}.weight" for name in linears)
    return make_pair(path, KINDS["nf4" if four else "llm.int8"], wide=wide, linear=ends)

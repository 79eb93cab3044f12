"""Protects reading of quantised checkpoints: each kind's logits are those of its values made wide by hand, in
transformers, as it is and built; and what cannot be read is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, agree, decoder_of
from quantised_checkpoints import KINDS, make_pair
from running import tokens
from safetensors.torch import load_file, save_file
from tiny_models import reference_logits

from manylora import QuantConfig
from manylora.cli import main
from manylora.errors import ConfigError
from manylora.model.checkpoint import read_model_config


def logits_of(decoder: Any, *sequences: list[int]) -> list[torch.Tensor]:
    return Driver(decoder, list(sequences), [None] * len(sequences)).run()


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_those_of_the_wide_values(name: str, tmp_path: Path) -> None:
    quantised, wide = make_pair(tmp_path, KINDS[name])
    stored = read_model_config(quantised).quant
    assert stored is not None and stored.algo == KINDS[name].algo
    decoder = decoder_of(quantised)
    assert decoder.weight_bytes < 0.8 * decoder_of(wide).weight_bytes
    built = tmp_path / "built"
    assert main(["build", "--model_dir", str(quantised), "--output_dir", str(built)]) == 0
    sequences = tokens(40), tokens(1, 3)
    of_built = logits_of(decoder_of(built), *sequences)
    for ids, found, again in zip(sequences, logits_of(decoder, *sequences), of_built, strict=True):
        assert agree(found, reference_logits(wide, None, ids))
        assert torch.equal(found, again)


def test_a_directory_of_the_first_writers_of_gptq(tmp_path: Path) -> None:
    """The settings in a file of their own, no g_idx, and a bias of zeros for each layer."""
    quantised, wide = make_pair(tmp_path, KINDS["gptq zero points"])
    change(quantised, quantization_config=None)
    settings = {"bits": 4, "group_size": 16, "desc_act": False, "sym": False}
    (quantised / "quantize_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = load_file(quantised / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[name.replace("scales", "bias")] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, quantised / "model.safetensors")
    [found] = logits_of(decoder_of(quantised), tokens(30))
    assert agree(found, reference_logits(wide, None, tokens(30)))
    tensors["model.layers.0.mlp.up_proj.bias"][0] = 1
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds model.layers.0.mlp.up_proj.bias, which"):
        decoder_of(quantised)


def change(model: Path, **settings: Any) -> None:
    path = model / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **settings}), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("part", "change_of", "text"),
    [
        ("qzeros", None, r"lacks model.layers.0.mlp.up_proj.qzeros, which other tensors of the layer need"),
        (
            "qweight",
            lambda t: t[:-1],
            r"model.layers.0.mlp.up_proj: qweight must be \(\d+, \d+\) by config.json",
        ),
        ("scales", lambda t: t[:-1], r"model.layers.0.mlp.up_proj: qzeros must be"),
        ("g_idx", lambda t: t + 1, r"model.layers.0.mlp.up_proj: g_idx must name groups from 0 to 3"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(part: str, change_of: Any, text: str, tmp_path: Path) -> None:
    quantised, _ = make_pair(tmp_path, KINDS["gptq"])
    tensors = load_file(quantised / "model.safetensors")
    tensor = tensors.pop(f"model.layers.0.mlp.up_proj.{part}")
    if change_of is not None:
        tensors[f"model.layers.0.mlp.up_proj.{part}"] = change_of(tensor).contiguous()
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=text):
        decoder_of(quantised)


def test_weights_without_a_word_on_how_are_refused(tmp_path: Path) -> None:
    quantised, _ = make_pair(tmp_path, KINDS["fp8 by tensor"])
    tensors = load_file(quantised / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "scale" not in n}, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match="is stored as F8_E4M3, and nothing says how"):
        decoder_of(quantised)


def test_what_is_asked_of_a_checkpoint_must_be_what_it_holds(tmp_path: Path) -> None:
    quantised, wide = make_pair(tmp_path, KINDS["awq"])
    decoder_of(quantised, quant=QuantConfig("W4A16_AWQ"))
    with pytest.raises(ConfigError, match="quantised already, in W4A16_AWQ: leave quant_algo out"):
        decoder_of(quantised, quant=QuantConfig("W8A16"))
    with pytest.raises(ConfigError, match="needs a checkpoint that was calibrated so"):
        decoder_of(wide, quant=QuantConfig("W4A16_AWQ"))

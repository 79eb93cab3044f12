"""Divides the DoRA magnitudes of a PEFT directory by the row norms of the adapted base."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.peft.names import LORA_NAMES, is_extra
from manylora.lora.formats.peft.settings import (
    CONFIG,
    NORMALIZED,
    config_of,
    is_plain_lora,
    read_settings,
)
from manylora.lora.formats.peft_folder import peft_tensors
from manylora.lora.formats.pickled import write_torch
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.tensor_files import decode, encode, write_safetensors
from manylora.lora.number_types import BY_SAFETENSORS
from manylora.lora.tensors import check_dims

STEM = "adapter_model"


def normalize_dora(in_dir: Path, base_model: Path, out_dir: Path, *, strip: bool = False) -> int:
    """Write a PEFT directory with normalised magnitudes, or, with `strip`, without magnitudes.

    The weights keep their file format and types, except magnitudes in 8 bits, which become float32. Returns
    the number of magnitudes. Raises AdapterInvalidError, OSError.
    """
    suffix = _suffix(in_dir, STEM)
    _suffix(base_model, "model")
    settings = read_settings(in_dir)
    if not is_plain_lora(settings):
        raise AdapterInvalidError(f"{CONFIG} describes no plain LORA, which this is for")
    config = config_of(settings)
    if config.dora_normalized:
        raise AdapterInvalidError(f"{CONFIG} sets {NORMALIZED}: the magnitudes are normalised already")
    tensors = peft_tensors(in_dir, ReadOptions(allow_bin=True))
    magnitudes = {}  # by name: the path of the linear layer
    for key in tensors:
        found = LORA_NAMES.find(key)
        if found is None and (not is_extra(key) or "magnitude" in key):
            raise AdapterInvalidError(f"Encountered unknown weight: {key}")
        if found is not None and found.part is None:  # those of embedding and head are copied, too
            magnitudes[key] = found.path
    if strip:
        changed = {key: tensor for key, tensor in tensors.items() if key not in magnitudes}
    else:
        changed = dict(tensors)
        with BaseWeights(base_model).open() as base:
            for key, path in magnitudes.items():
                names = [f"{path}.lora_{side}.weight" for side in "AB"]
                for name in names:
                    if name not in tensors:
                        lacking = name.removeprefix(path + ".")
                        raise AdapterInvalidError(f"{path} has a DoRA magnitude, but no {lacking}")
                a, b = (decode(name, tensors[name]) for name in names)
                check_dims(path, a.shape, b.shape, None)
                b = b * np.float32(config.scale(path, a.shape[0]))
                magnitude = decode(key, tensors[key])
                if magnitude.size != len(b):
                    raise AdapterInvalidError(f"{key} has {magnitude.size} values, the module {len(b)} rows")
                norms = base.row_norms(path, a, b, config.fan_in_fan_out)
                normal = magnitude / norms.reshape(magnitude.shape)
                dtype = tensors[key].dtype
                coarse = dtype in BY_SAFETENSORS and BY_SAFETENSORS[dtype].encoding is not Encoding.PLAIN
                changed[key] = encode(key, normal, "F32" if coarse else dtype)
    if not changed:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    settings.update({"use_dora": False} if strip else {NORMALIZED: True})
    write = write_safetensors if suffix == ".safetensors" else write_torch
    write(out_dir / f"{STEM}{suffix}", changed)
    (out_dir / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(magnitudes)


def _suffix(folder: Path, stem: str) -> str:
    if not folder.is_dir():
        raise AdapterInvalidError(f"{folder} is not a valid model directory: not found")
    for suffix in (".safetensors", ".bin"):
        if (folder / f"{stem}{suffix}").is_file() or (folder / f"{stem}{suffix}.index.json").is_file():
            return suffix
    raise AdapterInvalidError(f"{folder} does not contain .safetensors or .bin weights")

"""Converts a .nemo archive to the files of TensorRT-LLM's runtimes. Implements tools/nemo_lora_convert.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.convert import store_as
from manylora.lora.formats.nemo import MODULE, nemo_key, nemo_num_layers, nemo_tensors, read_nemo
from manylora.lora.formats.npy import write_npy
from manylora.lora.formats.tensor_files import decode
from manylora.lora.modules import LoraModuleId
from manylora.lora.tensors import pack_rows

ADAPTER = MODULE.rpartition(".")[2]


def write_runtime_tensors(archive: Path, out_dir: Path, storage_type: str) -> list[tuple[int, int]]:
    """The .npy pair: weights [1, layers, r * (in + out)] without padding, config [1, layers, 3].

    Returns (layer, rank) of each row. Raises AdapterInvalidError, also if a layer of model_config.yaml is
    missing or rows differ in size, and OSError.
    """
    rows = read_nemo(archive)
    expected = nemo_num_layers(archive)
    if [row.layer for row in rows] != list(range(expected)):
        raise AdapterInvalidError(
            f"{archive.name} adapts {len(rows)} layers up to {rows[-1].layer}, num_layers is {expected}"
        )
    if len({row.payload.size for row in rows}) > 1:
        raise AdapterInvalidError(f"{archive.name}: the adapter must have the same size in every layer")
    weights, config = pack_rows(rows)
    write_npy(out_dir, store_as(weights, config, storage_type), config[:, :, :3])
    return [(row.layer, row.format.rank) for row in rows]


def write_transposed(archive: Path, out_dir: Path, storage_type: str, key: str) -> list[tuple[int, int]]:
    """The older form: per layer two raw files model.<name>.bin with the transposed matrices, and
    lora_weights.json.

    key: its customization id. Returns (layer, rank) of each pair.

    Raises AdapterInvalidError, OSError.
    """
    rows = read_nemo(archive)  # checks that every pair is complete
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, tensor in nemo_tensors(archive).items():
        layer, _ = nemo_key(name)
        transposed = decode(name, tensor).T
        place = np.array([[[LoraModuleId.ATTN_QKV, layer]] * len(transposed)])  # for error messages
        stored = store_as(transposed[None], place, storage_type)
        (out_dir / f"model.{_file_name(name)}.bin").write_bytes(stored.tobytes())
    lora = {
        "lora_kqv_adapter": {"0": {"key": key, "low_rank": rows[0].format.rank}},
        "precision": storage_type,
    }
    (out_dir / "lora_weights.json").write_text(json.dumps({"lora_config": lora}, indent=2) + "\n")
    return [(row.layer, row.format.rank) for row in rows]


def _file_name(key: str) -> str:
    """The key with the adapter's number inserted. It becomes a file name, so it must not be a path."""
    if "/" in key or "\0" in key or len(key) > 200:
        raise AdapterInvalidError(f"{key[:80]} cannot be the name of a file")
    return key.replace(ADAPTER, f"{ADAPTER}.0")

"""Converts any source to request tensors in a storage type. Implements tools/hf_lora_convert.py."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError, ConfigError
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.fused_rows import find_model_config, read_fused_rows
from manylora.lora.formats.npy import write_npy
from manylora.lora.formats.peft import read_peft
from manylora.lora.formats.read_options import DEFAULT, ReadOptions
from manylora.lora.formats.sources import (
    Source,
    find_source,
    read_invocation,
    read_source,
    source_dtype,
    take_invocation,
)
from manylora.lora.modules import MODULE_NAMES, module_name
from manylora.lora.number_types import is_bfloat16, narrow_to_bfloat16, widen_bfloat16
from manylora.lora.rules import check_shapes
from manylora.lora.tensors import pack_rows
from manylora.request import LoraInput

STORAGE_TYPES = ("float32", "float16", "bfloat16")
ALLOW_BIN = "without effect: adapter_model.bin is read too, in a process of its own"


def convert_source(
    path: Path,
    storage_type: str | None = None,
    options: ReadOptions = DEFAULT,
    invocation: list[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] int32 of an adapter from any source.

    storage_type: None keeps the source's, or bfloat16 for 8-bit numbers. bfloat16 is returned as 2-byte void.
    invocation: as in `read_source`.
    Raises AdapterInvalidError.
    """
    source = find_source(Path(path))
    weights, config = read_source(source, replace(options, float8=False, allow_bin=True), invocation)
    _check_config(check_shapes(LoraInput(0, weights, config))[1])
    kind = source_dtype(source, replace(options, allow_bin=True))
    # The scaling is folded into B here, for which 8-bit encodings have too few bits.
    storage_type = storage_type or (kind if kind in STORAGE_TYPES else "bfloat16")
    return store_as(weights, config, storage_type), config


def convert_peft(
    folder: Path,
    storage_type: str = "float16",
    partial: list[str] | None = None,
    *,
    invocation: list[int] | None = None,
    base: BaseWeights | None = None,
    text_only: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in the storage type (bfloat16 as 2-byte void) and config [1, rows, 4] int32.

    partial, base, text_only: as in `read_peft`. invocation: as in `read_source`. The rows of a fused
    query_key_value are ordered by config.json of base, of the adapter's own directory, or of the base model
    that its settings name if that is a directory. Raises AdapterInvalidError.
    """
    file = find_model_config(Path(folder), base.model_dir if base else None)
    modules = read_fused_rows(file) if file else {}
    options = ReadOptions(modules or None, base, allow_bin=True, text_only=text_only)
    take_invocation(read_invocation(Source("peft", Path(folder)), options), invocation)
    weights, config = pack_rows(read_peft(Path(folder), partial, options))
    return store_as(weights, config, storage_type), config


def store_as(weights: np.ndarray, config: np.ndarray, storage_type: str) -> np.ndarray:
    """weights [1, rows, W] in another type. Raises AdapterInvalidError that names a row that is not
    finite.
    """
    values = widen_bfloat16(weights) if is_bfloat16(weights.dtype) else weights
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if storage_type == "bfloat16" else values.astype(storage_type)
    read = widen_bfloat16(stored) if storage_type == "bfloat16" else stored
    finite = np.isfinite(read[0]).all(axis=1)
    if not finite.all():
        module_id, layer = config[0, int(finite.argmin()), :2]
        raise AdapterInvalidError(
            f"{module_name(module_id)} of layer {layer} is not finite in {storage_type}"
        )
    return stored


def base_weights(path: Path | None) -> BaseWeights | None:
    """Weights of the model given by --base. Raises ConfigError if there is none."""
    if path is not None and not path.is_dir():
        raise ConfigError(f"the model directory {path}, which --base names, does not exist")
    return None if path is None else BaseWeights(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Convert a PEFT LoRA adapter to lora_weights and lora_config."
    )
    parser.add_argument("--in-file", "-i", type=Path, required=True, help="adapter directory")
    parser.add_argument("--out-dir", "-o", type=Path, required=True, help="where the two .npy files go")
    parser.add_argument("--storage-type", default="float16", choices=STORAGE_TYPES)
    parser.add_argument("--verbose", action="store_true", help="print every row")
    parser.add_argument(
        "--allow-partial", action="store_true", help="leave out what cannot be converted, printing each part"
    )
    parser.add_argument(
        "--base-model", "--base", "-b", type=Path,
        help="model directory: normalises DoRA, orders the rows of query_key_value",
    )  # fmt: skip
    parser.add_argument("--allow-bin", action="store_true", help=ALLOW_BIN)
    parser.add_argument("--lora-text-only", action="store_true", help="leave out a vision part")
    options = parser.parse_args(arguments)
    partial: list[str] | None = [] if options.allow_partial else None
    invocation: list[int] = []
    try:
        base = base_weights(options.base_model)
        weights, config = convert_peft(
            options.in_file,
            options.storage_type,
            partial,
            invocation=invocation,
            base=base,
            text_only=options.lora_text_only,
        )
    except AdapterInvalidError as error:
        print(f"{options.in_file}: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for line in partial or ():
        print(line)
    if options.verbose:
        for module_id, layer, rank, _ in config[0]:
            print(f"layer {layer} {module_name(module_id)} rank {rank}")
    try:
        write_npy(options.out_dir, weights, config, tuple(invocation))
    except OSError as error:
        print(f"{options.out_dir} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _check_config(config: np.ndarray) -> None:
    """Checks of rows that are possible without a model."""
    for module_id, layer, rank in config[:, :3].tolist():
        if not 0 <= module_id < len(MODULE_NAMES):
            raise AdapterInvalidError(f"lora module {module_name(module_id)} is not known")
        if layer < 0 or rank <= 0:
            raise AdapterInvalidError(f"Expected adapterSize to be > 0, got {rank} in layer {layer}")

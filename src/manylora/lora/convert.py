"""PEFT adapter to the .npy pair of TensorRT-LLM's clients: what tools/hf_lora_convert.py does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.npy import write_npy
from manylora.lora.formats.peft import read_peft
from manylora.lora.modules import MODULE_NAMES
from manylora.lora.tensors import AdapterRow, narrow_to_bfloat16, pack_rows, widen_bfloat16

__all__ = ["convert_peft", "main"]

STORAGE_TYPES = ("float32", "float16", "bfloat16")


def convert_peft(
    folder: Path, storage_type: str = "float16", partial: list[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in the storage type (bfloat16 as 2-byte void) and config [1, rows, 4] int32.

    partial: as for `read_peft`. Raises AdapterInvalidError.
    """
    return pack_rows([_store(row, storage_type) for row in read_peft(Path(folder), partial)])


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
    options = parser.parse_args(arguments)
    partial: list[str] | None = [] if options.allow_partial else None
    try:
        weights, config = convert_peft(options.in_file, options.storage_type, partial)
    except AdapterInvalidError as error:
        print(f"{options.in_file}: {error}", file=sys.stderr)
        return 1
    for line in partial or ():
        print(line)
    if options.verbose:
        for module_id, layer, rank, _ in config[0]:
            print(f"layer {layer} {MODULE_NAMES[module_id]} rank {rank}")
    try:
        write_npy(options.out_dir, weights, config)
    except OSError as error:
        print(f"{options.out_dir} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _store(row: AdapterRow, storage_type: str) -> AdapterRow:
    values = row.payload
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if storage_type == "bfloat16" else values.astype(storage_type)
    read = widen_bfloat16(stored) if storage_type == "bfloat16" else stored
    if not np.isfinite(read).all():
        raise AdapterInvalidError(
            f"{MODULE_NAMES[row.module_id]} of layer {row.layer} is not finite in {storage_type}"
        )
    return replace(row, payload=stored)

#!/usr/bin/env python3
"""Convert a NeMo LoRA adapter (.nemo) to the tensors of a request, or to the older raw files."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from manylora.adapters.convert import STORAGE_TYPES, write_runtime_tensors, write_transposed
from manylora.adapters.formats.nemo import find_nemo
from manylora.errors import AdapterInvalidError


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--in-file", "-i", type=Path, required=True, help="archive, or a folder with one archive"
    )
    parser.add_argument("--out-dir", "-o", type=Path, required=True)
    parser.add_argument("--storage-type", default="float16", choices=STORAGE_TYPES)
    parser.add_argument("--customization-id", default="lora", help="key in lora_weights.json")
    parser.add_argument(
        "--write-cpp-runtime-tensors", action="store_true", help="write lora_weights and lora_config"
    )
    parser.add_argument("--verbose", action="store_true", help="print every row")
    options = parser.parse_args(arguments)
    target = options.out_dir, options.storage_type
    try:
        archive = find_nemo(options.in_file)
        if options.write_cpp_runtime_tensors:
            rows = write_runtime_tensors(archive, *target)
        else:
            rows = write_transposed(archive, *target, options.customization_id)
    except AdapterInvalidError as error:
        print(f"{options.in_file}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or options.out_dir}: {error.strerror}", file=sys.stderr)
        return 1
    for layer, rank in rows if options.verbose else ():
        print(f"layer {layer} attn_qkv rank {rank}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

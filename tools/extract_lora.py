#!/usr/bin/env python3
"""Convert an adapter to llgtrt's format: one safetensors file with the tensors `weights` and `config`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from manylora.adapters.convert import ALLOW_BIN, STORAGE_TYPES, base_weights, convert_source
from manylora.adapters.formats.npy import write_llgtrt
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import MODULE_NAMES
from manylora.errors import AdapterInvalidError, ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--in-file", "-i", type=Path, required=True, help="adapter directory")
    parser.add_argument("--out-file", "-o", type=Path, required=True, help="a .safetensors path")
    parser.add_argument("--dtype", "-t", choices=STORAGE_TYPES, help="default: the checkpoint's")
    parser.add_argument("--verbose", action="store_true", help="print every row")
    parser.add_argument("--base-model", "--base", "-b", type=Path, help="normalises DoRA magnitudes")
    parser.add_argument("--allow-bin", action="store_true", help=ALLOW_BIN)
    options = parser.parse_args(arguments)
    try:
        read = ReadOptions(base=base_weights(options.base_model))
        weights, config = convert_source(options.in_file, options.dtype, read)
        write_llgtrt(options.out_file, weights, config)
    except AdapterInvalidError as error:
        print(f"{options.in_file}: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or options.out_file}: {error.strerror}", file=sys.stderr)
        return 1
    for module_id, layer, rank in config[0, :, :3] if options.verbose else ():
        print(f"layer {layer} {MODULE_NAMES[module_id]} rank {rank}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

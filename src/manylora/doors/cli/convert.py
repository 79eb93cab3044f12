"""manylora convert: converts an adapter of any format to the .npy pair or to llgtrt's single file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.convert import ALLOW_BIN, STORAGE_TYPES, convert_source
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.npy import write_llgtrt, write_npy
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.remote.resolver import AdapterSources
from manylora.config.model_folder import model_folder
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.model.checkpoint import read_model_config
from manylora.system.command_line import Parser


def main(arguments: list[str]) -> int:
    parser = Parser(prog="manylora convert", description=__doc__)
    add = parser.add_argument
    add("-i", "--input", required=True, help="adapter folder, file, hub id or URL")
    add("-o", "--output", type=Path, required=True, help="output folder (npy) or file (llgtrt)")
    add("--to", choices=("llgtrt", "npy"), default="npy")
    add("--storage-type", choices=STORAGE_TYPES, help="default: the adapter's own dtype")
    base = "base model, needed to normalise PEFT's DoRA and to order fused rows"
    add("--base", type=Path, metavar="MODEL", help=base)
    add("--allow-bin", action="store_true", help=ALLOW_BIN)
    add("--lora-text-only", action="store_true", help="drop the adapter's vision part")
    options = parser.parse_args(arguments)
    invocation: list[int] = []
    try:
        weights, config = _read(options, invocation if options.to == "npy" else None)
    except ConfigError as error:
        return _fail(str(error))
    except AdapterInvalidError as error:
        return _fail(f"{options.input}: {error}")
    except OSError as error:
        return _fail(f"{options.input} cannot be read: {error.strerror}")
    try:
        if options.to == "npy":
            write_npy(options.output, weights, config, tuple(invocation))
        else:
            write_llgtrt(options.output, weights, config)
    except OSError as error:
        return _fail(f"{options.output} cannot be written: {error.strerror}")
    return 0


def _read(options: argparse.Namespace, invocation: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    base = model = modules = None
    if options.base:
        folder = model_folder(options.base)
        base, model = BaseWeights(folder), read_model_config(folder)
        modules = lora_modules(model)
    bounds = Bounds.of_any_rank(modules, model.num_layers) if model and modules else ANY_MODEL
    read = ReadOptions(modules, base, bounds, text_only=options.lora_text_only)
    located = AdapterSources().locate(options.input)
    return convert_source(located.path, options.storage_type, read, invocation)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1

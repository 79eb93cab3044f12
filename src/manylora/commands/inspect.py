"""manylora inspect: shows an adapter, and whether a base model can serve it. Exit status 0: it can."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from manylora.config.engine import LoraCacheConfig
from manylora.errors import ConfigError
from manylora.lora.report import AdapterReport, BaseModel, inspect_adapter
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraExtra


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manylora inspect", description=__doc__)
    parser.add_argument("adapter", type=Path, help="folder or file")
    parser.add_argument("--base", type=Path, metavar="MODEL", help="check it against this model directory")
    parser.add_argument("--max-adapter-size", type=int, default=64, help="lora_cache_max_adapter_size")
    parser.add_argument("--allow-bin", action="store_true", help="read adapter_model.bin, as converters do")
    options = parser.parse_args(arguments)
    base = None
    try:
        if options.base:
            cache = LoraCacheConfig(max_adapter_size=options.max_adapter_size)
            base = BaseModel(options.base, read_model_config(options.base), cache)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    report = inspect_adapter(options.adapter, base, allow_bin=options.allow_bin)
    for name, value in _lines(report, base is not None):
        print(f"{name:<9}{value}")
    return 0 if report.problem is None else 1


def _lines(report: AdapterReport, judged: bool) -> Iterator[tuple[str, object]]:
    if report.kind is not None:
        yield "kind", report.kind
        yield "source", report.source
    if report.dtype is not None:
        yield "dtype", report.dtype
    for name, ranks in (report.modules or {}).items():
        yield "module", f"{name}: {_ranks(ranks)}"
    if report.num_dora:
        yield "dora", f"{report.num_dora} rows"
    for extra in _extras(report.extras):
        yield "extra", extra
    if report.num_bytes is not None:
        yield "size", f"{report.num_bytes} bytes"
    if report.modules is not None:
        yield "digest", report.digest or "not known without --base: the tensors may be padded"
    if report.num_pages is not None:
        yield "pages", f"{report.num_pages} of {report.page_bytes} bytes"
    if report.problem is not None:
        yield "verdict", f"refused: {report.problem}"
    else:
        yield "verdict", "ok" if judged else "readable; name a model with --base to know if it serves it"


def _ranks(ranks: Mapping[int, int]) -> str:
    if len(set(ranks.values())) == 1:
        return f"rank {next(iter(ranks.values()))} in {_layers(sorted(ranks))}"
    return ", ".join(f"rank {rank} in layer {layer}" for layer, rank in sorted(ranks.items()))


def _extras(extras: Sequence[LoraExtra]) -> Iterator[str]:
    """A line for each kind of extra, with all its layers."""
    layers: dict[str, list[int]] = defaultdict(list)
    for extra in extras:
        name = extra.name
        layer = None
        if name.startswith("layers."):
            _, layer, name = name.split(".", 2)
        line = f"{name}: {' x '.join(map(str, extra.values.shape))}"
        if extra.token_ids:
            line += f" of tokens {', '.join(map(str, extra.token_ids))}"
        layers[line] += [] if layer is None else [int(layer)]
    for line, found in layers.items():
        yield f"{line} in {_layers(sorted(found))}" if found else line


def _layers(layers: list[int]) -> str:
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"

"""manylora inspect: whether a model can serve an adapter (status 0 if so), or what memory a model takes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manylora.adapters.formats.safe_files import file_kind
from manylora.adapters.modules import LoraModule, LoraModuleId, lora_modules
from manylora.adapters.remote.resolver import AdapterSources, Located, is_url
from manylora.adapters.report import AdapterReport, BaseModel, inspect_adapter
from manylora.checkpoints.gguf.config import is_gguf
from manylora.config.engine import LoraCacheConfig
from manylora.config.model_folder import is_hub_id, local_model, model_folder
from manylora.errors import ConfigError
from manylora.model.checkpoint import read_model_config
from manylora.request import INVOCATION, LoraExtra
from manylora.system.command_line import Parser

GATES = "5 is the gate and 7 is not; swapped, both still fit and nothing can tell: only the answers are wrong"
RANKS = (8, 16, 64)


def main(arguments: list[str]) -> int:
    parser = Parser(prog="manylora inspect", description=__doc__)
    add = parser.add_argument
    add(
        "path",
        metavar="PATH",
        help="folder or file of an adapter or a model, hub id of a model, or URL of an adapter",
    )
    add("--base", type=Path, metavar="MODEL", help="check it against this model directory")
    add("--max-adapter-size", type=int, default=64, help="lora_cache_max_adapter_size")
    add("--allow-bin", action="store_true", help="also read adapter_model.bin, as the converters do")
    add("--tensors", action="store_true", help="describe the A and B matrices of each module id")
    add("--lora-text-only", action="store_true", help="ignore the adapter's vision part")
    options = parser.parse_args(arguments)
    base = None
    try:
        located = (
            AdapterSources().locate(options.path) if is_url(options.path) else Located(Path(options.path))
        )
        path = located.path
        is_model = is_gguf(path) and file_kind(path) != "gguf"
        is_model |= is_hub_id(options.path)  # an id of the hub is taken as a model's
        if path.is_dir():
            is_model = (path / "config.json").is_file() and not (path / "adapter_config.json").exists()
        if is_model:
            for name, text in _model_facts(local_model(options.path)):
                print(f"{name:<9}{text}")
            return 0
        if options.base:
            cache = LoraCacheConfig(max_adapter_size=options.max_adapter_size)
            folder = model_folder(options.base)
            base = BaseModel(folder, read_model_config(folder), cache)
    except ConfigError as error:
        print(str(error).replace("max_adapter_size", "--max-adapter-size"), file=sys.stderr)
        return 1
    report = inspect_adapter(path, base, allow_bin=options.allow_bin, text_only=options.lora_text_only)
    for name, value in _lines(report, base is not None):
        print(f"{name:<9}{value}")
    if options.tensors:
        for value in _tensors(report, lora_modules(base.config) if base else {}):
            print(f"{'tensors':<9}{value}")
    return 0 if report.problem is None else 1


def _lines(report: AdapterReport, judged: bool) -> Iterator[tuple[str, object]]:
    for fact in ("kind", "source", "form", "dtype"):
        if getattr(report, fact) is not None:
            yield fact, getattr(report, fact)
    for name, ranks in (report.modules or {}).items():
        shown = ", ".join(f"rank {rank} in layer {layer}" for layer, rank in sorted(ranks.items()))
        if len(set(ranks.values())) == 1:
            shown = f"rank {next(iter(ranks.values()))} in {_layers(sorted(ranks))}"
        yield "module", f"{name}: {shown}"
    if report.num_dora:
        yield "dora", f"{report.num_dora} rows"
    for extra in _extras(report.extras):
        yield "extra", extra
    if report.num_virtual:
        yield "virtual", f"{report.num_virtual} tokens before each prompt, which max_seq_len counts"
    if report.cost is not None:
        yield "cost", f"{report.cost:.2%} of the base's multiplications for each token"
    if report.num_bytes is not None:
        yield "size", f"{report.num_bytes} bytes"
    if report.modules is not None:
        yield "digest", report.digest or "not known without --base: the tensors may be padded"
    if report.num_pages is not None:
        part = f"1/{report.page_parts} of one" if report.page_parts else report.num_pages
        yield "pages", f"{part} of {report.page_bytes} bytes"
    if report.shared_bytes:
        shared = f"{report.shared_bytes} bytes, {float(report.shared_pages):.3g} pages"
        yield "shared", f"A and B of {shared}: once for all adapters that have the same"
    if report.problem is not None:
        yield "verdict", f"refused: {report.problem}"
    else:
        verdict = "ok" if judged else "readable; name a model with --base to know if it serves it"
        yield "verdict", "; but ".join((verdict, *report.notes))


def _tensors(report: AdapterReport, modules: Mapping[int, LoraModule]) -> Iterator[str]:
    """A line for each module id of the adapter: its matrices in tensor form. modules: the base model's."""
    ids = [one for one in LoraModuleId if one.name.lower() in (report.modules or {})]
    for one in ids:
        experts, inputs, outputs = "", "in", "out"
        if one in modules:
            module = modules[one]
            experts = f"{module.experts}, " if module.experts > 1 else ""
            inputs, outputs = str(module.in_dim // module.experts), str(module.out_dim // module.experts)
        shapes = f"A [{experts}rank, {inputs}], B [{experts}{outputs}, rank]"
        yield f"{one:d} {one.name.lower()}: {one.meaning}; {shapes}"
    may_be_gated = not modules or LoraModuleId.MLP_GATE in modules
    if may_be_gated and {LoraModuleId.MLP_H_TO_4H, LoraModuleId.MLP_GATE} & set(ids):
        yield GATES


def _extras(extras: Sequence[LoraExtra]) -> Iterator[str]:
    layers: dict[str, list[int]] = defaultdict(list)
    for extra in extras:
        name = extra.name
        if name == INVOCATION:
            tokens = ", ".join(map(str, extra.token_ids))
            yield f"activated LoRA: acts from the last tokens {tokens} of a prompt on"
            continue
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


def _model_facts(folder: Path) -> Iterator[tuple[str, str]]:
    """What a model is and what a default start of it takes, from its headers. Raises ConfigError."""
    from manylora.adapters.geometry import plan_cache, usual_bytes
    from manylora.config.engine import resolve
    from manylora.config.model_folder import weight_files
    from manylora.engine.sizing import kv_cache_dtype, plan_memory
    from manylora.kernels.device import open_device
    from manylora.model.batch import token_numbers
    from manylora.model.weights import adapter_dtype, compute_dtype, weight_bytes

    model, config, device = read_model_config(folder), resolve(folder, {}), open_device("auto")
    dtype = compute_dtype(config.dtype, model, device)
    kv_dtype, pages_dtype = kv_cache_dtype(config, dtype, device), adapter_dtype(config, model, dtype, device)
    heads = f"{model.num_heads} heads over {model.num_kv_heads} of keys and values"
    yield "model", f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}, {heads}"
    name = str(dtype).removeprefix("torch.")
    stored = sum(path.stat().st_size for path in weight_files(folder))
    weights = weight_bytes(folder, model, dtype, device)
    yield "weights", f"{_size(stored)} in files, about {_size(weights)} in memory; computes in {name}"
    yield "context", f"{model.max_seq_len:,} tokens"
    token = token_numbers(model) * kv_dtype.itemsize
    if not model.bidirectional:
        yield "kv", f"{token:,} bytes for each token, {_size(token * model.max_seq_len)} for a whole context"
    if model.recurrent is not None:
        yield "state", f"{_size(model.recurrent.state_bytes)} for each sequence"
    modules, sizes = lora_modules(model, config.lora.target_modules).values(), []
    for rank in RANKS:
        lora = replace(config.lora, max_lora_rank=rank)
        each = usual_bytes(modules, model.num_layers, lora, pages_dtype.itemsize, 0)
        sizes.append(f"{_size(each)} at rank {rank}")
    yield "adapter", f"{', '.join(sizes)}, on every module"
    free = device.free_bytes()
    left = max(0, free - weights)
    plan = plan_memory(config, model, (kv_dtype, pages_dtype), device.torch, left)
    cache = plan_cache(
        modules, model.num_layers, plan.config.lora, pages_dtype.itemsize, left - plan.kv.num_bytes
    )
    page = cache.geometry.page_elements * pages_dtype.itemsize
    yield "start", f"{_size(free)} are free on {device.name}: of these"
    if not model.bidirectional:
        tokens = plan.kv.num_bytes // token
        yield "start", f"{_size(plan.kv.num_bytes)} for the KV cache: {tokens:,} tokens in all"
        yield "start", f"{plan.kv.max_seq_len:,} tokens at most in one sequence"
    most = plan.config.lora.rank_limit
    _, fits = cache.adapters_of_rank(modules, model.num_layers, 8)
    yield "start", f"{_size(page * cache.device_pages)} for adapters: {fits} of rank 8; rank {most} at most"
    if device.torch.type == "cpu":
        yield "start", "memory of these caches is taken when it is used, not before"
    if weights > free:
        yield "verdict", f"does not fit: its weights take {_size(weights)}, and {_size(free)} are free"


def _size(count: float) -> str:
    units = ["GiB", "MiB", "KiB", "bytes"]
    while count >= 1000 and len(units) > 1:
        count, _ = count / 1024, units.pop()
    return f"{count:.0f} {units[-1]}" if count >= 100 or units[-1] == "bytes" else f"{count:.1f} {units[-1]}"

"""What a model is and what a default start of it takes, as `manylora inspect MODEL` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from manylora.config.model_folder import weight_files
from manylora.config.resolve import resolve
from manylora.engine.sizing import kv_cache_dtype, plan_memory
from manylora.kernels.device import open_device
from manylora.lora.geometry import plan_cache, usual_bytes
from manylora.lora.modules import lora_modules
from manylora.model.batch import token_numbers
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import adapter_dtype, compute_dtype, weight_bytes

RANKS = (8, 16, 64)


def model_facts(folder: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a name and a value. Reads the configuration and headers only. Raises ConfigError."""
    model, config, device = read_model_config(folder), resolve(folder, {}), open_device("auto")
    dtype = compute_dtype(config.dtype, model, device)
    kv_dtype, pages_dtype = kv_cache_dtype(config, dtype, device), adapter_dtype(config, model, dtype, device)
    heads = f"{model.num_heads} heads over {model.num_kv_heads} of keys and values"
    yield "model", f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}, {heads}"
    stored = sum(path.stat().st_size for path in weight_files(folder))
    weights = weight_bytes(folder, model, dtype, device)
    yield "weights", f"{_size(stored)} in files, about {_size(weights)} in memory; computes in {_name(dtype)}"
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


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    """In units of 1024."""
    units = ["GiB", "MiB", "KiB", "bytes"]
    while count >= 1000 and len(units) > 1:
        count, _ = count / 1024, units.pop()
    return f"{count:.0f} {units[-1]}" if count >= 100 or units[-1] == "bytes" else f"{count:.1f} {units[-1]}"

#!/usr/bin/env python3
"""How long an adapter takes from its PEFT directory in the page cache to the device level, beside the time of
copying its bytes twice, and how much memory that needs beyond the caches.

The adapter has rank 16 on every linear layer of a model of Llama-2-7B's shape (32 layers, 4096, 11008); its
numbers are random, and the base model is only a config.json. First: the directory is new to the catalog, and
its content is digested. Again: the adapter was evicted from both levels and comes back. Copies go between
buffers that are resident already, as the caches are; "again" is measured against them.

Memory is the growth of RssAnon + RssFile at its peak, which the kernel resets before each run (clear_refs),
less what the two levels grew by; in multiples of the adapter's bytes in the cache.

    adapter_load.py --rounds 5
    adapter_load.py --stored bfloat16 --dtype float32

Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from manylora.config import LoraCacheConfig
from manylora.device import open_device
from manylora.lora.formats.tensor_files import RawTensor, encode, write_safetensors
from manylora.lora.store import AdapterStore
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

LAYERS, HIDDEN, INNER, RANK = 32, 4096, 11008, 16
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER), "mlp.down_proj": (INNER, HIDDEN),
}  # fmt: skip
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_model(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "bfloat16", "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_adapter(folder: Path, stored: str) -> int:
    """Returns how many numbers it holds."""
    rng = np.random.default_rng(0)
    tensors: dict[str, RawTensor] = {}
    for layer in range(LAYERS):
        for name, (in_dim, out_dim) in LINEARS.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("A", (RANK, in_dim)), ("B", (out_dim, RANK))):
                key = f"{path}.lora_{side}.weight"
                values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                tensors[key] = encode(key, values, STORED[stored])
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": [*LINEARS]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return LAYERS * RANK * sum(map(sum, LINEARS.values()))


def resident() -> tuple[int, int]:
    """Bytes of anonymous and mapped memory now, and their peak since `reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("Rss", "VmHWM"))}
    now = int(found["RssAnon"]) + int(found["RssFile"]) + int(found["RssShmem"])
    return 1024 * now, 1024 * int(found["VmHWM"])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def time_copies(nbytes: int, rounds: int) -> list[float]:
    """Seconds of copying so many bytes twice."""
    source, middle, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(3))
    found = []
    for _ in range(rounds + 1):  # the first warms up
        start = time.perf_counter()
        middle.copy_(source)
        target.copy_(middle)
        found.append(time.perf_counter() - start)
    return found[1:]


def bring(store: AdapterStore, name: str) -> tuple[float, float, int]:
    """Seconds until the adapter is checked, and until it is on the device; and the peak beyond what was
    there before and what stays."""
    gc.collect()
    reset_peak()
    start = time.perf_counter()
    lora = store.resolve(LoraInput(None, name=name))
    adapter = store.prepare(lora)
    assert adapter is not None, "the adapter is in the cache already"
    prepared = time.perf_counter()
    lease = store.acquire(lora, adapter)
    del adapter
    assert store.admit(lease), "there is no room for the adapter"
    while not store.is_loaded(lease):
        time.sleep(0)
    end = time.perf_counter()
    _, peak = resident()
    store.release(lease)
    return prepared - start, end - start, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stored", choices=STORED, default="float32", help="in the file")
    parser.add_argument("--dtype", choices=STORED, default="float32", help="in the cache")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        catalog = Path(folder) / "adapters"
        numbers = write_adapter(catalog / "one", options.stored)
        write_adapter(catalog / "two", options.stored)
        settings = json.loads((catalog / "two" / "adapter_config.json").read_text(encoding="utf-8"))
        settings["lora_alpha"] = 16  # the same numbers, another adapter
        (catalog / "two" / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        nbytes = numbers * dtype.itemsize
        room = nbytes * 51 // 50  # one page, for one adapter: bringing one evicts the other
        config = LoraCacheConfig(
            optimal_adapter_size=RANK,
            max_adapter_size=RANK,
            host_memory_bytes=room,
            gpu_memory_bytes=room,
            catalog_dir=catalog,
        )
        store = AdapterStore.open(read_model_config(model), config, open_device("cpu").torch, dtype, 0)
        first = bring(store, "one")
        bring(store, "two")
        again, beyond = [], []
        for turn in range(options.rounds + 1):
            before = resident()[0]
            seconds = bring(store, ("one", "two")[turn % 2])
            if turn:  # the first still finds pages of the caches that were never written
                again.append(seconds)
                beyond.append((seconds[2] - before) / nbytes)
        copies = time_copies(nbytes, options.rounds)
    copied = statistics.median(copies)
    total = statistics.median(seconds[1] for seconds in again)
    checked = statistics.median(seconds[0] for seconds in again)
    print(f"adapter of {nbytes / 1e6:.0f} MB in the cache, stored as {options.stored}")
    print(f"copied twice   {1e3 * copied:7.1f} ms")
    print(f"first          {1e3 * first[1]:7.1f} ms  {first[1] / copied:5.2f}x")
    print(
        f"again          {1e3 * total:7.1f} ms  {total / copied:5.2f}x  ({1e3 * checked:.1f} ms of it read)"
    )
    print(f"memory beyond the caches: {statistics.median(beyond):.2f}x its bytes")
    figures = {
        "stored": options.stored, "dtype": options.dtype, "mbytes": nbytes / 1e6, "copied_twice_s": copied,
        "first_s": first[1], "again_s": total, "ratio": total / copied,
        "memory_ratio": statistics.median(beyond), "rounds": options.rounds,
    }  # fmt: skip
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()

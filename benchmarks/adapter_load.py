#!/usr/bin/env python3
"""How long it takes to load an adapter from a PEFT directory to the device level, and how much memory that
needs beyond the caches. The files are in the page cache. The time is compared with copying the adapter's
bytes twice.

The adapter has rank 16 on every linear layer of a model of Llama-2-7B's shape (32 layers, 4096, 11008). Its
values are random, and the base model is only a config.json. Two cases are measured:

    first  the files' modification times have changed, so the catalog digests their content again
    again  the adapter was evicted from both levels and is reloaded

Both are compared with copies between buffers that are already resident, like the caches.

The fastest round is reported, for copies and for loads, in wall time and in CPU time. Wall time is unreliable
on a shared machine. CPU time is what a load takes away from the engine's threads.

Memory is the peak of RssAnon + RssFile (reset through clear_refs before each run), minus what is resident
with the caches alone. It is reported as a multiple of the adapter's bytes in the cache, and includes memory
that is kept for the next load.

    adapter_load.py --rounds 20
    adapter_load.py --stored bfloat16 --dtype float32
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from loads import ALL, MODELS, module_sizes, save_adapter

from manylora.adapters import staging
from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.catalog.files import SETTLED_NS
from manylora.config.engine import LoraCacheConfig
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

RANK = 16
SHAPE = MODELS["7b"][1]
DTYPES = ("float32", "float16", "bfloat16")


def write_model(folder: Path) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "bfloat16",
        "hidden_act": "silu", "tie_word_embeddings": False, **SHAPE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def resident() -> tuple[int, int]:
    """Resident bytes now, and their peak since `reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("Rss", "VmHWM"))}
    now = int(found["RssAnon"]) + int(found["RssFile"]) + int(found["RssShmem"])
    return 1024 * now, 1024 * int(found["VmHWM"])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


@dataclass(frozen=True)
class Cost:
    """wall: seconds of wall time. busy: seconds of this process's CPU time."""

    wall: float
    busy: float

    @classmethod
    def best(cls, rounds: list[Cost]) -> Cost:
        return cls(min(one.wall for one in rounds), min(one.busy for one in rounds))


class Clock:
    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.process_time()

    def read(self) -> Cost:
        return Cost(time.perf_counter() - self._wall, time.process_time() - self._busy)


class Copies:
    """Copies `nbytes` bytes twice: the baseline for a load."""

    def __init__(self, nbytes: int) -> None:
        self._buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(3)]

    def run(self) -> Cost:
        source, middle, target = self._buffers
        clock = Clock()
        middle.copy_(source)
        target.copy_(middle)
        return clock.read()


def bring(store: AdapterStore, name: str) -> tuple[Cost, Cost, int]:
    """Cost until the adapter is read and checked, cost until it is on the device, and peak resident bytes."""
    gc.collect()
    reset_peak()
    clock = Clock()
    lora = store.library.resolve(LoraInput(None, name=name))
    adapter = store.prepare(lora)
    assert adapter is not None, "the adapter is in the cache already"
    prepared = clock.read()
    lease = store.acquire(lora, adapter)
    del adapter
    assert store.admit(lease), "there is no room for the adapter"
    while not store.is_loaded(lease):
        time.sleep(0.0005)
    loaded = clock.read()
    _, peak = resident()
    store.release(lease)
    return prepared, loaded, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stored", choices=DTYPES, default="float32", help="dtype in the file")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype in the cache")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        catalog = Path(folder) / "adapters"
        for name in ("one", "two"):
            save_adapter(catalog / name, "7b", RANK, ALL, 0, options.stored)
        settings = json.loads((catalog / "two" / "adapter_config.json").read_text(encoding="utf-8"))
        settings["lora_alpha"] = 16  # the same tensors, but a different adapter
        (catalog / "two" / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        elements = SHAPE["num_hidden_layers"] * RANK * sum(map(sum, module_sizes("7b").values()))
        nbytes = elements * dtype.itemsize
        # Room for one adapter, as rows are rounded up to slots: loading one adapter evicts the other.
        room = nbytes * 11 // 10
        config = LoraCacheConfig(
            optimal_adapter_size=RANK,
            max_adapter_size=RANK,
            host_memory_bytes=room,
            gpu_memory_bytes=room,
            catalog_dir=catalog,
        )
        time.sleep(2 * SETTLED_NS / 1e9)  # the catalog trusts modification times only once they are this old
        store = AdapterStore(read_model_config(model), config, open_device("cpu").torch, dtype, 0)
        copies = Copies(nbytes)
        for name in ("one", "two", "one", "two"):
            bring(store, name)  # afterwards the caches are resident, and the catalog knows both
        staging.drop()
        gc.collect()
        before = resident()[0]
        copied, first, again = [], [], []
        peaks: dict[str, list[int]] = {"first": [], "again": []}
        for turn in range(options.rounds):
            name = ("one", "two")[turn % 2]
            copied.append(copies.run())
            again.append(bring(store, name))
            peaks["again"].append(again[-1][2])
        for turn in range(options.rounds, 2 * options.rounds):
            name = ("one", "two")[turn % 2]
            os.utime(catalog / name / "adapter_config.json")
            copied.append(copies.run())
            _, loaded, peak = bring(store, name)
            first.append(loaded)
            peaks["first"].append(peak)
        store.close()
    copy, anew, back = Cost.best(copied), Cost.best(first), Cost.best([loaded for _, loaded, _ in again])
    read = Cost.best([prepared for prepared, _, _ in again])
    beyond = {title: (max(found) - before) / nbytes for title, found in peaks.items()}
    print(
        f"adapter of {nbytes / 1e6:.0f} MB in the cache, stored as {options.stored}; best of {options.rounds}"
    )
    print("                   wall                CPU")
    print(f"copied twice   {1e3 * copy.wall:7.1f} ms      {1e3 * copy.busy:7.1f} ms")
    for title, cost in (("first", anew), ("again", back)):
        print(
            f"{title:15}{1e3 * cost.wall:7.1f} ms {cost.wall / copy.wall:4.2f}"
            f" {1e3 * cost.busy:7.1f} ms {cost.busy / copy.busy:4.2f}"
        )
    print(f"  reading      {1e3 * read.wall:7.1f} ms      {1e3 * read.busy:7.1f} ms")
    print(
        f"memory beyond the caches: {beyond['first']:.2f} and {beyond['again']:.2f} times the adapter's bytes"
    )


if __name__ == "__main__":
    main()

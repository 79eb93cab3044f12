"""Decode speed of a gated delta-rule layer's state on a CPU, beside what its memory reads and writes.

    python benchmarks/delta_rule.py

Each row of the table is a step of so many sequences, one token each, over layers whose states together are
larger than the caches. `share`: bytes of state, read and written, in a second, of what a loop that reads and
writes as many does, measured in turns with it; the best of each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.delta_rule import DeltaWeights
from manylora.kernels.native import load
from manylora.kernels.recurrent import RecurrentState, StateBatch


def layer(heads: int, key_heads: int, dim: int) -> DeltaWeights:
    channels = (2 * key_heads + heads) * dim
    ones = torch.ones(heads)
    return DeltaWeights(torch.randn(4, channels), -ones, ones, torch.ones(dim), 1e-6, key_heads, dim)


def measure(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compare(sequences: int, heads: int, key_heads: int, dim: int, num_bytes: int, rounds: int) -> None:
    library = load()
    assert library is not None, "needs the compiled kernels"
    ops, weights = CompiledOps(library), layer(heads, key_heads, dim)
    layers = max(1, num_bytes // (4 * sequences * heads * dim * dim))
    memory = torch.zeros(layers, sequences, heads, dim, dim)
    state = RecurrentState(torch.zeros(layers, sequences, 3, weights.channels), memory)
    slots, none = torch.arange(sequences), torch.zeros(sequences, dtype=torch.long)
    batch = StateBatch(torch.arange(sequences + 1), slots, slots, none, none)
    x = torch.randn(sequences, weights.channels + heads * dim)
    gates = torch.randn(sequences, 2 * heads)

    def step() -> None:
        for number in range(layers):
            ops.delta_rule(x, gates, weights, state.layer(number), batch)

    flat = memory.view(-1)
    pairs = [(measure(step), measure(lambda: flat.mul_(0.5))) for _ in range(rounds)]
    ours, theirs = (min(one) for one in zip(*pairs[1:], strict=True))
    moved = 2 * memory.nbytes
    print(
        f"| {sequences} | {layers} | {memory.nbytes / 2**20:.0f} MiB | {1e3 * ours / layers:.3f} ms "
        f"| {moved / ours / 1e9:.1f} GB/s | {moved / theirs / 1e9:.1f} GB/s | {theirs / ours:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32, help="of values")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="of keys and values")
    parser.add_argument("--mib", type=int, default=192, help="of state in all")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads")
    print("| sequences | layers | state | a layer | read and written | memory | share |")
    print("|---|---|---|---|---|---|---|")
    for sequences in (1, 4, 16):
        compare(sequences, options.heads, options.key_heads, options.dim, options.mib * 2**20, options.rounds)


if __name__ == "__main__":
    main()

"""Decode speed of recurrent layers on a CPU, compared with the machine's memory bandwidth.

    python benchmarks/delta_rule.py
    python benchmarks/delta_rule.py --mamba2

Each row of the table is a step of 1, 4 or 16 sequences with one token each, over layers whose states together
are larger than the processor's caches. `share` is the bandwidth that the layers reach, divided by that of a
plain loop that reads and writes the same bytes. The two alternate, and the best run of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.delta_rule import DeltaWeights
from manylora.kernels.mamba2 import Mamba2Weights
from manylora.kernels.native import load
from manylora.kernels.recurrent import RecurrentState, StateBatch

Layer = Callable[[CompiledOps, int], Callable[[RecurrentState, StateBatch], Tensor]]
"""Given the operations and a number of sequences, returns a function that runs one step of a layer."""


def delta_rule(heads: int, key_heads: int, dim: int) -> tuple[int, Layer]:
    """A gated delta rule: the channels of its convolution, and the layer."""
    channels, ones = (2 * key_heads + heads) * dim, torch.ones(heads)
    weights = DeltaWeights(torch.randn(4, channels), -ones, ones, torch.ones(dim), 1e-6, key_heads, dim)

    def layer(ops: CompiledOps, sequences: int) -> Callable[[RecurrentState, StateBatch], Tensor]:
        x, gates = torch.randn(sequences, channels + heads * dim), torch.randn(sequences, 2 * heads)
        return lambda state, batch: ops.delta_rule(x, gates, weights, state, batch)

    return channels, layer


def mamba2(heads: int, dim: int, size: int) -> tuple[int, Layer]:
    """A Mamba-2 layer: the channels of its convolution, and the layer."""
    channels, ones = heads * dim + 2 * size, torch.ones(heads)
    vectors = (torch.zeros(channels), -ones, ones, ones, torch.ones(heads * dim))
    weights = Mamba2Weights(torch.randn(4, channels), *vectors, 1e-6, 1, dim, size)

    def layer(ops: CompiledOps, sequences: int) -> Callable[[RecurrentState, StateBatch], Tensor]:
        x = torch.randn(sequences, heads * dim + channels + heads)
        return lambda state, batch: ops.mamba2(x, weights, state, batch)

    return channels, layer


def measure(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compare(
    sequences: int, shape: tuple[int, ...], channels: int, layer: Layer, num_bytes: int, rounds: int
) -> None:
    """Print one row of the table. shape: of one sequence's recurrent memory in one layer."""
    library = load()
    assert library is not None, "needs the compiled kernels"
    one = torch.zeros(shape).nbytes
    layers = max(1, num_bytes // (sequences * one))
    memory = torch.zeros(layers, sequences, *shape)
    state = RecurrentState(torch.zeros(layers, sequences, 3, channels), memory)
    slots, none = torch.arange(sequences), torch.zeros(sequences, dtype=torch.long)
    batch = StateBatch(torch.arange(sequences + 1), slots, slots, none, none)
    run = layer(CompiledOps(library), sequences)

    def step() -> None:
        for number in range(layers):
            run(state.layer(number), batch)

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
    parser.add_argument(
        "--mamba2", action="store_true", help="measure Mamba-2 instead of the gated delta rule"
    )
    parser.add_argument("--heads", type=int, help="value heads (default: 32, with --mamba2 48)")
    parser.add_argument("--key-heads", type=int, default=16, help="key heads, without --mamba2")
    parser.add_argument("--dim", type=int, help="head size (default: 128, with --mamba2 64)")
    parser.add_argument("--state", type=int, default=128, help="with --mamba2: size of B and C")
    parser.add_argument("--mib", type=int, default=192, help="MiB of state of all layers together")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    heads, dim = (
        options.heads or (48 if options.mamba2 else 32),
        options.dim or (64 if options.mamba2 else 128),
    )
    if options.mamba2:
        shape, made = (heads, dim, options.state), mamba2(heads, dim, options.state)
    else:
        shape, made = (heads, dim, dim), delta_rule(heads, options.key_heads, dim)
    print(f"{torch.get_num_threads()} threads")
    print("| sequences | layers | state | time per layer | layers' bandwidth | loop's bandwidth | share |")
    print("|---|---|---|---|---|---|---|")
    for sequences in (1, 4, 16):
        compare(sequences, shape, *made, options.mib * 2**20, options.rounds)


if __name__ == "__main__":
    main()

"""Causal convolutions over the last inputs of sequences, for recurrent layers. Stores these inputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.launch import launch
from manylora.kernels.recurrent import RecurrentState, StateBatch

BLOCK = 256  # channels of a program


@triton.jit
def _sequence_of(row, starts, sequences, BLOCK: tl.constexpr):
    """Whose row this is: as many sequences have begun, less one."""
    begun = 0
    for first in range(0, sequences, BLOCK):
        s = first + tl.arange(0, BLOCK)
        found = tl.load(starts + s, mask=s < sequences, other=row + 1)
        begun += tl.sum((found <= row).to(tl.int32), axis=0)
    return begun - 1


@triton.jit
def _input_at(
    position, x, inputs, start, read, channel, inside, x_row, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Of the convolution, at a position counted from the sequence's first row; before that row what slot
    `read` has, or zeros."""
    own = inside & (position >= 0)
    at = x + (start + position) * x_row + channel
    value = tl.load(at, mask=own, other=0).to(tl.float32)
    if GATED:  # [b; c; h], of which b * h goes in
        value *= tl.load(at + 2 * CHANNELS, mask=own, other=0).to(tl.float32)
    known = inside & (position < 0) & (read >= 0)
    old = inputs + (read * (TAPS - 1) + TAPS - 1 + position) * CHANNELS + channel
    return tl.where(position >= 0, value, tl.load(old, mask=known, other=0))


@triton.jit
def _keep(
    rows, slot, x, inputs, start, read, channel, inside, x_row, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Store the last inputs after the first `rows` rows of a sequence in a slot, which may be the one that is
    read; -1: nowhere."""
    for i in tl.static_range(TAPS - 1):
        value = _input_at(
            rows - (TAPS - 1) + i, x, inputs, start, read, channel, inside, x_row, TAPS, CHANNELS, GATED
        )
        # Where both slots are one, an input moves to the place of another, which all threads must have read.
        tl.debug_barrier()
        to = inputs + (slot * (TAPS - 1) + i) * CHANNELS + channel
        tl.store(to, value, mask=inside & (slot >= 0))


@triton.jit
def _keep_both(
    s, x, inputs, starts, reads, writes, cuts, saves, channel, inside, x_row, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """After all rows of sequence s, and before that after those it is also to be saved at."""
    start, read, cut = tl.load(starts + s), tl.load(reads + s), tl.load(cuts + s)
    if cut > 0:
        save = tl.load(saves + s)
        _keep(cut, save, x, inputs, start, read, channel, inside, x_row, TAPS, CHANNELS, GATED)
    rows, write = tl.load(starts + s + 1) - start, tl.load(writes + s)
    _keep(rows, write, x, inputs, start, read, channel, inside, x_row, TAPS, CHANNELS, GATED)


@triton.jit(do_not_specialize=["sequences"])
def _convolve(
    x, taps, bias, inputs, out, starts, reads, writes, cuts, saves, x_row, sequences, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SINGLE: each sequence has one row, so that no other program reads what this one stores."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    s = row if SINGLE else _sequence_of(row, starts, sequences, BLOCK)
    start, read = tl.load(starts + s), tl.load(reads + s)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        position = row - start - (TAPS - 1) + tap
        value = _input_at(position, x, inputs, start, read, channel, inside, x_row, TAPS, CHANNELS, GATED)
        total += value * tl.load(taps + tap * CHANNELS + channel, mask=inside, other=0)
    if GATED:
        total *= tl.load(x + row * x_row + CHANNELS + channel, mask=inside, other=0).to(tl.float32)
    else:
        if BIASED:
            total += tl.load(bias + channel, mask=inside, other=0)
        total *= tl.sigmoid(total)
    tl.store(out + row * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)
    if SINGLE:
        _keep_both(
            s, x, inputs, starts, reads, writes, cuts, saves, channel, inside, x_row, TAPS, CHANNELS, GATED
        )


@triton.jit
def _keep_inputs(
    x, inputs, starts, reads, writes, cuts, saves, x_row, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, s = channel < CHANNELS, tl.program_id(0).to(tl.int64)
    _keep_both(
        s, x, inputs, starts, reads, writes, cuts, saves, channel, inside, x_row, TAPS, CHANNELS, GATED
    )


def convolve(
    out: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    state: RecurrentState,
    batch: StateBatch,
    gated: bool = False,
) -> None:
    """out [T, channels]: silu(bias + convolution of x). gated: as `ReferenceOps.short_conv`. The last inputs
    are stored as the batch says; nothing is stored in slot -1.

    x: [T, channels] or more columns; a row's elements are contiguous.
    """
    (rows, channels), sequences, count = out.shape, len(batch.reads), len(taps)
    tables = batch.starts, batch.reads, batch.writes, batch.cuts, batch.saves
    blocks = triton.cdiv(channels, BLOCK)
    single = rows == sequences
    if rows:
        launch(
            _convolve, (rows, blocks), x, taps, taps if bias is None else bias, state.inputs, out, *tables,
            x.stride(0), sequences, TAPS=count, CHANNELS=channels, GATED=gated, BIASED=bias is not None,
            SINGLE=single, BLOCK=BLOCK,
        )  # fmt: skip
    if sequences and not single:
        launch(
            _keep_inputs, (sequences, blocks), x, state.inputs, *tables, x.stride(0), TAPS=count,
            CHANNELS=channels, GATED=gated, BLOCK=BLOCK,
        )  # fmt: skip

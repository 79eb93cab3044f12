"""Recurrent layers: causal convolutions over the last inputs of sequences, then the rows of each sequence one
after another, with its memory in registers.

A row is computed in the same way whatever is beside it, so neither the chunks of a prompt nor other sequences
change a result. Sequence starts and state locations are read on the device: the host never waits, and steps
can be recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.launch import launch
from manylora.kernels.cuda.rows import warps_of
from manylora.kernels.recurrent import NORM_EPS, DeltaWeights, Mamba2Weights, RecurrentState, StateBatch

BLOCK = 256  # channels of a program of the convolution
TILE = 2048  # elements of a head's memory per program: 16 registers per thread of 4 warps


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


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), without losing small values."""
    u = tl.exp(tl.minimum(x, 20.0))
    s = u / (2 + u)  # log(1 + u) = 2 * atanh(s)
    r = s * s
    small = 2 * s * (1 + r * (1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9)))))
    return tl.where(x > 20.0, x, tl.where(u < 0.25, small, tl.log(1 + u)))


@triton.jit
def _mamba2(
    mixed, steps, decay, shift, skip, memory, y, starts, reads, writes, cuts, saves, x_row, least, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, k = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    has_j, has_k = j < DIM, k < STATE
    whole, tile = has_j[:, None] & has_k[None, :], head * DIM * STATE + j[:, None] * STATE + k[None, :]
    start, stop, cut = tl.load(starts + s), tl.load(starts + s + 1), tl.load(cuts + s)
    read, write, save = tl.load(reads + s), tl.load(writes + s), tl.load(saves + s)
    size, values = HEADS * DIM * STATE, HEADS * DIM
    channels, group = values + 2 * GROUPS * STATE, head // (HEADS // GROUPS)
    rate, moved, skipped = tl.load(decay + head), tl.load(shift + head), tl.load(skip + head)
    m = tl.load(memory + read * size + tile, mask=whole & (read >= 0), other=0)
    for row in range(start, stop):
        own = mixed + row * channels
        v = tl.load(own + head * DIM + j, mask=has_j, other=0)
        b = tl.load(own + values + group * STATE + k, mask=has_k, other=0)
        c = tl.load(own + values + (GROUPS + group) * STATE + k, mask=has_k, other=0)
        step = _softplus(tl.load(steps + row * x_row + head).to(tl.float32) + moved)
        step = tl.minimum(tl.maximum(step, least), most)
        m = m * tl.exp(rate * step) + (v * step)[:, None] * b[None, :]
        seen = tl.sum(m * c[None, :], axis=1) + skipped * v
        tl.store(y + row * values + head * DIM + j, seen, mask=has_j)
        if row + 1 == start + cut:
            tl.store(memory + save * size + tile, m, mask=whole)
    tl.store(memory + write * size + tile, m, mask=whole & (write >= 0))


@triton.jit
def _delta_rule(
    mixed, gates, decay, shift, memory, y, starts, reads, writes, cuts, saves, gates_row, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scale: of queries. eps: under the lengths of queries and keys."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, k = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    has_j, has_k = j < DIM, k < KEY_DIM
    whole, tile = has_j[:, None] & has_k[None, :], head * DIM * KEY_DIM + j[:, None] * KEY_DIM + k[None, :]
    start, stop, cut = tl.load(starts + s), tl.load(starts + s + 1), tl.load(cuts + s)
    read, write, save = tl.load(reads + s), tl.load(writes + s), tl.load(saves + s)
    size, values, keys = HEADS * DIM * KEY_DIM, HEADS * DIM, KEY_HEADS * KEY_DIM
    channels, group = values + 2 * keys, head // (HEADS // KEY_HEADS)
    rate, moved = tl.load(decay + head), tl.load(shift + head)
    m = tl.load(memory + read * size + tile, mask=whole & (read >= 0), other=0)
    for row in range(start, stop):
        own = mixed + row * channels
        query = tl.load(own + group * KEY_DIM + k, mask=has_k, other=0)
        key = tl.load(own + keys + group * KEY_DIM + k, mask=has_k, other=0)
        v = tl.load(own + 2 * keys + head * DIM + j, mask=has_j, other=0)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        beta = tl.sigmoid(tl.load(gates + row * gates_row + head).to(tl.float32))
        gate = tl.load(gates + row * gates_row + HEADS + head).to(tl.float32)
        m = m * tl.exp(rate * _softplus(gate + moved))
        change = (v - tl.sum(m * key[None, :], axis=1)) * beta
        m = m + change[:, None] * key[None, :]
        tl.store(y + row * values + head * DIM + j, tl.sum(m * query[None, :], axis=1), mask=has_j)
        if row + 1 == start + cut:
            tl.store(memory + save * size + tile, m, mask=whole)
    tl.store(memory + write * size + tile, m, mask=whole & (write >= 0))


@triton.jit
def _finish(
    y, z, norm, out, z_row, eps, WIDTH: tl.constexpr, SHARED: tl.constexpr, NORMED: tl.constexpr,
    GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y times silu(z), before its norm or after it, over WIDTH elements. SHARED: all parts have one norm."""
    row, group, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, first = column < WIDTH, group * WIDTH
    at = row * tl.num_programs(1) * WIDTH + first + column
    value = tl.load(y + at, mask=inside, other=0)
    gate = tl.load(z + row * z_row + first + column, mask=inside, other=0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if GATE_FIRST or not NORMED:
        value *= gate
    if NORMED:
        weights = tl.load(norm + (0 if SHARED else first) + column, mask=inside, other=0)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps) * weights
        if not GATE_FIRST:
            value *= gate
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def mamba2(x: Tensor, weights: Mamba2Weights, state: RecurrentState, batch: StateBatch) -> Tensor:
    """As `ReferenceOps.mamba2`. A state with slot -1 in `writes` is not stored."""
    x, w = _rowwise(x), weights
    mixed = _float32(x, w.channels)
    _convolve_rows(mixed, x[:, w.value_size :], w.taps, w.bias, state, batch)
    y, (dims, keys) = _float32(x, w.value_size), _blocks(w.head_dim, w.state_dim)
    grid = len(batch.reads), w.heads, triton.cdiv(w.head_dim, dims)
    if len(x):
        launch(
            _mamba2, grid, mixed, x[:, w.value_size + w.channels :], w.decay, w.shift, w.skip, state.memory,
            y, *_tables(batch), x.stride(0), w.least, w.most, HEADS=w.heads, GROUPS=w.groups, DIM=w.head_dim,
            STATE=w.state_dim, BLOCK_V=dims, BLOCK_K=keys, num_warps=4,
        )  # fmt: skip
    if not w.norm_groups:
        return y.to(x.dtype)
    return _finished(x, y, x, w.norm, w.eps, w.norm_groups, w.gate_first)


def delta_rule(
    x: Tensor, gates: Tensor, weights: DeltaWeights, state: RecurrentState, batch: StateBatch
) -> Tensor:
    """As `ReferenceOps.delta_rule`. A state with slot -1 in `writes` is not stored."""
    x, gates, w = _rowwise(x), _rowwise(gates), weights
    mixed = _float32(x, w.channels)
    _convolve_rows(mixed, x, w.taps, None, state, batch)
    y, (dims, keys) = _float32(x, w.value_heads * w.value_dim), _blocks(w.value_dim, w.key_dim)
    grid = len(batch.reads), w.value_heads, triton.cdiv(w.value_dim, dims)
    if len(x):
        launch(
            _delta_rule, grid, mixed, gates, w.decay, w.shift, state.memory, y, *_tables(batch),
            gates.stride(0), w.key_dim**-0.5, NORM_EPS, KEY_HEADS=w.key_heads, HEADS=w.value_heads,
            KEY_DIM=w.key_dim, DIM=w.value_dim, BLOCK_V=dims, BLOCK_K=keys, num_warps=4,
        )  # fmt: skip
    return _finished(x, y, x[:, w.channels :], w.norm, w.eps, w.value_heads, False)


def short_conv(x: Tensor, taps: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
    """As `ReferenceOps.short_conv`. Inputs with slot -1 in `writes` are not stored."""
    out = torch.empty((len(x), taps.shape[1]), dtype=x.dtype, device=x.device)
    _convolve_rows(out, _rowwise(x), taps, None, state, batch, gated=True)
    return out


def _convolve_rows(
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
    tables = _tables(batch)
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


def _finished(
    x: Tensor, y: Tensor, z: Tensor, norm: Tensor | None, eps: float, groups: int, gate_first: bool
) -> Tensor:
    """In x's dtype. y [T, values] in `groups` parts that are normalised separately. z: gates, in the first
    columns.
    """
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    width = y.shape[1] // groups
    block = triton.next_power_of_2(width)
    if len(x):
        launch(
            _finish, (len(x), groups), y, z, y if norm is None else norm, out, z.stride(0), eps, WIDTH=width,
            SHARED=norm is not None and len(norm) == width, NORMED=norm is not None, GATE_FIRST=gate_first,
            BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out


def _blocks(dim: int, keys: int) -> tuple[int, int]:
    """Rows of a head's memory per program, and elements of each, as powers of two."""
    width = triton.next_power_of_2(keys)
    return min(triton.next_power_of_2(dim), max(1, TILE // width)), width


def _tables(batch: StateBatch) -> tuple[Tensor, ...]:
    return batch.starts, batch.reads, batch.writes, batch.cuts, batch.saves


def _rowwise(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _float32(x: Tensor, columns: int) -> Tensor:
    return torch.empty((len(x), columns), device=x.device)

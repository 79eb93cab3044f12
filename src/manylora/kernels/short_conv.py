"""Gated causal convolutions over a sequence's last inputs, in plain PyTorch, for recurrent layers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from manylora.kernels.recurrent import RecurrentState, StateBatch, convolve, read_inputs


def short_conv(x: Tensor, taps: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
    """As `ReferenceOps.short_conv`. Sequences with one row are computed together, others one by one."""
    b, c, h = x.float().chunk(3, dim=-1)
    inputs, kept = b * h, len(taps) - 1
    starts, cuts = batch.starts.tolist(), batch.cuts.tolist()
    out = torch.empty_like(inputs)
    before = read_inputs(state, batch.reads)
    if starts[-1] == len(starts) - 1 and not any(cuts):
        seen = torch.cat((before, inputs[:, None]), dim=1)
        out[:] = convolve(seen, taps)[:, 0]
        state.inputs[batch.writes] = seen[:, 1:]
        return (c * out).to(x.dtype)
    for s, (start, stop) in enumerate(pairwise(starts)):
        seen = torch.cat((before[s], inputs[start:stop]))
        out[start:stop] = convolve(seen[None], taps)[0]
        state.inputs[batch.writes[s]] = seen[len(seen) - kept :]
        if cuts[s]:
            state.inputs[batch.saves[s]] = seen[cuts[s] : cuts[s] + kept]
    return (c * out).to(x.dtype)

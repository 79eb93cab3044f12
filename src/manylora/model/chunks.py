"""Attention within chunks of a sequence: a token sees only earlier tokens of its own chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manylora.kernels.spec import AttentionBatch


def in_chunks(batch: AttentionBatch, size: int, kv: Tensor) -> tuple[AttentionBatch, Tensor]:
    """Split each sequence into chunks of `size` tokens that attend separately, as if they were sequences.

    Returns the batch, and the cache [layers, planes, blocks, tokens, heads, dim] with blocks that do not span
    chunks. Both are unchanged if no sequence is longer than a chunk.
    """
    if max(batch.kv_lens) <= size:
        return batch, kv
    starts, lengths, sequences, firsts = [0], [], [], []
    for s, kv_len in enumerate(batch.kv_lens):
        row, stop = batch.query_starts[s], batch.query_starts[s + 1]
        position = kv_len - (stop - row)
        while row < stop:
            first = position // size * size
            end = min(first + size, kv_len)
            row, position = row + end - position, end
            starts.append(row)
            lengths.append(end - first)
            sequences.append(s)
            firsts.append(first)
    tokens = math.gcd(size, kv.shape[3])
    parts = kv.shape[3] // tokens
    device = batch.block_table.device
    table = (batch.block_table.unsqueeze(-1) * parts + torch.arange(parts, device=device)).flatten(1)
    columns = torch.tensor(firsts).unsqueeze(1) // tokens + torch.arange(size // tokens)
    columns = columns.clamp_(max=table.shape[1] - 1).to(device)  # nothing is read past the end
    rows = torch.tensor(sequences, device=device).unsqueeze(1)
    chunks = AttentionBatch(starts, lengths, table[rows, columns].int(), batch.slots)
    return chunks, kv.view(*kv.shape[:2], -1, tokens, *kv.shape[4:])

"""GraLoRA: k times k blocks of a weight, each with a change of rank r / k; and a plain LoRA of `hybrid_r`
beside them. Written out it is a LoRA of rank k r + hybrid_r."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs

A, B = "gralora_A", "gralora_B"
PLAIN_A, PLAIN_B = "gralora_A_general", "gralora_B_general"


def read_gralora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, (A, B, PLAIN_A, PLAIN_B))
    alpha = pairs.number("alpha", 64)
    for path in pairs.paths(A, B, PLAIN_A, PLAIN_B):
        (blocks, width, rank), (other, rank_b, height) = pairs.shape(path, A, 3), pairs.shape(path, B, 3)
        if blocks != other or rank != rank_b or rank % blocks:
            raise AdapterInvalidError(f"{path}: its {A} and {B} do not fit together")
        plain = pairs.shape(path, PLAIN_A)[0] if pairs.has(path, PLAIN_A) or pairs.has(path, PLAIN_B) else 0
        pairs.check_rank(path, rank)
        pairs.check_count(path, "hybrid_r", plain)
        pairs.check_count(path, "gralora_k", blocks)
        in_dim, out_dim, whole = blocks * width, blocks * height, blocks * rank + plain

        def make(
            path: str = path, plain: int = plain, scale: float = alpha / (rank + plain)
        ) -> tuple[np.ndarray, np.ndarray]:
            a, b = _spread(pairs.read(path, A), pairs.read(path, B))
            if plain:
                a = np.concatenate((a, pairs.read(path, PLAIN_A)))
                b = np.concatenate((b, pairs.read(path, PLAIN_B)), axis=1)
            return a, b * np.float32(scale)

        pairs.add(path, whole, in_dim, out_dim, make)
    return pairs.form()


def _spread(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a [k, in / k, r], b [k, r, out / k]: by block of the inputs and of the outputs. Of the r numbers that a
    block of inputs gives, each block of outputs takes r / k. Returns [k r, in] and [out, k r]."""
    blocks, width, rank = a.shape
    height, step = b.shape[2], rank // blocks
    wide_a = np.zeros((blocks, blocks, step, blocks, width), np.float32)  # to, from, number, from, input
    wide_b = np.zeros((blocks, height, blocks, blocks, step), np.float32)  # to, output, to, from, number
    for n in range(blocks):
        wide_a[:, n, :, n] = a[n].T.reshape(blocks, step, width)
        wide_b[n, :, n] = b[n].T.reshape(height, blocks, step)
    return wide_a.reshape(blocks * rank, -1), wide_b.reshape(blocks * height, -1)

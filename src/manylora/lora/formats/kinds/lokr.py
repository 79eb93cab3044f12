"""LoKr: the Kronecker product of W1 and W2, each of which may be a product of two matrices.

kron(P Q, R S) = kron(P, R) kron(Q, S), so its rank is that of one times that of the other.
"""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.loha import dense
from manylora.lora.formats.kinds.lycoris import alphas_over_ranks
from manylora.lora.formats.kinds.pairs import Pairs

PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def read_lokr(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, (*PARTS, "lokr_t2"))
    scale = alphas_over_ranks(pairs)
    for path in pairs.paths("lokr_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOKR, of which no model here has any")
    for path in pairs.paths(*PARTS):
        (out1, in1, rank1), (out2, in2, rank2) = _dims(pairs, path, "lokr_w1"), _dims(pairs, path, "lokr_w2")
        told = [
            pairs.shape(path, f"{name}_a")[1]
            for name in ("lokr_w1", "lokr_w2")
            if pairs.has(path, f"{name}_a")
        ]
        factor = scale(path, told[0] if told else None)

        def make(path: str = path, factor: np.float32 = factor) -> tuple[np.ndarray, np.ndarray]:
            (a1, b1), (a2, b2) = _factors(pairs, path, "lokr_w1"), _factors(pairs, path, "lokr_w2")
            return np.kron(a1, a2), np.kron(b1, b2) * factor

        pairs.add(path, rank1 * rank2, in1 * in2, out1 * out2, make)
    return pairs.form()


def _dims(pairs: Pairs, path: str, name: str) -> tuple[int, int, int]:
    """Outputs, inputs and rank of one of the two. Raises AdapterInvalidError."""
    if pairs.has(path, name):
        out_dim, in_dim = pairs.shape(path, name)
        return out_dim, in_dim, min(out_dim, in_dim)
    (out_dim, rank), (other, in_dim) = pairs.shape(path, f"{name}_a"), pairs.shape(path, f"{name}_b")
    if rank != other:
        raise AdapterInvalidError(f"{path}: {name}_a and {name}_b do not fit together")
    return out_dim, in_dim, min(rank, out_dim, in_dim)


def _factors(pairs: Pairs, path: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A and B of one of the two, of the rank that `_dims` says."""
    if pairs.has(path, name):
        return dense(pairs.read(path, name))
    b, a = pairs.read(path, f"{name}_a"), pairs.read(path, f"{name}_b")
    return dense(b @ a) if len(a) > min(len(b), a.shape[1]) else (a, b)

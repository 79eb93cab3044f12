"""LoHa: (W1a W1b) * (W2a W2b), of which each product of two ranks is a rank."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.lycoris import alphas_over_ranks
from manylora.lora.formats.kinds.pairs import Pairs

PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def read_loha(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, (*PARTS, "hada_t1", "hada_t2"))
    scale = alphas_over_ranks(pairs)
    for path in pairs.paths("hada_t1", "hada_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOHA, of which no model here has any")
    for path in pairs.paths(*PARTS):
        shapes = [pairs.shape(path, part) for part in PARTS]
        (out_dim, first), (_, in_dim), (_, second), _ = shapes
        if shapes[1:] != [(first, in_dim), (out_dim, second), (second, in_dim)]:
            raise AdapterInvalidError(f"{path}: its hada matrices do not fit together")
        factor, whole = scale(path, first), first * second >= min(in_dim, out_dim)

        def make(
            path: str = path, factor: np.float32 = factor, whole: bool = whole
        ) -> tuple[np.ndarray, np.ndarray]:
            one_b, one_a, two_b, two_a = (pairs.read(path, part) for part in PARTS)
            if whole:
                return dense((one_b @ one_a) * (two_b @ two_a) * factor)
            a = one_a[:, None] * two_a[None]
            b = one_b[:, :, None] * two_b[:, None] * factor
            return a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)

        pairs.add(path, min(first * second, in_dim, out_dim), in_dim, out_dim, make)
    return pairs.form()


def dense(delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B of any matrix [out, in], at the rank of its smaller side."""
    out_dim, in_dim = delta.shape
    if in_dim <= out_dim:
        return np.eye(in_dim, dtype=np.float32), delta
    return delta, np.eye(out_dim, dtype=np.float32)

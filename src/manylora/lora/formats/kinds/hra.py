"""HRA: the base's weight behind r Householder reflections of its inputs, W H. H = I + P Q, of rank r, so this
is a LoRA with A = Q and B = W P; W is the base's."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG


def read_hra(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    base = files.base
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets peft_type HRA: it reflects the inputs of the base's weights, which are not known "
            "here: name their directory with --base"
        )
    pairs, orthogonal = Pairs(files, ("hra_u",)), bool(files.settings.get("apply_GS"))
    for path in pairs.paths("hra_u"):
        in_dim, rank = pairs.shape(path, "hra_u")
        pairs.check_rank(path, rank)
        module = pairs.module(path)
        if module is None or module.in_dim != in_dim or module.transposed:
            raise AdapterInvalidError(
                f"{path}: hra_u has {in_dim} inputs"
                + (", and no such module is known" if module is None else f", {module.name} {module.in_dim}")
            )

        def make(path: str = path, rows: int = module.out_dim) -> tuple[np.ndarray, np.ndarray]:
            p, q = _reflections(path, pairs.read(path, "hra_u"), orthogonal)
            weight = base.weight(path, len(p), rows).numpy()
            return q.T, weight @ p

        pairs.add(path, rank, in_dim, module.out_dim, make)
    return pairs.form()


def _reflections(path: str, u: np.ndarray, orthogonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """P and Q, [in, r] float32. u [in, r]: what is reflected; orthogonal: made so first, one by one."""
    wide = u.astype(np.float64)
    p, q = np.zeros_like(wide), np.zeros_like(wide)
    for i in range(wide.shape[1]):
        one = wide[:, i]
        if orthogonal:
            for j in range(i):
                one = one - q[:, j] * (q[:, j] @ one)
        norm = np.linalg.norm(one)
        if not np.isfinite(norm) or norm == 0:
            raise AdapterInvalidError(f"{path}: column {i} of hra_u has no direction")
        q[:, i] = one / norm
        p[:, i] = -2 * (q[:, i] + p[:, :i] @ (q[:, :i].T @ q[:, i]))
    return p.astype(np.float32), q.astype(np.float32)

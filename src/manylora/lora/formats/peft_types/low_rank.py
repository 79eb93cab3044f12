"""Types whose files hold the low-rank matrices, or what they are computed from: AdaLoRA, DeLoRA, GraLoRA,
HRA, MiSS, LoHa, LoKr.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.settings import CONFIG, config_of
from manylora.lora.formats.peft_types.converted import LoraForm, Pairs, PeftFiles


def read_adalora(files: PeftFiles) -> LoraForm:
    """B diag(E) A; ranks differ by module, and those that were pruned to 0 have no rows. Raises
    AdapterInvalidError.
    """
    pairs = Pairs(files, ("lora_A", "lora_B", "lora_E"))
    first, alpha = pairs.count("init_r", 12), pairs.number("lora_alpha", 8)
    ranks = _kept(files)
    for path in pairs.paths("lora_A", "lora_B", "lora_E"):
        a, b, e = (pairs.read(path, f"lora_{part}") for part in "ABE")
        if a.ndim != 2 or b.ndim != 2 or e.shape != (len(a), 1) or b.shape[1] != len(a):
            raise AdapterInvalidError(f"{path}: lora_A, lora_E and lora_B do not fit together")
        rank = ranks.get(path.removeprefix("base_model.model."), first)
        if len(a) != rank:
            raise AdapterInvalidError(f"{path} has rank {len(a)}, and {CONFIG} says {rank}")
        # PEFT divides by the rank before pruning and 1e-5, in float32.
        scale = np.float32(alpha if alpha > 0 else rank) / (np.float32(first) + np.float32(1e-5))
        scaled = a * e, b * scale
        pairs.add(path, rank, a.shape[1], len(b), partial(tuple, scaled))
    return pairs.form()


def _kept(files: PeftFiles) -> dict[str, int]:
    """Ranks by the path of the module, of those that were pruned. Raises AdapterInvalidError."""
    found = files.settings.get("rank_pattern") or {}
    if not isinstance(found, dict):
        raise AdapterInvalidError(f"{CONFIG}: rank_pattern must map names to lists of true and false")
    ranks = {}
    for name, kept in found.items():
        if not isinstance(kept, list) or not all(type(one) is bool for one in kept):
            raise AdapterInvalidError(
                f"{CONFIG}: rank_pattern of {name[:80]} must be true and false for each rank"
            )
        ranks[name.removesuffix(".default").rpartition(".")[0]] = sum(kept)
    return ranks


LEAST_NORM = np.float32(1e-4)  # as PEFT clamps them


def read_delora(files: PeftFiles) -> LoraForm:
    """B diag(lambda / (r |A_i| |B_i|)) A diag(w); w, the norms of the base's columns, is in the file.
    Raises AdapterInvalidError.
    """
    pairs = Pairs(files, ("delora_A", "delora_B", "delora_lambda", "delora_w_norm"))
    for path in pairs.paths("delora_A", "delora_B", "delora_lambda"):
        (rank, in_dim), (out_dim, _) = pairs.shape(path, "delora_A"), pairs.shape(path, "delora_B")
        pairs.check_rank(path, rank)
        sizes = [pairs.shape(path, part, 1) for part in ("delora_w_norm", "delora_lambda")]
        if sizes != [(in_dim,), (1,)]:
            raise AdapterInvalidError(f"{path}: its tensors do not fit together")

        def make(path: str = path, rank: int = rank) -> tuple[np.ndarray, np.ndarray]:
            a, b = pairs.read(path, "delora_A"), pairs.read(path, "delora_B")
            norms = np.maximum(np.linalg.norm(a, axis=1), LEAST_NORM)
            norms = norms * np.maximum(np.linalg.norm(b, axis=0), LEAST_NORM)
            scale = pairs.read(path, "delora_lambda") / np.float32(rank) / norms
            return a * pairs.read(path, "delora_w_norm"), b * scale

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


A, B = "gralora_A", "gralora_B"
PLAIN_A, PLAIN_B = "gralora_A_general", "gralora_B_general"


def read_gralora(files: PeftFiles) -> LoraForm:
    """k times k blocks of a weight, each with a change of rank r / k; and a plain LoRA of `hybrid_r` beside
    them. Written out it is a LoRA of rank k r + hybrid_r. Raises AdapterInvalidError.
    """
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


def read_hra(files: PeftFiles) -> LoraForm:
    """The base's weight behind r Householder reflections of its inputs, W H. H = I + P Q, of rank r, so
    this is a LoRA with A = Q and B = W P; W is the base's. Raises AdapterInvalidError.
    """
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


def read_miss(files: PeftFiles) -> LoraForm:
    """Inputs are summed in steps of r, then multiplied with one matrix [r, out]. Raises
    AdapterInvalidError.
    """
    pairs = Pairs(files, ("miss_block",))
    variant = files.settings.get("init_weights", True)
    if variant == "bat":
        raise AdapterInvalidError(
            f"{CONFIG} sets init_weights to bat: this kind of MISS multiplies the base's weights, so it "
            "has no low-rank form and is not served; merge it into the base with PEFT"
        )
    for path in pairs.paths("miss_block"):
        rank, columns = pairs.shape(path, "miss_block")
        pairs.check_rank(path, rank)
        if variant == "mini":
            pairs.check_count(path, "mini_r", columns)
        module, in_dim = pairs.module(path), pairs.in_dim(path)
        out_dim = module.out_dim if module is not None and variant == "mini" else columns
        if out_dim % columns:
            raise AdapterInvalidError(
                f"{path}: {columns} columns of miss_block do not divide {out_dim} outputs"
            )
        sums = (np.arange(in_dim) % rank == np.arange(rank)[:, None]).astype(np.float32)

        def make(
            path: str = path, sums: np.ndarray = sums, times: int = out_dim // columns, columns: int = columns
        ) -> tuple[np.ndarray, np.ndarray]:
            block = pairs.read(path, "miss_block")
            if columns < len(block):  # of a smaller rank this way
                return block.T @ sums, np.tile(np.eye(columns, dtype=np.float32), (times, 1))
            return sums, np.tile(block.T, (times, 1))

        pairs.add(path, min(rank, columns), in_dim, out_dim, make)
    return pairs.form()


def alphas_over_ranks(pairs: Pairs) -> Callable[[str, int | None], np.float32]:
    """(path of a module, rank of its matrices or None where they do not say) -> alpha / r, by the patterns of
    the settings. Raises AdapterInvalidError, as what it gives does."""
    settings = pairs.files.settings
    names = ("rank_pattern", "alpha_pattern")
    patterns = {name: settings[name] for name in names if name in settings}
    config = config_of({"lora_alpha": pairs.number("alpha", 8), "r": settings.get("r", 8), **patterns})

    def scale(path: str, rank: int | None) -> np.float32:
        if rank is not None:
            config.check_rank(path, rank)
        return np.float32(config.scale(path, config.rank(path)))

    return scale


LOHA_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def read_loha(files: PeftFiles) -> LoraForm:
    """(W1a W1b) * (W2a W2b), of which each product of two ranks is a rank. Raises AdapterInvalidError."""
    pairs = Pairs(files, (*LOHA_PARTS, "hada_t1", "hada_t2"))
    scale = alphas_over_ranks(pairs)
    for path in pairs.paths("hada_t1", "hada_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOHA, of which no model here has any")
    for path in pairs.paths(*LOHA_PARTS):
        shapes = [pairs.shape(path, part) for part in LOHA_PARTS]
        (out_dim, first), (_, in_dim), (_, second), _ = shapes
        if shapes[1:] != [(first, in_dim), (out_dim, second), (second, in_dim)]:
            raise AdapterInvalidError(f"{path}: its hada matrices do not fit together")
        factor, whole = scale(path, first), first * second >= min(in_dim, out_dim)

        def make(
            path: str = path, factor: np.float32 = factor, whole: bool = whole
        ) -> tuple[np.ndarray, np.ndarray]:
            one_b, one_a, two_b, two_a = (pairs.read(path, part) for part in LOHA_PARTS)
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


LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def read_lokr(files: PeftFiles) -> LoraForm:
    """The Kronecker product of W1 and W2, each of which may be a product of two matrices. kron(P Q, R S) =
    kron(P, R) kron(Q, S), so its rank is that of one times that of the other. Raises AdapterInvalidError.
    """
    pairs = Pairs(files, (*LOKR_PARTS, "lokr_t2"))
    scale = alphas_over_ranks(pairs)
    for path in pairs.paths("lokr_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOKR, of which no model here has any")
    for path in pairs.paths(*LOKR_PARTS):
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

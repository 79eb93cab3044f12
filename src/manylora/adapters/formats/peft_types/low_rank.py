"""Types whose change of a weight is a product of low-rank matrices, which the file has or which are computed
from the base's weights W [out, in]; LoRA's variants, also those whose start was taken out of W (PiSSA, OLoRA,
KaSA); trainable tokens.

A function that has a `path` adds A and B of that module to `pairs`. All raise AdapterInvalidError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from manylora.adapters.formats.peft.extras import TOKENS
from manylora.adapters.formats.peft.names import SIDE, module_of
from manylora.adapters.formats.peft.settings import CONFIG, config_of, initial_kind
from manylora.adapters.formats.peft_types import converted
from manylora.adapters.formats.peft_types.converted import (
    LoraForm,
    Matrices,
    Pairs,
    PeftFiles,
    integer,
    unfit,
)
from manylora.adapters.formats.tensor_files import RawTensor, check_type, decode
from manylora.errors import AdapterInvalidError

if TYPE_CHECKING:
    from torch import Tensor

DELTA = TOKENS.rpartition(".")[2]
Tensors = Mapping[str, RawTensor]
STARTS = ("pissa", "olora", "kasa")  # `initial_kind` of LoRAs that are written out
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # in `init_lora_weights`
# What training alone needs: the sampler of MonteCLoRA, the projection of VeLoRA.
OF_TRAINING = {
    "monteclora_config": re.compile(r".+\.lora_monteclora_sampler\..+"),
    "velora_config": re.compile(r".+\.lora_velora_embed(?:\.weight)?"),
}


def read_tokens(files: PeftFiles) -> LoraForm:
    """Trainable tokens: rows of the embedding alone, as `trainable_token_indices` of a LoRA."""
    found, tables = {}, []
    for key, tensor in files.tensors.items():
        path, _, part = key.rpartition(".")
        if part == DELTA and not path.endswith(".token_adapter"):
            tables.append(path.rpartition(".")[2])
            key = f"{path}.{TOKENS}"
        found[key] = tensor
    if not tables:
        raise AdapterInvalidError(f"the adapter holds no {DELTA}")
    ids = files.settings.get("token_indices") or []
    indices = {"trainable_token_indices": dict.fromkeys(tables, ids)}
    return LoraForm(config_of({"lora_alpha": 1, **indices}), found)


def read_lora(files: PeftFiles) -> LoraForm:
    """A LoRA with any of its variants."""
    settings, tensors = files.settings, files.tensors
    for name, pattern in OF_TRAINING.items():
        if settings.get(name):
            tensors = {key: tensor for key, tensor in tensors.items() if not pattern.fullmatch(key)}
    start, dora = initial_kind(settings), bool(settings.get("use_dora"))
    own = initial_kind({**settings, "kasa_config": None})
    twice = start == "kasa" and (dora or own.startswith(OTHER_BASES))
    changes = [change for name, change in CHANGES.items() if settings.get(name)]
    if len(changes) + max(dora, start in STARTS) > 1 or twice:
        raise AdapterInvalidError(f"{CONFIG} asks for several variants of LORA that are not served together")
    for change in changes:
        tensors = change(replace(files, tensors=tensors))
    if start in STARTS:
        return _without_start(replace(files, tensors=tensors), start)
    return LoraForm(config_of(settings), tensors)


def _qalora(files: PeftFiles) -> Tensors:
    """QALoRA: A is multiplied with the means of groups of inputs, times their number. PEFT does so on layers
    of GPTQ only; on other layers use_qalora has no effect, and A has a column for each input.
    """
    size = integer(files.settings, "qalora_group_size", 16, *converted.COUNTS)

    def is_plain(path: str) -> bool:
        module, tensor = module_of(path, files.options.modules), files.tensors.get(f"{path}.lora_A.weight")
        return module is not None and tensor is not None and tensor.shape[-1:] == (module.in_dim,)

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if side == "B" or is_plain(path):
            return values
        factor = np.float32(values.shape[1]) / np.float32(size)
        return np.repeat(values * factor, size, axis=1)

    return _rewritten(files, spread, lambda path, side: size if side == "A" and not is_plain(path) else 1)


def _bdlora(files: PeftFiles) -> Tensors:
    """BD-LoRA: A or B of a module consists of blocks on its diagonal, stored one below the other."""
    found = files.settings["use_bdlora"]
    blocks = found.get("nblocks", 1) if isinstance(found, dict) else None
    # Parts of the names of modules that have blocks in A and in B.
    patterns = {side: found.get(f"target_modules_bd_{side.lower()}") or [] for side in "AB"} if blocks else {}
    named = all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in patterns.values())
    if type(blocks) is not int or not 0 < blocks < 2**16 or not named:
        raise AdapterInvalidError(f"{CONFIG}: use_bdlora must have nblocks and lists of names of modules")

    def is_cut(path: str, side: str) -> bool:
        name = path.rpartition(".")[2]
        sides = [one for one in "AB" if any(part in name for part in patterns[one])]
        if len(sides) > 1:
            raise AdapterInvalidError(f"{CONFIG}: use_bdlora names {path} for A and for B")
        return side in sides

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if not is_cut(path, side):
            return values
        rows, width = values.shape
        if rows % blocks:
            raise AdapterInvalidError(f"{path}: {rows} rows of lora_{side} are not {blocks} blocks")
        whole = np.zeros((blocks, rows // blocks, blocks, width), np.float32)
        for place, block in enumerate(np.split(values, blocks)):
            whole[place, :, place] = block
        return whole.reshape(rows, -1)

    return _rewritten(files, spread, lambda path, side: blocks if is_cut(path, side) else 1)


# By the setting that asks for them: what writes the matrices out.
CHANGES: dict[str, Callable[[PeftFiles], Tensors]] = {"use_qalora": _qalora, "use_bdlora": _bdlora}


def _rewritten(
    files: PeftFiles,
    change: Callable[[str, str, np.ndarray], np.ndarray],
    growth: Callable[[str, str], int],
) -> Tensors:
    """The tensors with A and B of each module changed. change, growth: by a module's path and the side.
    growth: by how much the size of the matrix is multiplied, which is checked first."""
    made, elements = {}, 0
    for key, tensor in files.tensors.items():
        match = SIDE.fullmatch(key)
        if match is None:
            made[key] = tensor
            continue
        check_type(key, tensor)
        if len(tensor.shape) != 2:
            raise AdapterInvalidError(f"{key} has shape {tensor.shape}, 2 dimensions are expected")
        elements += tensor.shape[0] * tensor.shape[1] * growth(match["path"], match["side"])
        files.options.bounds.check_elements(elements)
        made[key] = converted.raw(change(match["path"], match["side"], decode(key, tensor)))
    return made


def _without_start(files: PeftFiles, kind: str) -> LoraForm:
    """A LoRA that was initialised from the base's weights. Training started from W - C instead of W, so the
    adapter is B A - C. C has the same rank and is computed from W again. The signs that a library gives its
    factors do not matter. kind: one of STARTS."""
    pairs = Pairs(files, ("lora_A", "lora_B", "lora_diag"))
    config, base = config_of(files.settings), files.base
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets {kind}: the adapter is relative to a changed base, which is computed from the "
            "base's weights: name its directory with --base, or convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )

    def difference(path: str, scale: np.float32) -> Matrices:
        a, b, module = pairs.read(path, "lora_A"), pairs.read(path, "lora_B"), pairs.module(path)
        if kind == "kasa":
            a = a * pairs.read(path, "lora_diag").reshape(-1, 1)
        transposed = config.fan_in_fan_out if module is None else module.transposed
        if transposed and kind != "pissa":
            raise AdapterInvalidError(f"{path} is a Conv1D, of which PEFT has no {kind}")
        start_a, start_b = _start(kind, base.weight(path, a.shape[1], len(b), transposed), len(a))
        start_b = start_b * scale if kind == "olora" else start_b
        return np.concatenate((a, start_a)), np.concatenate((b * scale, -start_b), axis=1)

    work = 0
    for path in pairs.paths("lora_A", "lora_B"):
        (rank, in_dim), (out_dim, other) = pairs.shape(path, "lora_A"), pairs.shape(path, "lora_B")
        if rank != other or rank > min(in_dim, out_dim):
            raise AdapterInvalidError(f"{path}: its lora_A and lora_B do not fit together")
        told = rank if config.default_rank is None else config.rank(path)
        # A weight has no more parts than its smaller side; the scaling is of the rank that was asked for.
        if rank != min(told, in_dim, out_dim):
            config.check_rank(path, rank)
        work += in_dim * out_dim * min(in_dim, out_dim)
        files.options.bounds.check_decompositions(kind, work)
        make = partial(difference, path, np.float32(config.scale(path, told)))
        pairs.add(path, 2 * rank, in_dim, out_dim, make)
    form, dora = pairs.form(), ("use_dora", "dora_normalized")  # DoRA is of base plus adapter, as in any LoRA
    return replace(form, config=replace(form.config, **{name: getattr(config, name) for name in dora}))


def _start(kind: str, weight: Tensor, rank: int) -> Matrices:
    """A and B of what was taken out of W [out, in]: PiSSA takes the parts with the largest singular values,
    KaSA those with the smallest, OLoRA the first columns of Q and rows of R."""
    import torch

    if kind == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].numpy(), q[:, :rank].numpy()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    part = slice(-rank, None) if kind == "kasa" else slice(rank)
    return v[part].numpy(), (u[:, part] * s[part]).numpy()


def read_adalora(files: PeftFiles) -> LoraForm:
    """B diag(E) A; ranks differ by module, and those that were pruned to 0 have no rows."""
    kept: dict[str, int] = {}  # ranks of pruned modules
    for name, ranks in (files.settings.get("rank_pattern") or {}).items():
        if not isinstance(ranks, list) or not all(type(one) is bool for one in ranks):
            raise AdapterInvalidError(
                f"{CONFIG}: rank_pattern of {name[:80]} must be true and false for each rank"
            )
        kept[name.removesuffix(".default").rpartition(".")[0]] = sum(ranks)

    def adalora(pairs: Pairs, path: str) -> None:
        first, alpha = integer(files.settings, "init_r", 12, *converted.COUNTS), pairs.number("lora_alpha", 8)
        a, b, e = (pairs.read(path, f"lora_{part}") for part in "ABE")
        if a.ndim != 2 or b.ndim != 2 or e.shape != (len(a), 1) or b.shape[1] != len(a):
            raise unfit(path, "lora_A, lora_E and lora_B")
        rank = kept.get(path.removeprefix("base_model.model."), first)
        if len(a) != rank:
            raise AdapterInvalidError(f"{path} has rank {len(a)}, and {CONFIG} says {rank}")
        # PEFT divides by the rank before pruning and 1e-5, in float32.
        scale = np.float32(alpha if alpha > 0 else rank) / (np.float32(first) + np.float32(1e-5))
        pairs.add(path, rank, a.shape[1], len(b), lambda: (a * e, b * scale))

    return converted.by_module(adalora, "lora_A", "lora_B", "lora_E")(files)


LEAST_NORM = np.float32(1e-4)  # as PEFT clamps them


def delora(pairs: Pairs, path: str) -> None:
    """B diag(lambda / (r |A_i| |B_i|)) A diag(w); w, the norms of the base's columns, is in the file."""
    (rank, in_dim), (out_dim, _) = pairs.shape(path, "delora_A"), pairs.shape(path, "delora_B")
    pairs.check_rank(path, rank)
    if (pairs.shape(path, "delora_w_norm", 1), pairs.shape(path, "delora_lambda", 1)) != ((in_dim,), (1,)):
        raise unfit(path)

    def make() -> Matrices:
        a, b = pairs.read(path, "delora_A"), pairs.read(path, "delora_B")
        norms = np.maximum(np.linalg.norm(a, axis=1), LEAST_NORM)
        norms = norms * np.maximum(np.linalg.norm(b, axis=0), LEAST_NORM)
        scale = pairs.read(path, "delora_lambda") / np.float32(rank) / norms
        return a * pairs.read(path, "delora_w_norm"), b * scale

    pairs.add(path, rank, in_dim, out_dim, make)


GRALORA_PARTS = ("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general")


def gralora(pairs: Pairs, path: str) -> None:
    """k times k blocks of a weight, each with a change of rank r / k; and a plain LoRA of `hybrid_r` beside
    them. Written out it is a LoRA of rank k r + hybrid_r."""
    a, b, plain_a, plain_b = GRALORA_PARTS
    (blocks, width, rank), (other, rank_b, height) = pairs.shape(path, a, 3), pairs.shape(path, b, 3)
    if blocks != other or rank != rank_b or rank % blocks:
        raise unfit(path, f"its {a} and {b}")
    plain = pairs.shape(path, plain_a)[0] if pairs.has(path, plain_a) or pairs.has(path, plain_b) else 0
    pairs.check_rank(path, rank)
    pairs.check_count(path, "hybrid_r", plain)
    pairs.check_count(path, "gralora_k", blocks)
    scale, step = np.float32(pairs.number("alpha", 64) / (rank + plain)), rank // blocks

    def make() -> Matrices:
        # Of the r numbers that a block of inputs gives, each block of outputs takes r / k.
        given_a, given_b = pairs.read(path, a), pairs.read(path, b)
        blocks_a = np.zeros((blocks, blocks, step, blocks, width), np.float32)  # to, from, number, from, in
        blocks_b = np.zeros((blocks, height, blocks, blocks, step), np.float32)  # to, out, to, from, number
        for n in range(blocks):
            blocks_a[:, n, :, n] = given_a[n].T.reshape(blocks, step, width)
            blocks_b[n, :, n] = given_b[n].T.reshape(height, blocks, step)
        wide_a, wide_b = blocks_a.reshape(blocks * rank, -1), blocks_b.reshape(blocks * height, -1)
        if plain:
            wide_a = np.concatenate((wide_a, pairs.read(path, plain_a)))
            wide_b = np.concatenate((wide_b, pairs.read(path, plain_b)), axis=1)
        return wide_a, wide_b * scale

    pairs.add(path, blocks * rank + plain, blocks * width, blocks * height, make)


def hra(pairs: Pairs, path: str) -> None:
    """The base's weight behind r Householder reflections of its inputs, W H. H = I + P Q, of rank r, so
    this is a LoRA with A = Q and B = W P."""
    base, module = pairs.files.base, pairs.module(path)
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets peft_type HRA: it reflects the inputs of the base's weights, which are not known "
            "here: name their directory with --base"
        )
    in_dim, rank = pairs.shape(path, "hra_u")
    pairs.check_rank(path, rank)
    if module is None or module.in_dim != in_dim or module.transposed:
        raise AdapterInvalidError(
            f"{path}: hra_u has {in_dim} inputs"
            + (", and no such module is known" if module is None else f", {module.name} {module.in_dim}")
        )
    orthogonal, out_dim = bool(pairs.files.settings.get("apply_GS")), module.out_dim

    def make() -> Matrices:
        wide = pairs.read(path, "hra_u").astype(np.float64)
        p, q = np.zeros_like(wide), np.zeros_like(wide)
        for i in range(rank):
            one = wide[:, i]
            if orthogonal:  # to those before
                for j in range(i):
                    one = one - q[:, j] * (q[:, j] @ one)
            norm = np.linalg.norm(one)
            if not np.isfinite(norm) or norm == 0:
                raise AdapterInvalidError(f"{path}: column {i} of hra_u has no direction")
            q[:, i] = one / norm
            p[:, i] = -2 * (q[:, i] + p[:, :i] @ (q[:, :i].T @ q[:, i]))
        return q.astype(np.float32).T, base.weight(path, in_dim, out_dim).numpy() @ p.astype(np.float32)

    pairs.add(path, rank, in_dim, out_dim, make)


def miss(pairs: Pairs, path: str) -> None:
    """Inputs are summed in steps of r, then multiplied with one matrix [r, out]."""
    variant = pairs.files.settings.get("init_weights", True)
    if variant == "bat":
        raise AdapterInvalidError(
            f"{CONFIG} sets init_weights to bat: this kind of MISS multiplies the base's weights, so it "
            "has no low-rank form and is not served; merge it into the base with PEFT"
        )
    rank, columns = pairs.shape(path, "miss_block")
    pairs.check_rank(path, rank)
    if variant == "mini":
        pairs.check_count(path, "mini_r", columns)
    module = pairs.known_module(path)
    in_dim, out_dim = module.in_dim, module.out_dim if variant == "mini" else columns
    if out_dim % columns:
        raise AdapterInvalidError(f"{path}: {columns} columns of miss_block do not divide {out_dim} outputs")

    def make() -> Matrices:
        block, times = pairs.read(path, "miss_block"), out_dim // columns
        sums = (np.arange(in_dim) % rank == np.arange(rank)[:, None]).astype(np.float32)
        if columns < rank:  # of a smaller rank this way
            return block.T @ sums, np.tile(np.eye(columns, dtype=np.float32), (times, 1))
        return sums, np.tile(block.T, (times, 1))

    pairs.add(path, min(rank, columns), in_dim, out_dim, make)


LOHA_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def loha(pairs: Pairs, path: str) -> None:
    """(W1a W1b) * (W2a W2b), of which each product of two ranks is a rank."""
    if pairs.has(path, "hada_t1") or pairs.has(path, "hada_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOHA, of which no model here has any")
    shapes = [pairs.shape(path, part) for part in LOHA_PARTS]
    (out_dim, first), (_, in_dim), (_, second), _ = shapes
    if shapes[1:] != [(first, in_dim), (out_dim, second), (second, in_dim)]:
        raise unfit(path, "its hada matrices")
    scale, whole = pairs.alpha_over_rank(path, first), first * second >= min(in_dim, out_dim)

    def make() -> Matrices:
        one_b, one_a, two_b, two_a = (pairs.read(path, part) for part in LOHA_PARTS)
        if whole:
            return _factors((one_b @ one_a) * (two_b @ two_a) * scale)
        a = one_a[:, None] * two_a[None]
        b = one_b[:, :, None] * two_b[:, None] * scale
        return a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)

    pairs.add(path, min(first * second, in_dim, out_dim), in_dim, out_dim, make)


def _factors(delta: np.ndarray) -> Matrices:
    """A and B of any matrix [out, in], at the rank of its smaller side."""
    out_dim, in_dim = delta.shape
    if in_dim <= out_dim:
        return np.eye(in_dim, dtype=np.float32), delta
    return delta, np.eye(out_dim, dtype=np.float32)


LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def lokr(pairs: Pairs, path: str) -> None:
    """The Kronecker product of W1 and W2, each of which may be a product of two matrices. kron(P Q, R S) =
    kron(P, R) kron(Q, S), so its rank is that of one times that of the other."""
    if pairs.has(path, "lokr_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOKR, of which no model here has any")
    (out1, in1, rank1), (out2, in2, rank2) = (_lokr_dims(pairs, path, f"lokr_w{n}") for n in (1, 2))
    pair = next((name for name in ("lokr_w1_a", "lokr_w2_a") if pairs.has(path, name)), None)
    scale = pairs.alpha_over_rank(path, None if pair is None else pairs.shape(path, pair)[1])

    def factors(name: str, rank: int) -> Matrices:
        if pairs.has(path, name):
            return _factors(pairs.read(path, name))
        b, a = pairs.read(path, f"{name}_a"), pairs.read(path, f"{name}_b")
        return (a, b) if len(a) == rank else _factors(b @ a)

    def make() -> Matrices:
        (a1, b1), (a2, b2) = factors("lokr_w1", rank1), factors("lokr_w2", rank2)
        return np.kron(a1, a2), np.kron(b1, b2) * scale

    pairs.add(path, rank1 * rank2, in1 * in2, out1 * out2, make)


def _lokr_dims(pairs: Pairs, path: str, name: str) -> tuple[int, int, int]:
    """Outputs, inputs and rank of one of the two."""
    if pairs.has(path, name):
        out_dim, in_dim = pairs.shape(path, name)
        return out_dim, in_dim, min(out_dim, in_dim)
    (out_dim, rank), (other, in_dim) = pairs.shape(path, f"{name}_a"), pairs.shape(path, f"{name}_b")
    if rank != other:
        raise unfit(path, f"{name}_a and {name}_b")
    return out_dim, in_dim, min(rank, out_dim, in_dim)


def deft(pairs: Pairs, path: str) -> None:
    """W - P Q^T W + P R: P [out, r] and R [r, in] are in the file, Q is P without its negative numbers, or
    both are the orthogonal part of P. With `para` there is no R."""
    settings = pairs.files.settings
    method, bare = settings.get("decomposition_method", "relu"), bool(settings.get("para"))
    alpha = settings.get("alpha") or None
    if method not in ("relu", "qr"):
        raise AdapterInvalidError(f"{CONFIG}: decomposition_method must be relu or qr")
    out_dim, rank = pairs.shape(path, "deft_P")
    pairs.check_rank(path, rank)
    in_dim = pairs.known_module(path).in_dim if bare else pairs.shape(path, "deft_R")[1]
    if rank > out_dim:
        raise AdapterInvalidError(f"{path}: deft_P has {rank} columns of {out_dim} numbers")

    def make() -> Matrices:
        import torch

        p = torch.from_numpy(pairs.read(path, "deft_P"))
        q = torch.relu(p)
        if method == "qr":
            p = q = torch.linalg.qr(p)[0]
        a = -(q.T @ _base_weight(pairs, path, in_dim, out_dim))
        if not bare:
            scale = 1.0 if alpha is None else alpha / rank
            a += torch.from_numpy(pairs.read(path, "deft_R")) * scale
        return a.numpy(), p.numpy()

    pairs.add(path, rank, in_dim, out_dim, make)


ACTIVATIONS = ("relu", "silu", "gelu", "tanh", "sigmoid")  # of PEANuT; PEFT has the names from transformers
MOST_LAYERS = 16  # of PEANuT, on each side


def read_peanut(files: PeftFiles) -> LoraForm:
    """W + B h(W): h is a small network over the columns of W, of which the file has the layers."""
    import torch

    depth = integer(files.settings, "depth", 0, range(MOST_LAYERS + 1), f"from 0 to {MOST_LAYERS}")
    name = files.settings.get("act_fn", "relu")
    if name not in ACTIVATIONS:
        raise AdapterInvalidError(f"{CONFIG}: act_fn must be one of {', '.join(ACTIVATIONS)}")
    layers, act = [str(n) for n in range(depth)], getattr(torch.nn.functional, name)

    def peanut(pairs: Pairs, path: str) -> None:
        rank, out_dim = pairs.shape(path, "peanut_A")
        pairs.check_rank(path, rank)
        module, scale = pairs.known_module(path), np.float32(pairs.number("scaling", 1.0))
        encoders, decoders = (f"{path}.peanut_{side}" for side in ("encoders", "decoders"))
        sizes = {pairs.shape(side, n) for side in (encoders, decoders) for n in layers}
        if not sizes <= {(rank, rank)} or module.transposed:
            raise unfit(path, "its tensors of PEANUT")

        def layer(where: str, part: str, values: Tensor) -> Tensor:
            return act(values @ torch.from_numpy(pairs.read(where, part)).T)

        def make() -> Matrices:
            found = layer(path, "peanut_A", _base_weight(pairs, path, module.in_dim, out_dim).T)
            before = []
            for n in layers:
                before.append(found)
                found = layer(encoders, n, found)
            for n in layers:
                found = layer(decoders, n, found) + before.pop()
            return found.T.numpy(), pairs.read(path, "peanut_B") * scale

        pairs.add(path, rank, module.in_dim, out_dim, make)

    return converted.by_module(peanut, "peanut_A", "peanut_B", beside=layers)(files)


def _base_weight(pairs: Pairs, path: str, in_dim: int, out_dim: int) -> Tensor:
    """[out, in] of the base, float32."""
    base, module = pairs.files.base, pairs.module(path)
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets peft_type {pairs.kind}: its change is computed from the base's weights, which "
            "are not known here: name their directory with --base"
        )
    transposed = bool(pairs.files.settings.get("fan_in_fan_out")) if module is None else module.transposed
    return base.weight(path, in_dim, out_dim, transposed)

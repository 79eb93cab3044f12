"""Types whose change of a weight is a product of low-rank matrices, which the file has or which are computed
from the base's weights W [out, in]; LoRA's variants, also those whose start was taken out of W (PiSSA, OLoRA,
KaSA); trainable tokens.

A function that has a `path` returns A and B of that module. All raise AdapterInvalidError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    blocks = found.get("nblocks", 1)
    # Parts of the names of modules that have blocks in A and in B.
    patterns = {side: found.get(f"target_modules_bd_{side.lower()}") or [] for side in "AB"}
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
        made[key] = RawTensor.of(change(match["path"], match["side"], decode(key, tensor)))
    return made


def _without_start(files: PeftFiles, kind: str) -> LoraForm:
    """A LoRA that was initialised from the base's weights. Training started from W - C instead of W, so the
    adapter is B A - C. C has the same rank and is computed from W again. The signs that a library gives its
    factors do not matter. kind: one of STARTS."""
    pairs, config, work = Pairs(files, ("lora_A", "lora_B", "lora_diag")), config_of(files.settings), 0

    def difference(path: str) -> Matrices:
        nonlocal work
        rank, in_dim, out_dim = pairs.sizes(path, "r i o", lora_A="r i", lora_B="o r")
        told = rank if config.default_rank is None else config.rank(path)
        # A weight has no more parts than its smaller side; the scaling is of the rank that was asked for.
        if rank != min(told, in_dim, out_dim):
            config.check_rank(path, rank)
        work += in_dim * out_dim * min(in_dim, out_dim)
        files.options.bounds.check_decompositions(kind, work)
        pairs.reserve(path, 2 * rank, in_dim, out_dim)
        if pairs.is_transposed(path) and kind != "pissa":
            raise AdapterInvalidError(f"{path} is a Conv1D, of which PEFT has no {kind}")
        a, b = pairs.read(path, "lora_A"), pairs.read(path, "lora_B")
        if kind == "kasa":
            a = a * pairs.read(path, "lora_diag").reshape(-1, 1)
        scale = np.float32(config.scale(path, told))
        start_a, start_b = _start(kind, pairs.base_weight(path, in_dim, out_dim), rank)
        start_b = start_b * scale if kind == "olora" else start_b
        return np.concatenate((a, start_a)), np.concatenate((b * scale, -start_b), axis=1)

    form = pairs.convert(pairs.paths("lora_A", "lora_B"), difference)
    dora = ("use_dora", "dora_normalized")  # DoRA is of base plus adapter, as in any LoRA
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

    def adalora(pairs: Pairs, path: str) -> Matrices:
        first, alpha = integer(files.settings, "init_r", 12, *converted.COUNTS), pairs.number("lora_alpha", 8)
        a, b, e = (pairs.read(path, f"lora_{part}") for part in "ABE")
        if a.ndim != 2 or b.ndim != 2 or e.shape != (len(a), 1):
            raise unfit(path, "lora_A, lora_E and lora_B")
        rank = kept.get(path.removeprefix("base_model.model."), first)
        if len(a) != rank:
            raise AdapterInvalidError(f"{path} has rank {len(a)}, and {CONFIG} says {rank}")
        pairs.reserve(path, rank, a.shape[1], len(b))
        # PEFT divides by the rank before pruning and 1e-5, in float32.
        scale = np.float32(alpha if alpha > 0 else rank) / (np.float32(first) + np.float32(1e-5))
        return a * e, b * scale

    return converted.by_module(adalora, "lora_A", "lora_B", "lora_E")(files)


LEAST_NORM = np.float32(1e-4)  # as PEFT clamps them


def delora(pairs: Pairs, path: str) -> Matrices:
    """B diag(lambda / (r |A_i| |B_i|)) A diag(w); w, the norms of the base's columns, is in the file."""
    rank, in_dim, out_dim = pairs.sizes(
        path, "r i o", delora_A="r i", delora_B="o r", delora_w_norm="i", delora_lambda="1"
    )
    pairs.check_rank(path, rank)
    pairs.reserve(path, rank, in_dim, out_dim)
    a, b = pairs.read(path, "delora_A"), pairs.read(path, "delora_B")
    norms = np.maximum(np.linalg.norm(a, axis=1), LEAST_NORM)
    norms = norms * np.maximum(np.linalg.norm(b, axis=0), LEAST_NORM)
    scale = pairs.read(path, "delora_lambda") / np.float32(rank) / norms
    return a * pairs.read(path, "delora_w_norm"), b * scale


GRALORA_PARTS = ("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general")


def gralora(pairs: Pairs, path: str) -> Matrices:
    """k times k blocks of a weight, each with a change of rank r / k; and a plain LoRA of `hybrid_r` beside
    them. Written out it is a LoRA of rank k r + hybrid_r."""
    a, b, plain_a, plain_b = GRALORA_PARTS
    blocks, width, rank, height = pairs.sizes(path, "k i r o", gralora_A="k i r", gralora_B="k r o")
    if rank % blocks:
        raise unfit(path, f"its {a} and {b}")
    plain = pairs.shape(path, plain_a)[0] if pairs.has(path, plain_a) or pairs.has(path, plain_b) else 0
    pairs.check_rank(path, rank)
    pairs.check_count(path, "hybrid_r", plain)
    pairs.check_count(path, "gralora_k", blocks)
    pairs.reserve(path, blocks * rank + plain, blocks * width, blocks * height)
    scale, step = np.float32(pairs.number("alpha", 64) / (rank + plain)), rank // blocks
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


def hra(pairs: Pairs, path: str) -> Matrices:
    """The base's weight behind r Householder reflections of its inputs, W H. H = I + P Q, of rank r, so
    this is a LoRA with A = Q and B = W P."""
    in_dim, rank = pairs.shape(path, "hra_u")
    pairs.check_rank(path, rank)
    module = pairs.known_module(path)
    if module.in_dim != in_dim or module.transposed:
        raise AdapterInvalidError(f"{path}: hra_u has {in_dim} inputs, {module.name} {module.in_dim}")
    pairs.reserve(path, rank, in_dim, module.out_dim)
    weight, wide = pairs.base_weight(path, in_dim, module.out_dim), pairs.read(path, "hra_u").astype(float)
    p, q = np.zeros_like(wide), np.zeros_like(wide)
    for i in range(rank):
        one = wide[:, i]
        for j in range(i if pairs.files.settings.get("apply_GS") else 0):  # orthogonal to those before
            one = one - q[:, j] * (q[:, j] @ one)
        norm = np.linalg.norm(one)
        if not np.isfinite(norm) or norm == 0:
            raise AdapterInvalidError(f"{path}: column {i} of hra_u has no direction")
        q[:, i] = one / norm
        p[:, i] = -2 * (q[:, i] + p[:, :i] @ (q[:, :i].T @ q[:, i]))
    return q.astype(np.float32).T, weight.numpy() @ p.astype(np.float32)


def miss(pairs: Pairs, path: str) -> Matrices:
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
    times, rest = divmod(out_dim, columns)
    if rest:
        raise AdapterInvalidError(f"{path}: {columns} columns of miss_block do not divide {out_dim} outputs")
    pairs.reserve(path, min(rank, columns), in_dim, out_dim)
    block = pairs.read(path, "miss_block")
    sums = (np.arange(in_dim) % rank == np.arange(rank)[:, None]).astype(np.float32)
    if columns < rank:  # of a smaller rank this way
        return block.T @ sums, np.tile(np.eye(columns, dtype=np.float32), (times, 1))
    return sums, np.tile(block.T, (times, 1))


LOHA_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def loha(pairs: Pairs, path: str) -> Matrices:
    """(W1a W1b) * (W2a W2b), of which each product of two ranks is a rank."""
    if pairs.has(path, "hada_t1") or pairs.has(path, "hada_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOHA, of which no model here has any")
    shapes = dict(zip(LOHA_PARTS, ("o r", "r i", "o s", "s i"), strict=True))
    out_dim, in_dim, first, second = pairs.sizes(path, "o i r s", **shapes)
    scale = pairs.alpha_over_rank(path, first)
    pairs.reserve(path, min(first * second, in_dim, out_dim), in_dim, out_dim)
    one_b, one_a, two_b, two_a = (pairs.read(path, part) for part in LOHA_PARTS)
    if first * second >= min(in_dim, out_dim):
        return _factors((one_b @ one_a) * (two_b @ two_a) * scale)
    a = one_a[:, None] * two_a[None]
    b = one_b[:, :, None] * two_b[:, None] * scale
    return a.reshape(-1, in_dim), b.reshape(out_dim, -1)


def _factors(delta: np.ndarray) -> Matrices:
    """A and B of any matrix [out, in], at the rank of its smaller side."""
    out_dim, in_dim = delta.shape
    if in_dim <= out_dim:
        return np.eye(in_dim, dtype=np.float32), delta
    return delta, np.eye(out_dim, dtype=np.float32)


LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def lokr(pairs: Pairs, path: str) -> Matrices:
    """The Kronecker product of W1 and W2, each of which may be a product of two matrices. kron(P Q, R S) =
    kron(P, R) kron(Q, S), so its rank is that of one times that of the other."""
    if pairs.has(path, "lokr_t2"):
        raise AdapterInvalidError(f"{path} is a convolution of LOKR, of which no model here has any")
    (out1, in1, rank1), (out2, in2, rank2) = (_lokr_dims(pairs, path, f"lokr_w{n}") for n in (1, 2))
    pair = next((name for name in ("lokr_w1_a", "lokr_w2_a") if pairs.has(path, name)), None)
    scale = pairs.alpha_over_rank(path, None if pair is None else pairs.shape(path, pair)[1])
    pairs.reserve(path, rank1 * rank2, in1 * in2, out1 * out2)

    def factors(name: str, rank: int) -> Matrices:
        if pairs.has(path, name):
            return _factors(pairs.read(path, name))
        b, a = pairs.read(path, f"{name}_a"), pairs.read(path, f"{name}_b")
        return (a, b) if len(a) == rank else _factors(b @ a)

    (a1, b1), (a2, b2) = factors("lokr_w1", rank1), factors("lokr_w2", rank2)
    return np.kron(a1, a2), np.kron(b1, b2) * scale


def _lokr_dims(pairs: Pairs, path: str, name: str) -> tuple[int, int, int]:
    """Outputs, inputs and rank of one of the two."""
    if pairs.has(path, name):
        out_dim, in_dim = pairs.shape(path, name)
        return out_dim, in_dim, min(out_dim, in_dim)
    out_dim, in_dim, rank = pairs.sizes(path, "o i r", **{f"{name}_a": "o r", f"{name}_b": "r i"})
    return out_dim, in_dim, min(rank, out_dim, in_dim)


def deft(pairs: Pairs, path: str) -> Matrices:
    """W - P Q^T W + P R: P [out, r] and R [r, in] are in the file, Q is P without its negative numbers, or
    both are the orthogonal part of P. With `para` there is no R."""
    import torch

    settings = pairs.files.settings
    method, bare = settings.get("decomposition_method", "relu"), bool(settings.get("para"))
    if method not in ("relu", "qr"):
        raise AdapterInvalidError(f"{CONFIG}: decomposition_method must be relu or qr")
    out_dim, rank = pairs.shape(path, "deft_P")
    pairs.check_rank(path, rank)
    in_dim = pairs.known_module(path).in_dim if bare else pairs.shape(path, "deft_R")[1]
    if rank > out_dim:
        raise AdapterInvalidError(f"{path}: deft_P has {rank} columns of {out_dim} numbers")
    pairs.reserve(path, rank, in_dim, out_dim)
    p = torch.from_numpy(pairs.read(path, "deft_P"))
    q = torch.relu(p)
    if method == "qr":
        p = q = torch.linalg.qr(p)[0]
    a = -(q.T @ pairs.base_weight(path, in_dim, out_dim))
    if not bare:
        a += torch.from_numpy(pairs.read(path, "deft_R")) * ((settings.get("alpha") or rank) / rank)
    return a.numpy(), p.numpy()


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

    def peanut(pairs: Pairs, path: str) -> Matrices:
        rank, out_dim = pairs.shape(path, "peanut_A")
        pairs.check_rank(path, rank)
        module, scale = pairs.known_module(path), np.float32(pairs.number("scaling", 1.0))
        encoders, decoders = (f"{path}.peanut_{side}" for side in ("encoders", "decoders"))
        sizes = {pairs.shape(side, n) for side in (encoders, decoders) for n in layers}
        if not sizes <= {(rank, rank)} or module.transposed:
            raise unfit(path, "its tensors of PEANUT")
        pairs.reserve(path, rank, module.in_dim, out_dim)

        def layer(where: str, part: str, values: Tensor) -> Tensor:
            return act(values @ torch.from_numpy(pairs.read(where, part)).T)

        found = layer(path, "peanut_A", pairs.base_weight(path, module.in_dim, out_dim).T)
        before = []
        for n in layers:
            before.append(found)
            found = layer(encoders, n, found)
        for n in layers:
            found = layer(decoders, n, found) + before.pop()
        return found.T.numpy(), pairs.read(path, "peanut_B") * scale

    return converted.by_module(peanut, "peanut_A", "peanut_B", beside=layers)(files)

"""Types that are computed from the base's weights W [out, in]: DEFT, PEANuT, and LoRAs whose start was taken
out of W (PiSSA, OLoRA, KaSA).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.settings import CONFIG, config_of, initial_kind
from manylora.lora.formats.peft_types.converted import LoraForm, Pairs, PeftFiles

if TYPE_CHECKING:
    from torch import Tensor


ACTIVATIONS = ("relu", "silu", "gelu", "tanh", "sigmoid")  # of PEANuT; PEFT has the names from transformers
MOST_LAYERS = 16  # of PEANuT, on each side


def read_deft(files: PeftFiles) -> LoraForm:
    """W - P Q^T W + P R: P [out, r] and R [r, in] are in the file, Q is P without its negative numbers, or
    both are the orthogonal part of P. With `para` there is no R. Raises AdapterInvalidError."""
    pairs, settings = Pairs(files, ("deft_P", "deft_R")), files.settings
    method, bare = settings.get("decomposition_method", "relu"), bool(settings.get("para"))
    alpha = pairs.number("alpha") if settings.get("alpha") else None
    if method not in ("relu", "qr"):
        raise AdapterInvalidError(f"{CONFIG}: decomposition_method must be relu or qr")
    for path in pairs.paths("deft_P", "deft_R"):
        out_dim, rank = pairs.shape(path, "deft_P")
        pairs.check_rank(path, rank)
        in_dim = pairs.in_dim(path) if bare else pairs.shape(path, "deft_R")[1]
        if rank > out_dim:
            raise AdapterInvalidError(f"{path}: deft_P has {rank} columns of {out_dim} numbers")

        def make(
            path: str = path, in_dim: int = in_dim, out_dim: int = out_dim, rank: int = rank
        ) -> tuple[np.ndarray, np.ndarray]:
            import torch

            p = torch.from_numpy(pairs.read(path, "deft_P"))
            q = torch.relu(p)
            if method == "qr":
                p = q = torch.linalg.qr(p)[0]
            a = -(q.T @ _weight(pairs, path, in_dim, out_dim))
            if not bare:
                scale = 1.0 if alpha is None else alpha / rank
                a += torch.from_numpy(pairs.read(path, "deft_R")) * scale
            return a.numpy(), p.numpy()

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def read_peanut(files: PeftFiles) -> LoraForm:
    """W + B h(W): h is a small network over the columns of W, of which the file has the layers. Raises
    AdapterInvalidError."""
    depth = files.settings.get("depth", 0)
    if type(depth) is not int or not 0 <= depth <= MOST_LAYERS:
        raise AdapterInvalidError(f"{CONFIG}: depth must be from 0 to {MOST_LAYERS}")
    layers = [str(n) for n in range(depth)]
    pairs = Pairs(files, ("peanut_A", "peanut_B", *layers))
    scale = pairs.number("scaling", 1.0)
    act = _activation(files.settings.get("act_fn", "relu"))
    for path in pairs.paths("peanut_A", "peanut_B"):
        rank, out_dim = pairs.shape(path, "peanut_A")
        pairs.check_rank(path, rank)
        module = pairs.module(path)
        transposed = module is not None and module.transposed
        in_dim = pairs.in_dim(path)
        sides = {side: f"{path}.peanut_{side}" for side in ("encoders", "decoders")}
        if transposed or any(pairs.shape(one, n) != (rank, rank) for one in sides.values() for n in layers):
            raise AdapterInvalidError(f"{path}: its tensors of PEANUT do not fit together")

        def make(
            path: str = path,
            in_dim: int = in_dim,
            out_dim: int = out_dim,
            sides: dict[str, str] = sides,
        ) -> tuple[np.ndarray, np.ndarray]:
            import torch

            def layer(where: str, part: str, values: Tensor) -> Tensor:
                return act(values @ torch.from_numpy(pairs.read(where, part)).T)

            found = layer(path, "peanut_A", _weight(pairs, path, in_dim, out_dim).T)
            before = []
            for n in layers:
                before.append(found)
                found = layer(sides["encoders"], n, found)
            for n in layers:
                found = layer(sides["decoders"], n, found) + before.pop()
            return found.T.numpy(), pairs.read(path, "peanut_B") * np.float32(scale)

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _activation(name: object) -> Callable[[Tensor], Tensor]:
    import torch

    if name not in ACTIVATIONS:
        raise AdapterInvalidError(f"{CONFIG}: act_fn must be one of {', '.join(ACTIVATIONS)}")
    return getattr(torch.nn.functional, str(name))


def _weight(pairs: Pairs, path: str, in_dim: int, out_dim: int) -> Tensor:
    """[out, in] of the base, float32."""
    base, module = pairs.files.base, pairs.module(path)
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets peft_type {pairs.kind}: its change is computed from the base's weights, which "
            "are not known here: name their directory with --base"
        )
    transposed = bool(pairs.files.settings.get("fan_in_fan_out")) if module is None else module.transposed
    return base.weight(path, in_dim, out_dim, transposed)


def with_initial(files: PeftFiles) -> LoraForm:
    """A LoRA whose start was taken out of the base's weights. Training began with W - C in place of W, so
    the adapter is B A - C, of which C, of the same rank, is computed from W again. The product is the same
    however a library signs its factors. Raises AdapterInvalidError.
    """
    kind = initial_kind(files.settings)
    pairs = Pairs(files, ("lora_A", "lora_B", "lora_diag"))
    config = config_of(files.settings)
    if files.base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets {kind}: the adapter is relative to a changed base, which is computed from the "
            "base's weights: name its directory with --base, or convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
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

        def make(path: str = path, rank: int = rank, told: int = told) -> tuple[np.ndarray, np.ndarray]:
            a, b = pairs.read(path, "lora_A"), pairs.read(path, "lora_B")
            scale = np.float32(config.scale(path, told))
            if kind == "kasa":
                a = a * pairs.read(path, "lora_diag").reshape(-1, 1)
            assert files.base is not None
            module = pairs.module(path)
            transposed = config.fan_in_fan_out if module is None else module.transposed
            if transposed and kind != "pissa":
                raise AdapterInvalidError(f"{path} is a Conv1D, of which PEFT has no {kind}")
            weight = files.base.weight(path, a.shape[1], len(b), transposed)
            start_a, start_b = CHANGES[kind](weight, rank)
            start_b = start_b * scale if kind == "olora" else start_b
            return np.concatenate((a, start_a)), np.concatenate((b * scale, -start_b), axis=1)

        pairs.add(path, 2 * rank, in_dim, out_dim, make)
    form, dora = pairs.form(), ("use_dora", "dora_normalized")  # of the sum of base and adapter, as ever
    return replace(form, config=replace(form.config, **{name: getattr(config, name) for name in dora}))


def _largest(weight: Tensor, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Of PiSSA: the parts of the largest singular values."""
    import torch

    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return v[:rank].numpy(), (u[:, :rank] * s[:rank]).numpy()


def _smallest(weight: Tensor, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Of KaSA: the parts of the smallest."""
    import torch

    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return v[-rank:].numpy(), (u[:, -rank:] * s[-rank:]).numpy()


def _first(weight: Tensor, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Of OLoRA: the first columns of Q and rows of R."""
    import torch

    q, r = torch.linalg.qr(weight)
    return r[:rank].numpy(), q[:, :rank].numpy()


# By `initial_kind`: (W [out, in], rank) -> A and B of what was taken out.
CHANGES: dict[str, Callable[[Tensor, int], tuple[np.ndarray, np.ndarray]]] = {
    "pissa": _largest,
    "olora": _first,
    "kasa": _smallest,
}

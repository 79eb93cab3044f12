"""Kinds whose low-rank change is computed from the base's weights: DEFT and PEANuT. W is [out, in]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG

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

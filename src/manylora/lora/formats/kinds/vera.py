"""VeRA: diag(b) B diag(d) A; A and B are random, and all modules have parts of the same two."""

from __future__ import annotations

import math

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG

ROOT = "base_model"  # where PEFT keeps what modules share


def read_vera(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B"))
    paths = list(pairs.paths("vera_lambda_b", "vera_lambda_d"))
    if not paths:
        raise AdapterInvalidError("the adapter holds no vectors of VERA")
    dims = {path: (pairs.in_dim(path), pairs.shape(path, "vera_lambda_b", 1)[0]) for path in paths}
    rank = pairs.shape(paths[0], "vera_lambda_d", 1)[0]
    shared_a, shared_b = _projections(
        pairs, rank, *(max(column) for column in zip(*dims.values(), strict=True))
    )
    for path, (in_dim, out_dim) in dims.items():

        def make(
            path: str = path, in_dim: int = in_dim, out_dim: int = out_dim
        ) -> tuple[np.ndarray, np.ndarray]:
            d, b = pairs.read(path, "vera_lambda_d"), pairs.read(path, "vera_lambda_b")
            if len(d) != rank:
                raise AdapterInvalidError(f"{path} has rank {len(d)}, and {paths[0]} {rank}")
            return shared_a[:, :in_dim] * d[:, None], shared_b[:out_dim] * b[:, None]

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _projections(pairs: Pairs, rank: int, in_dim: int, out_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in or more] and B [out or more, rank], from the file, or as PEFT draws them."""
    if pairs.files.settings.get("save_projection", True):
        a, b = pairs.read(ROOT, "vera_A"), pairs.read(ROOT, "vera_B")
    else:
        pairs.files.options.bounds.check_rank(rank)
        a, b = _draw(pairs, rank, in_dim, out_dim)
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        raise AdapterInvalidError(f"vera_A {a.shape} and vera_B {b.shape} are not those of rank {rank}")
    if a.shape[1] < in_dim or len(b) < out_dim:
        raise AdapterInvalidError(
            f"vera_A {a.shape} and vera_B {b.shape} are smaller than a module of {in_dim} inputs and "
            f"{out_dim} outputs: the adapter was made for another model"
        )
    return a, b


def _draw(pairs: Pairs, rank: int, in_dim: int, out_dim: int) -> tuple[np.ndarray, np.ndarray]:
    import torch

    key = pairs.files.settings.get("projection_prng_key", 0)
    if type(key) is not int or not -(2**63) <= key < 2**63:
        raise AdapterInvalidError(f"{CONFIG}: projection_prng_key must be an integer of 64 bits")
    generator = torch.Generator(device="cpu").manual_seed(key)
    made = []
    for rows, columns in ((rank, in_dim), (out_dim, rank)):
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
        drawn = torch.empty(rows, columns, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        made.append(drawn.numpy())
    return made[0], made[1]

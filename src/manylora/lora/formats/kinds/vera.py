"""VeRA: diag(b) B diag(d) A; A and B are random, and all modules have parts of the same two.

PVeRA has twice the rows of A and d, of which the second half is the spread that training samples with.
"""

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
    return _read(files, "vera", 1)


def read_pvera(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    if files.settings.get("sample_at_inference"):
        raise AdapterInvalidError(
            f"{CONFIG} sets sample_at_inference: such a PVERA adapter answers at random and is not served"
        )
    return _read(files, "pvera", 2)


def _read(files: PeftFiles, kind: str, times: int) -> LoraForm:
    """times: rows of A and of d for each rank."""
    pairs = Pairs(files, [f"{kind}_{part}" for part in ("lambda_b", "lambda_d", "A", "B")])
    paths = list(pairs.paths(f"{kind}_lambda_b", f"{kind}_lambda_d"))
    if not paths:
        raise AdapterInvalidError(f"the adapter holds no vectors of {pairs.kind}")
    dims = {path: _dims(pairs, path, f"{kind}_lambda_b") for path in paths}
    rows = pairs.shape(paths[0], f"{kind}_lambda_d", 1)[0]
    rank, most = rows // times, [max(column) for column in zip(*dims.values(), strict=True)]
    shared_a, shared_b = _projections(pairs, kind, (rows, most[0]), (most[1], rank))
    for path, (in_dim, out_dim) in dims.items():
        d, b = pairs.read(path, f"{kind}_lambda_d"), pairs.read(path, f"{kind}_lambda_b")
        if d.shape != (rows,):
            raise AdapterInvalidError(f"{path} has {len(d)} numbers in {kind}_lambda_d, {paths[0]} {rows}")
        pairs.check_rank(path, rank)
        pairs.add_shared(path, shared_a[:rank, :in_dim], shared_b[:out_dim], b, d[:rank])
    return pairs.form()


def _dims(pairs: Pairs, path: str, part: str) -> tuple[int, int]:
    """Inputs and outputs of a module: before anything of these sizes is made."""
    in_dim, (out_dim,), module = pairs.in_dim(path), pairs.shape(path, part, 1), pairs.module(path)
    if module is not None and module.experts == 1 and out_dim != module.out_dim:
        raise AdapterInvalidError(
            f"{path} has {out_dim} numbers in {part}, {module.name} of this model has {module.out_dim} "
            "outputs: the adapter was made for another model"
        )
    return in_dim, out_dim


def _projections(
    pairs: Pairs, kind: str, of_a: tuple[int, int], of_b: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of these shapes, or larger in inputs and outputs, from the file, or as PEFT draws them."""
    if pairs.files.settings.get("save_projection", True):
        a, b = pairs.read(ROOT, f"{kind}_A"), pairs.read(ROOT, f"{kind}_B")
    else:
        pairs.files.options.bounds.check_rank(of_b[1])
        pairs.files.options.bounds.check_elements(math.prod(of_a) + math.prod(of_b))
        a, b = _draw(pairs, of_a, of_b)
    fit = a.ndim == b.ndim == 2 and len(a) == of_a[0] and b.shape[1] == of_b[1]
    if not fit or a.shape[1] < of_a[1] or len(b) < of_b[0]:
        raise AdapterInvalidError(
            f"{kind}_A {a.shape} and {kind}_B {b.shape} do not fit modules that need {of_a} and {of_b}: the "
            "adapter was made for another model"
        )
    return a, b


def _draw(pairs: Pairs, *shapes: tuple[int, int]) -> list[np.ndarray]:
    import torch

    key = pairs.files.settings.get("projection_prng_key", 0)
    if type(key) is not int or not -(2**63) <= key < 2**63:
        raise AdapterInvalidError(f"{CONFIG}: projection_prng_key must be an integer of 64 bits")
    generator = torch.Generator(device="cpu").manual_seed(key)
    made = []
    for shape in shapes:
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
        made.append(
            torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator).numpy()
        )
    return made

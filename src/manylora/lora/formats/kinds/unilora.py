"""UniLoRA: each number of A and B is one of a few, chosen at random, times a scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.order import in_model_order
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG

ROOT, NUMBERS = "base_model", "unilora_theta_d"
PARTS = [f"unilora_{what}_{side}" for side in "AB" for what in ("indices", "scales")]


def read_unilora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, (*PARTS, NUMBERS))
    numbers = pairs.read(ROOT, NUMBERS)
    if numbers.ndim != 1 or not numbers.size:
        raise AdapterInvalidError(f"{NUMBERS} has shape {numbers.shape}, one dimension is expected")
    pairs.check_count(NUMBERS, "theta_d_length", len(numbers))
    paths = list(pairs.paths(*PARTS))
    if not paths:
        return _drawn(pairs, numbers)
    for path in paths:
        (rank, in_dim), (out_dim, _) = (pairs.shape(path, f"unilora_indices_{side}") for side in "AB")
        pairs.check_rank(path, rank)

        def make(path: str = path) -> tuple[np.ndarray, np.ndarray]:
            a, b = (_side(pairs, path, side, numbers) for side in "AB")
            return a, b

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _side(pairs: Pairs, path: str, side: str, numbers: np.ndarray) -> np.ndarray:
    chosen = pairs.integers(path, f"unilora_indices_{side}", len(numbers))
    scales = pairs.read(path, f"unilora_scales_{side}")
    if scales.shape != chosen.shape:
        raise AdapterInvalidError(f"{path}: indices and scales of {side} do not fit together")
    return numbers[chosen] * scales


def _drawn(pairs: Pairs, numbers: np.ndarray) -> LoraForm:
    """Without the choices in the file: as PEFT draws them, for all modules of the model that it adapts."""
    rank, seed = pairs.count("r", 4), pairs.files.settings.get("proj_seed", 42)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise AdapterInvalidError(f"{CONFIG}: proj_seed must be a positive integer")
    dims = {}
    for path in in_model_order(_targets(pairs)):
        module = pairs.module(path)
        if module is None or module.experts > 1:
            raise AdapterInvalidError(f"{path} is not a linear layer that adapters of this model may have")
        dims[path] = module.in_dim, module.out_dim
    total = sum(rank * (in_dim + out_dim) for in_dim, out_dim in dims.values())
    pairs.files.options.bounds.check_rank(rank)
    pairs.files.options.bounds.check_elements(total)
    chosen = _choices(total, len(numbers), seed)
    counts = np.bincount(chosen, minlength=len(numbers)).astype(np.float32)
    scaled = numbers / np.sqrt(np.maximum(counts, 1))
    at = 0
    for path, (in_dim, out_dim) in dims.items():
        a = scaled[chosen[at : at + rank * in_dim]].reshape(rank, in_dim)
        at += rank * in_dim
        b = scaled[chosen[at : at + out_dim * rank]].reshape(out_dim, rank)
        at += out_dim * rank
        pairs.add(path, rank, in_dim, out_dim, partial(tuple, (a, b)))
    return pairs.form()


def _choices(total: int, count: int, seed: int) -> np.ndarray:
    """Each of `count` numbers as often as the others, or once more."""
    random = np.random.default_rng(seed)
    chosen = np.repeat(np.arange(count), total // count)
    if rest := total % count:
        chosen = np.concatenate([chosen, random.choice(count, size=rest, replace=False)])
    random.shuffle(chosen)
    return chosen


def _targets(pairs: Pairs) -> Iterator[str]:
    """The paths of the modules that target_modules names in the base."""
    settings, base = pairs.files.settings, pairs.files.base
    names, layers = settings.get("target_modules") or [], settings.get("layers_to_transform")
    plain = (
        isinstance(names, list) and names and all(isinstance(name, str) and "." not in name for name in names)
    )
    if base is None or not plain or layers is not None or settings.get("exclude_modules"):
        raise AdapterInvalidError(
            "which of its numbers an UNILORA adapter takes where depends on all modules of the base: save it "
            "with save_indices=True, or name the base with --base and have target_modules be a list of names"
        )
    for name in base.names():
        path, _, part = name.rpartition(".")
        if part == "weight" and path.rpartition(".")[2] in names:
            yield f"base_model.model.{path}"

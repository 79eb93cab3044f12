"""TinyLoRA: B R A, with A and B of the base's weights and R a mix of random matrices by a few numbers, which
modules may share."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.order import in_model_order
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG
from manylora.lora.formats.tensor_files import decode

NUMBERS = re.compile(r"base_model\.tinylora_v\.(\d{1,6})")


def read_tinylora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    found = {int(m[1]): key for key in files.tensors if (m := NUMBERS.fullmatch(key))}
    rest = {key: tensor for key, tensor in files.tensors.items() if not NUMBERS.fullmatch(key)}
    pairs = Pairs(replace(files, tensors=rest), ("tinylora_A", "tinylora_B", "tinylora_P"))
    groups = _groups(pairs, list(pairs.paths("tinylora_A", "tinylora_B")))
    for place, (path, group) in enumerate(groups.items()):
        (rank, in_dim), (out_dim, _) = pairs.shape(path, "tinylora_A"), pairs.shape(path, "tinylora_B")
        pairs.check_rank(path, rank)
        if group not in found:
            raise AdapterInvalidError(f"the adapter is missing tinylora_v.{group}, which {path} takes")
        numbers = decode(found[group], files.tensors[found[group]])

        def make(
            path: str = path, place: int = place, rank: int = rank, numbers: np.ndarray = numbers
        ) -> tuple[np.ndarray, np.ndarray]:
            random = _random(pairs, path, place, len(numbers), rank)
            if random.shape != (*numbers.shape, rank, rank):
                raise AdapterInvalidError(f"{path}.tinylora_P has shape {random.shape}, which does not fit")
            mixed = np.tensordot(numbers, random, 1)
            return mixed @ pairs.read(path, "tinylora_A"), pairs.read(path, "tinylora_B")

        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _groups(pairs: Pairs, paths: list[str]) -> dict[str, int]:
    """Which numbers each module takes, in the model's order."""
    tied, count = pairs.number("weight_tying", 0.0), len(paths)
    if not 0 <= tied <= 1:
        raise AdapterInvalidError(f"{CONFIG}: weight_tying must be from 0 to 1")
    groups = max(1, round(count * (1 - tied)))
    size = max(1, count // groups)
    return {path: min(at // size, groups - 1) for at, path in enumerate(in_model_order(paths))}


def _random(pairs: Pairs, path: str, place: int, numbers: int, rank: int) -> np.ndarray:
    """[numbers, rank, rank], from the file, or as PEFT draws them."""
    import torch

    if pairs.has(path, "tinylora_P"):
        return pairs.read(path, "tinylora_P")
    pairs.files.options.bounds.check_elements(numbers * rank * rank)
    seed = pairs.files.settings.get("projection_seed", 42)
    if type(seed) is not int or not -(2**62) <= seed < 2**62:
        raise AdapterInvalidError(f"{CONFIG}: projection_seed must be an integer of 62 bits")
    generator = torch.Generator().manual_seed(seed + place)
    drawn = torch.normal(0.0, 1.0 / rank**0.5, (numbers, rank, rank), generator=generator)
    return drawn.numpy()

"""VB-LoRA: A and B are made of pieces, each a mix of a few vectors of a bank."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs

ROOT, BANK = "base_model", "vblora_vector_bank"
SIDES = ("vblora_logits_A", "vblora_logits_B")


def read_vblora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    saved = [f"{side}_topk_{what}" for side in SIDES for what in ("indices", "weights")]
    pairs = Pairs(files, (*SIDES, *saved, BANK))
    bank = pairs.read(ROOT, BANK)
    if bank.ndim != 2 or 0 in bank.shape:
        raise AdapterInvalidError(f"{BANK} has shape {bank.shape}, vectors and their length are expected")
    pairs.check_count(BANK, "num_vectors", bank.shape[0])
    pairs.check_count(BANK, "vector_length", bank.shape[1])
    topk = pairs.count("topk", 2)
    if topk > len(bank):
        raise AdapterInvalidError(f"topk is {topk}, and {BANK} has {len(bank)} vectors")
    for path in pairs.paths(*SIDES, *saved):
        (rank, inputs, _), (outputs, other, _) = (_shape(pairs, path, side) for side in SIDES)
        if rank != other:
            raise AdapterInvalidError(f"{path} has rank {rank} in A and {other} in B")
        pairs.check_rank(path, rank)

        def make(path: str = path, rank: int = rank) -> tuple[np.ndarray, np.ndarray]:
            a, b = (_mix(pairs, path, side, bank, topk) for side in SIDES)
            return a.reshape(rank, -1), b.transpose(0, 2, 1).reshape(-1, rank)

        length = bank.shape[1]
        pairs.add(path, rank, inputs * length, outputs * length, make)
    return pairs.form()


def _shape(pairs: Pairs, path: str, side: str) -> tuple[int, ...]:
    return pairs.shape(path, side if pairs.has(path, side) else f"{side}_topk_indices", 3)


def _mix(pairs: Pairs, path: str, side: str, bank: np.ndarray, topk: int) -> np.ndarray:
    """[.., .., length]; one piece of a vector's length for each set of logits."""
    if pairs.has(path, side):
        logits = pairs.read(path, side)
        if logits.shape[2] != len(bank):
            raise AdapterInvalidError(f"{path}.{side} has {logits.shape[2]} logits for {len(bank)} vectors")
        chosen = np.argsort(-logits, axis=2, kind="stable")[:, :, :topk]
        high = np.take_along_axis(logits, chosen, 2)
        weights = np.exp(high - high[:, :, :1])
        weights /= weights.sum(2, keepdims=True)
    else:
        chosen = pairs.integers(path, f"{side}_topk_indices", len(bank))
        saved = pairs.read(path, f"{side}_topk_weights") if topk > 1 else np.zeros((*chosen.shape[:2], 0))
        if chosen.shape[2] != topk or saved.shape != (*chosen.shape[:2], topk - 1):
            raise AdapterInvalidError(f"{path}.{side} does not have {topk} vectors for each piece")
        weights = np.concatenate((saved, 1 - saved.sum(2, keepdims=True)), axis=2).astype(np.float32)
    made = np.zeros((*chosen.shape[:2], bank.shape[1]), np.float32)
    for place in range(topk):
        made += weights[:, :, place, None] * bank[chosen[:, :, place]]
    return made

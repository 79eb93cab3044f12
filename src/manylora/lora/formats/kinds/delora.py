"""DeLoRA: B diag(lambda / (r |A_i| |B_i|)) A diag(w); w, the norms of the base's columns, is in the file."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs

LEAST_NORM = np.float32(1e-4)  # as PEFT clamps them


def read_delora(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
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

"""MiSS: inputs are summed in steps of r, then multiplied with one matrix [r, out]."""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG


def read_miss(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    pairs = Pairs(files, ("miss_block",))
    variant = files.settings.get("init_weights", True)
    if variant == "bat":
        raise AdapterInvalidError(
            f"{CONFIG} sets init_weights to bat: this kind of MISS multiplies the base's weights, so it "
            "has no low-rank form and is not served; merge it into the base with PEFT"
        )
    for path in pairs.paths("miss_block"):
        rank, columns = pairs.shape(path, "miss_block")
        pairs.check_rank(path, rank)
        if variant == "mini":
            pairs.check_count(path, "mini_r", columns)
        module, in_dim = pairs.module(path), pairs.in_dim(path)
        out_dim = module.out_dim if module is not None and variant == "mini" else columns
        if out_dim % columns:
            raise AdapterInvalidError(
                f"{path}: {columns} columns of miss_block do not divide {out_dim} outputs"
            )
        sums = (np.arange(in_dim) % rank == np.arange(rank)[:, None]).astype(np.float32)

        def make(
            path: str = path, sums: np.ndarray = sums, times: int = out_dim // columns, columns: int = columns
        ) -> tuple[np.ndarray, np.ndarray]:
            block = pairs.read(path, "miss_block")
            if columns < len(block):  # of a smaller rank this way
                return block.T @ sums, np.tile(np.eye(columns, dtype=np.float32), (times, 1))
            return sums, np.tile(block.T, (times, 1))

        pairs.add(path, min(rank, columns), in_dim, out_dim, make)
    return pairs.form()

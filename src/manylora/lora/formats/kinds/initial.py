"""LoRAs whose start was taken out of the base's weights: PiSSA, OLoRA, KaSA.

Training began with W - C in place of W, so the adapter is B A - C, of which C, of the same rank, is computed
from W again. The product is the same however a library signs its factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import CONFIG, config_of, initial_kind

if TYPE_CHECKING:
    from torch import Tensor


def with_initial(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
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

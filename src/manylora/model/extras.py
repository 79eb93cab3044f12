"""Applies the extras of adapters (biases, norms, embedding, head) to their rows of a batch.

`manylora.lora.extras` lists their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from manylora.kernels.extras import Extra, ExtraSegment
from manylora.kernels.spec import LoraTarget
from manylora.lora.modules import MODULE_NAMES

Extras = Sequence[ExtraSegment]


def adapt_linear(y: Tensor, extras: Extras, layer: int, targets: Sequence[LoraTarget]) -> None:
    """Add trained biases to y [T, N], in place."""
    for segment in extras:
        for target in targets:
            extra = segment.values.get(f"layers.{layer}.{MODULE_NAMES[target.module_id]}.bias")
            if extra is not None:
                columns = slice(target.start, target.start + target.width)
                y[segment.start : segment.stop, columns] += extra.vector(y.dtype)


def adapt_norm(
    y: Tensor, x: Tensor, extras: Extras, name: str, renormalise: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the norm's weight by a trained one, and add trained biases. y = norm(x), changed in place.

    renormalise: the norm of x with another weight, float32, in the checkpoint's convention.
    """
    for segment in extras:
        rows = slice(segment.start, segment.stop)
        weight, bias = (segment.values.get(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is not None:
            y[rows] = renormalise(x[rows], weight.vector(torch.float32))
        if bias is not None:
            y[rows] += bias.vector(y.dtype)


def adapt_embedding(x: Tensor, ids: Tensor, extras: Extras, name: str = "embed") -> None:
    """x [T, hidden]: the embeddings of ids [T], not scaled yet; changed in place.

    name: of the table in extras: `embed`, or `encoder.embed` and `decoder.embed`. These two share the rows
    that are trained for some tokens, `embed.tokens`.
    """
    for segment in extras:
        rows, values = slice(segment.start, segment.stop), segment.values
        tokens, mine = ids[rows], x[rows]
        if f"{name}.weight" in values:
            mine.copy_(values[f"{name}.weight"].gather(tokens, x.dtype))
        trained = values.get(f"{name}.tokens", values.get("embed.tokens"))
        if trained is not None:
            mine.copy_(_with_tokens(mine, tokens, trained))
        if f"{name}.lora_A" in values:
            low = values[f"{name}.lora_A"].gather(tokens, x.dtype)
            mine += values[f"{name}.lora_B"].linear(low)
        if f"{name}.magnitude" in values:
            mine *= values[f"{name}.magnitude"].vector(x.dtype)


def adapt_head(logits: Tensor, x: Tensor, extras: Extras, bias: Tensor | None, tied: bool) -> None:
    """logits [L, vocab] float32 of x [L, hidden]; changed in place. bias: the base's.

    tied: the head is the embedding, so rows of the embedding that are trained for some tokens count here too.
    """
    for segment in extras:
        values = segment.values
        trained = values.get("head.tokens", values.get("embed.tokens") if tied else None)
        if trained is None and not any(name.startswith("head.") for name in values):
            continue
        mine = segment.logits
        logits[mine] = _head(logits[mine], x[mine], values, trained, bias)


def _head(
    y: Tensor, x: Tensor, values: Mapping[str, Extra], trained: Extra | None, bias: Tensor | None
) -> Tensor:
    shift = 0 if bias is None else bias.float()
    if "head.weight" in values:
        y = values["head.weight"].linear(x).float() + shift
    if trained is not None:
        assert trained.token_ids is not None
        mine = trained.token_ids
        y[:, mine] = trained.linear(x).float() + (0 if bias is None else bias.float()[mine])
    if "head.lora_A" in values:
        y = y + values["head.lora_B"].linear(values["head.lora_A"].linear(x)).float()
    if "head.magnitude" in values:
        y = (y - shift) * values["head.magnitude"].vector(y.dtype) + shift
    if "head.bias" in values:
        y = y + values["head.bias"].vector(y.dtype)
    return y


def _with_tokens(x: Tensor, ids: Tensor, trained: Extra) -> Tensor:
    """x with the rows of trained tokens replaced."""
    known = trained.token_ids
    assert known is not None
    number = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return torch.where((known[number] == ids).unsqueeze(1), trained.gather(number, x.dtype), x)

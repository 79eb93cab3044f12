"""Applies the extras of adapters, as named in `manylora.adapters.extras`, to their rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manylora.adapters.modules import MODULE_NAMES
from manylora.kernels.spec import Extra, ExtraSegment, LoraTarget

Extras = Sequence[ExtraSegment]


def changed_inputs(x: Tensor, extras: Extras, layer: int, targets: Sequence[LoraTarget]) -> Tensor:
    """x [T, K] after adapters' input scales and rotations; x itself is not changed."""
    if len(targets) == 1:
        for rows, _, mine in _inputs(x, extras, layer, targets):
            x = x.clone()
            x[rows] = mine
    return x


def adapt_inputs(
    y: Tensor,
    x: Tensor,
    extras: Extras,
    layer: int,
    targets: Sequence[LoraTarget],
    linear: Callable[[Tensor], Tensor],
) -> None:
    """Recompute y [T, N] = linear(x), in place, for rows and columns whose module has another input."""
    if len(targets) > 1:
        for rows, target, mine in _inputs(x, extras, layer, targets):
            y[rows, _columns(target)] = linear(mine)[:, _columns(target)]


def _inputs(
    x: Tensor, extras: Extras, layer: int, targets: Sequence[LoraTarget]
) -> Iterator[tuple[slice, LoraTarget, Tensor]]:
    """Rows of x that an adapter scales or rotates, for which module, and their new values."""
    for segment in extras:
        for target in targets:
            name = f"layers.{layer}.{MODULE_NAMES[target.module_id]}"
            scale, turn = (segment.values.get(f"{name}.{part}") for part in ("input_scale", "input_turn"))
            if scale is None and turn is None:
                continue
            rows = slice(segment.start, segment.stop)
            mine = x[rows] if scale is None else x[rows] * scale.vector(x.dtype)
            if turn is not None:
                blocks = turn.vector(x.dtype).view(-1, turn.columns, turn.columns)
                mine = (mine.unflatten(-1, (-1, 1, turn.columns)) @ blocks).flatten(-3)
            yield rows, target, mine


def adapt_linear(y: Tensor, extras: Extras, layer: int, targets: Sequence[LoraTarget]) -> None:
    """Scale and rotate y [T, N], then add trained biases, in place."""
    for segment in extras:
        for target in targets:
            name = f"layers.{layer}.{MODULE_NAMES[target.module_id]}"
            scale, turn, bias = (segment.values.get(f"{name}.{part}") for part in ("scale", "turn", "bias"))
            if scale is None and bias is None:
                continue
            mine = y[segment.start : segment.stop, _columns(target)]
            if scale is not None:
                scaled = mine * scale.vector(y.dtype)
                if turn is not None:  # the halves of each group are swapped, and the first is negated
                    first, second = mine.unflatten(-1, (-1, 2, turn.columns // 2)).unbind(-2)
                    turned = torch.stack((-second, first), dim=-2).flatten(-3)
                    scaled = scaled + turned * turn.vector(y.dtype)
                mine.copy_(scaled)
            if bias is not None:
                mine += bias.vector(y.dtype)


def _columns(target: LoraTarget) -> slice:
    return slice(target.start, target.start + target.width)


def adapt_norm(
    y: Tensor, x: Tensor, extras: Extras, name: str, renormalise: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the norm's weight by a trained one, and add trained biases, in y = norm(x). renormalise: the
    norm of x with another weight, float32, in the checkpoint's convention.
    """
    for segment in extras:
        rows = slice(segment.start, segment.stop)
        weight, bias = (segment.values.get(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is not None:
            y[rows] = renormalise(x[rows], weight.vector(torch.float32))
        if bias is not None:
            y[rows] += bias.vector(y.dtype)


def adapt_prompt(x: Tensor, extras: Extras, scale: Tensor | None) -> None:
    """Write embeddings of virtual tokens to x [T, hidden], in place. scale: factor on them; None: 1."""
    for segment in extras:
        prompt = segment.values.get("prompt.weight")
        if prompt is not None and segment.virtual is not None:
            rows, numbers = segment.virtual
            vectors = prompt.gather(numbers, x.dtype)
            x[rows] = vectors if scale is None else vectors * scale


def prefixes(
    extras: Extras, layer: int, heads: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows [V] whose keys and values come from an adapter, with these, [V, heads, head_dim]."""
    for segment in extras:
        keys, values = (segment.values.get(f"layers.{layer}.prefix.{part}") for part in ("keys", "values"))
        if keys is not None and values is not None and segment.virtual is not None:
            rows, numbers = segment.virtual
            k, v = (one.gather(numbers, dtype).unflatten(-1, (heads, -1)) for one in (keys, values))
            yield rows, k, v


def adapt_embedding(x: Tensor, ids: Tensor, extras: Extras, name: str = "embed") -> None:
    """x [T, hidden]: embeddings of ids [T], not scaled yet; changed in place. name: of the table in extras;
    `encoder.embed` and `decoder.embed` share the rows trained for some tokens, `embed.tokens`.
    """
    for segment in extras:
        rows, values = slice(segment.start, segment.stop), segment.values
        tokens, mine = ids[rows], x[rows]
        if f"{name}.weight" in values:
            mine.copy_(values[f"{name}.weight"].gather(tokens, x.dtype))
        trained = values.get(f"{name}.tokens", values.get("embed.tokens"))
        if trained is not None:
            known = trained.token_ids
            assert known is not None
            number = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
            found = (known[number] == tokens).unsqueeze(1)
            mine.copy_(torch.where(found, trained.gather(number, x.dtype), mine))
        if f"{name}.lora_A" in values:
            low = values[f"{name}.lora_A"].gather(tokens, x.dtype)
            mine += values[f"{name}.lora_B"].linear(low)
        if f"{name}.magnitude" in values:
            mine *= values[f"{name}.magnitude"].vector(x.dtype)


def adapt_head(logits: Tensor, x: Tensor, extras: Extras, bias: Tensor | None, tied: bool) -> None:
    """logits [L, vocab] float32 of x [L, hidden]; changed in place. bias: the base model's. tied: embedding
    rows trained for some tokens apply here, too.
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

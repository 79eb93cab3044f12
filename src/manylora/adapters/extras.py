"""Extras: what an adapter may have besides its rows, their names, and where they are stored in its pages.

| name | shape | what it does for the adapter's rows |
|---|---|---|
| layers.N.MODULE.bias | [out] | added to the module's output |
| layers.N.MODULE.scale | [out] | multiplies the module's output, before the bias is added |
| layers.N.MODULE.turn | [out / g, g] | RoAd: factors for the partners of the scaled outputs, in groups of g |
| layers.N.MODULE.input_scale | [in] | multiplies the module's input |
| layers.N.MODULE.input_turn | [in, n] or [n, n] | OFT: multiplies inputs by blocks, shared or one each |
| layers.N.NORM.weight, norm.weight | [n] | replaces a norm's weight; NORM as in the checkpoint |
| layers.N.NORM.bias, norm.bias | [n] | added to a norm's output |
| prompt.weight | [tokens, hidden] | embeddings of virtual tokens before each prompt |
| layers.N.prefix.keys, .values | [tokens, kv_size] | their keys and values, as stored in the cache |
| embed.weight, head.weight | [vocab, hidden] | replaces the base model's |
| embed.tokens, head.tokens | [tokens, hidden] | replaces the rows of `token_ids` |
| embed.lora_A, embed.lora_B | [vocab, r], [hidden, r] | LoRA on the embedding |
| head.lora_A, head.lora_B | [r, hidden], [vocab, r] | LoRA on the head |
| embed.magnitude, head.magnitude | [hidden], [vocab] | DoRA's magnitude, normalised |
| head.bias | [vocab] | added to the logits |
| score.weight, score.bias | [labels, n], [labels] | a classification head, which replaces the base model's |
| score.dense.weight, score.dense.bias | [n, n], [n] | the layer before it, with tanh |
| invocation | [0] | activated LoRA: acts from the last occurrence of these `token_ids` in the prompt |

In an encoder-decoder model, layers are numbered through both stacks, the encoder's first. Names of extras
outside layers start with their stack: `encoder.norm`, `encoder.embedding_norm` (on the input of the first
layer) and `encoder.embed` with the parts above. Plain `embed.tokens` applies to both stacks and the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from manylora.adapters.geometry import CacheGeometry, ExtraPiece, ExtraPlace, Layout
from manylora.errors import AdapterInvalidError
from manylora.request import INVOCATION, MAX_INVOCATION, LoraExtra

HEAD = "score"
"""Prefix of the names of a classification head's parts."""
LAYER = re.compile(r"layers\.(\d+)\.")


def check_extras(extras: Iterable[LoraExtra], num_layers: int) -> None:
    """Raises AdapterInvalidError for extras of layers that the model lacks, or an invalid invocation."""
    prefixes = 0
    for extra in extras:
        if extra.name == INVOCATION:
            check_invocation(extra.token_ids, "lora_invocation_tokens")
        found = LAYER.match(extra.name)
        if found and int(found[1]) >= num_layers:
            raise AdapterInvalidError(f"{extra.name}: the model has {num_layers} layers")
        prefixes += extra.name.endswith(".prefix.keys")
    if prefixes not in (0, num_layers):
        raise AdapterInvalidError(
            f"its keys and values are for {prefixes} of the model's {num_layers} layers"
        )


def check_invocation(token_ids: Sequence[int], name: str) -> tuple[int, ...]:
    """The token ids of an activated LoRA. name: of the setting. Raises AdapterInvalidError."""
    if not 0 < len(token_ids) <= MAX_INVOCATION:
        raise AdapterInvalidError(
            f"{name} must have 1 to {MAX_INVOCATION} token ids, got {len(token_ids)}: leave it out for an "
            "adapter that acts on every token"
        )
    if not all(type(i) is int and 0 <= i < 2**31 for i in token_ids):
        raise AdapterInvalidError(f"{name} must be a list of token ids, which are numbers from 0 on")
    return tuple(token_ids)


def take_invocation(found: Iterable[int], into: list[int] | None) -> None:
    """Pass on the invocation tokens of an activated LoRA. found: empty for other adapters. into: a list that
    receives them; None: such adapters are refused. Raises AdapterInvalidError."""
    found = list(found)
    if found and into is None:
        raise AdapterInvalidError(
            "it is an activated LoRA, which acts from its invocation tokens on, and these have no place "
            "here: use its folder, or the .npy files that manylora convert writes"
        )
    if into is not None:
        into += found


def with_extras(layout: Layout, extras: Iterable[LoraExtra], geometry: CacheGeometry) -> Layout:
    """The same layout with extras after the rows. Like rows, they take whole slots; one that does not fit the
    rest of a page continues over as many as it needs. Raises AdapterInvalidError if one row of it is larger
    than a page.
    """
    used, places = list(layout.used_slots), []
    for extra in extras:
        rows, columns = extra.values.shape if extra.values.ndim == 2 else (extra.values.size, 1)
        step = geometry.page_elements // columns
        if step == 0:
            raise AdapterInvalidError(
                f"{extra.name} has rows of {columns} values, a page of the LoRA cache has "
                f"{geometry.page_elements}; serve with a larger lora_cache_max_adapter_size"
            )
        pieces = []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            slots = -(-count * columns // geometry.page_width)
            if used[-1] + slots > geometry.slots_per_page:
                used.append(0)
            pieces.append(ExtraPiece(len(used) - 1, used[-1], count))
            used[-1] += slots
        places.append(ExtraPlace(extra.name, columns, tuple(pieces), extra.values.ndim == 2, extra.token_ids))
    return replace(layout, used_slots=tuple(used), extras=tuple(places))

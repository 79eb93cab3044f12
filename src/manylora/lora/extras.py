"""Extras: what an adapter may hold beside its rows, how they are called, and where they lie in its pages.

| name | shape | what it does for the adapter's rows |
|---|---|---|
| layers.N.MODULE.bias | [out] | added to what the module gives |
| layers.N.MODULE.scale | [out] | multiplies what the module gives, before the bias is added |
| layers.N.MODULE.turn | [out / g, g] | RoAd: beside the scaled outputs, their partners in groups of g |
| layers.N.MODULE.input_scale | [in] | multiplies what the module takes |
| layers.N.MODULE.input_turn | [in, n] or [n, n] | OFT: inputs times blocks, one for all or each its own |
| layers.N.NORM.weight, norm.weight | [n] | in place of a norm's weight; NORM as the checkpoint names it |
| layers.N.NORM.bias, norm.bias | [n] | added to what a norm gives |
| prompt.weight | [tokens, hidden] | embeddings of virtual tokens before each prompt |
| layers.N.prefix.keys, .values | [tokens, kv_size] | keys and values of such tokens, as the cache has them |
| embed.weight, head.weight | [vocab, hidden] | in place of the base's |
| embed.tokens, head.tokens | [tokens, hidden] | in place of the rows of `token_ids` |
| embed.lora_A, embed.lora_B | [vocab, r], [hidden, r] | LoRA on the embedding |
| head.lora_A, head.lora_B | [r, hidden], [vocab, r] | LoRA on the head |
| embed.magnitude, head.magnitude | [hidden], [vocab] | DoRA's, normalised |
| head.bias | [vocab] | added to the logits |
| score.weight, score.bias | [labels, n], [labels] | a classification head, in place of the base's |
| score.dense.weight, score.dense.bias | [n, n], [n] | the layer before it, with tanh |
| invocation | [0] | the adapter acts from the last of these `token_ids` in the prompt on: activated LoRA |

Of an encoder-decoder model layers are numbered through both stacks, the encoder's first. What is outside
layers begins with its stack's name: `encoder.norm`, `encoder.embedding_norm` (on what goes into the first
layer), `encoder.embed`, with the parts above; `embed.tokens` alone is for both stacks and the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from manylora.errors import AdapterInvalidError
from manylora.lora.geometry import CacheGeometry, ExtraPiece, ExtraPlace, Layout
from manylora.request import INVOCATION, MAX_INVOCATION, LoraExtra

HEAD = "score"
"""What the names of a classification head's parts begin with."""
LAYER = re.compile(r"layers\.(\d+)\.")


def check_extras(extras: Iterable[LoraExtra], num_layers: int) -> None:
    """Raises AdapterInvalidError for an extra of a layer that the model does not have, and for an invocation
    sequence that is none."""
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


def is_virtual(name: str) -> bool:
    """Whether an extra counts for virtual tokens alone."""
    return name == "prompt.weight" or ".prefix." in name


def num_virtual(layout: Layout) -> int:
    """Virtual tokens before each prompt of the adapter that lies so."""
    return max((sum(p.rows for p in one.pieces) for one in layout.extras if is_virtual(one.name)), default=0)


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


def with_extras(layout: Layout, extras: Iterable[LoraExtra], geometry: CacheGeometry) -> Layout:
    """The same layout with extras behind the rows, which take whole slots like rows.

    An extra that does not fit what is left of a page starts on a page of its own, and goes on over as many
    as it needs. Raises AdapterInvalidError for one whose columns alone are more than a page.
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

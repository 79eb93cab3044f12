"""Which adapter a request asks for, as far as the front can see. Does not need Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manylora.lora.catalog.names import LATEST, Aliases


def asked_adapter(fields: Mapping[str, Any], bases: Sequence[str], aliases: Aliases) -> str | None:
    """The adapter's name; None: the base model. For a mix the first adapter, so that equal mixes go to one
    replica.

    fields: of the body, not validated. A wrong guess only costs a cold load.
    """
    lora, request = fields.get("lora"), fields.get("lora_request")
    named = [fields.get(name) for name in ("lora_model", "adapter_id", "lora_path")]
    named.append(request.get("lora_name") if isinstance(request, dict) else None)
    first = lora[0] if isinstance(lora, list) and lora else None
    named.append(first.get("name") if isinstance(first, dict) else None)
    name = _first_name([*named, fields.get("model")], bases)
    meant = None if name is None else aliases.resolve(name)
    return None if meant in bases else meant


def _first_name(named: Sequence[Any], bases: Sequence[str]) -> str | None:
    for one in named:
        if not isinstance(one, str) or not one:
            continue
        name = one.removesuffix(LATEST)
        base = next((base for base in bases if name == base or name.startswith(base + ":")), None)
        name = name if base is None else name[len(base) + 1 :]
        return name.partition("+")[0] or None  # adapter names never contain a +
    return None

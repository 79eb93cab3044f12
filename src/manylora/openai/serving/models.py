"""The JSON of /v1/models: the base model and the adapters."""

from __future__ import annotations

from typing import Any

from manylora.lora.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from manylora.openai.api.schema import CompletionRequest
from manylora.openai.serving.adapter_entry import AdapterEntry
from manylora.stats import EngineStats

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # always shown


def base_card(
    name: str, base: str, created: int, max_seq_len: int, defaults: GenerationDefaults
) -> dict[str, Any]:
    """name: one of the base model's names; base: the first of them."""
    card = _card(name, created, base, None) | {"max_model_len": max_seq_len}
    return card | {"default_sampling_params": _in_force(defaults)}


def adapter_card(
    entry: AdapterEntry,
    base: str,
    created: int,
    tier: str,
    defaults: GenerationDefaults,
    *,
    pinned: bool = False,
) -> dict[str, Any]:
    """rank, digest and sizes are null until the adapter's files have been read. defaults: the base model's;
    they are shown where the adapter has some of its own.
    """
    version, facts = entry.version, entry.version and entry.version.facts
    card = _card(entry.name, version.created if version else created, entry.name, base) | {
        "rank": facts and facts.rank,
        "dtype": facts and facts.dtype,
        "format": facts and facts.kind,
        "digest": version and version.digest,
        "version": version and version.number,
        "bytes": facts and facts.num_bytes,
        "notes": list(facts.notes) if facts else [],
        **({"labels": facts.labels} if facts and facts.labels else {}),
        "tier": tier,
    }
    card |= {"owned_by": entry.terms.owner or card["owned_by"], "pinned": pinned}
    if entry.terms.idle_ttl_seconds is not None:
        card["idle_ttl_seconds"] = entry.terms.idle_ttl_seconds
    if version is not None and version.text is not None and version.text.defaults != NO_DEFAULTS:
        card["default_sampling_params"] = _in_force(version.text.defaults.over(defaults))
    if entry.problem is not None:
        card["problem"] = {"code": entry.problem.code, "message": entry.problem.message}
    return card


def _in_force(defaults: GenerationDefaults) -> dict[str, Any]:
    """What a request gets that leaves these fields out."""
    usual = {name: CompletionRequest.model_fields[name].default for name in DEFAULTS}
    length = {} if defaults.max_tokens is None else {"max_tokens": defaults.max_tokens}
    return usual | dict(defaults.fields) | length


def _card(name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    common = {"id": name, "object": "model", "created": created, "owned_by": "manylora"}
    return common | {"root": root, "parent": parent}


def tiers(stats: EngineStats) -> dict[str, str]:
    """The level of each adapter in the cache, "device" or "host". All others are only on disk."""
    return {one.name: "device" if one.on_device else "host" for one in stats.adapters.residents}


def state_of(entry: AdapterEntry) -> str:
    """ "ready", "stale" (newer files are broken, the last good version is served), "broken" or "unread"."""
    if entry.version is not None:
        return "ready" if entry.problem is None else "stale"
    return "unread" if entry.problem is None else "broken"

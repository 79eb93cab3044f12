"""The JSON of /v1/models: the base model and the adapters."""

from __future__ import annotations

from typing import Any

from manylora.openai.serving.adapter_entry import AdapterEntry
from manylora.stats import EngineStats


def base_card(name: str, base: str, created: int, max_seq_len: int) -> dict[str, Any]:
    """name: one of the base model's names; base: the first of them."""
    return _card(name, created, base, None) | {"max_model_len": max_seq_len}


def adapter_card(
    entry: AdapterEntry, base: str, created: int, tier: str, *, pinned: bool = False
) -> dict[str, Any]:
    """rank, digest and sizes are null until the adapter's files have been read."""
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
    if entry.problem is not None:
        card["problem"] = {"code": entry.problem.code, "message": entry.problem.message}
    return card


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

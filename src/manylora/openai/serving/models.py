"""The JSON of /v1/models: the base model and the adapters."""

from __future__ import annotations

from typing import Any

from manylora.openai.serving.catalog import AdapterEntry
from manylora.stats import EngineStats


def base_card(name: str, base: str, created: int, max_seq_len: int) -> dict[str, Any]:
    """name: one of the base model's names; base: the first of them."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "manylora",
        "root": base,
        "parent": None,
        "max_model_len": max_seq_len,
    }


def adapter_card(entry: AdapterEntry, base: str, created: int, tier: str) -> dict[str, Any]:
    """rank, digest and sizes are null until the adapter's files have been read."""
    version = entry.version
    card: dict[str, Any] = {
        "id": entry.name,
        "object": "model",
        "created": version.created if version else created,
        "owned_by": "manylora",
        "root": entry.name,
        "parent": base,
        "rank": version.facts.rank if version else None,
        "dtype": version.facts.dtype if version else None,
        "format": version.facts.kind if version else None,
        "digest": version.digest if version else None,
        "bytes": version.facts.num_bytes if version else None,
        "tier": tier,
    }
    if entry.problem is not None:
        card["problem"] = {"code": entry.problem.code, "message": entry.problem.message}
    return card


def tiers(stats: EngineStats) -> dict[str, str]:
    """The level of each adapter in the cache, "device" or "host". All others are on disk."""
    return {one.name: "device" if one.on_device else "host" for one in stats.adapters.residents}


def state_of(entry: AdapterEntry) -> str:
    """ "ready", "stale" (newer files are broken, the last good version is served), "broken" or "unread"."""
    if entry.version is not None:
        return "ready" if entry.problem is None else "stale"
    return "unread" if entry.problem is None else "broken"

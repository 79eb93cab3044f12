"""CacheStatus: the JSON that the status page polls, about the adapter cache and recent throughput."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from typing import Any

from manylora.doors.http.serving.backend import Backend
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.metrics import POINT_S
from manylora.stats import CacheChange, CacheMap, MappedAdapter

logger = logging.getLogger("manylora")

MAP_MAX_AGE_S = 0.25  # several viewers share one map
MAX_ADAPTERS = 1000  # listed individually; the rest is one entry
REST = "rest"


class CacheStatus:
    """Belongs to its event loop. The engine builds a cache map only when a page asks for it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._id = secrets.token_hex(4)
        self._secret = secrets.token_bytes(16)
        self._map: CacheMap | None = None
        self._map_time = float("-inf")
        self._map_lock = asyncio.Lock()
        self._sampler = asyncio.create_task(self._sample())

    def close(self) -> None:
        self._sampler.cancel()

    async def snapshot(self, key: ApiKey, changes_after: int, points_after: int) -> dict[str, Any]:
        """The body of GET /v1/cache: what the key may see, and changes and points after the given numbers."""
        async with self._map_lock:
            if time.monotonic() - self._map_time > MAP_MAX_AGE_S:
                self._map = await self._backend.cache_map()
                self._map_time = time.monotonic()
            found = self._map
        history, stats = self._backend.history, self._backend.engine_stats()
        counts = stats.adapters
        last = found.changes[-1].number if found and found.changes else 0
        return {
            "object": "cache",
            "feed": self._id,  # changes at a restart, when numbers start again
            "mapped": found is not None,
            "page_bytes": counts.page_bytes,
            "levels": found
            and {"device": {"pages": found.device_pages}, "host": {"pages": found.host_pages}},
            "adapters": [] if found is None else self._adapters(found, key),
            "changes": [] if found is None else self._changes(found, key, changes_after),
            "last_change": changes_after if found is None else last,
            "counts": {
                "hits": counts.device_hits,
                "device_loads": counts.device_loads,
                "cold_loads": counts.host_stores,
                "device_evictions": counts.device_evictions,
                "host_evictions": counts.host_evictions,
            },
            "point_seconds": POINT_S,
            "points": history.points(points_after),
            "last_minute": history.summary(),
        }

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(POINT_S)
            try:
                self._backend.history.sample(self._backend.engine_stats())
            except Exception:
                logger.exception("the history of the last minutes lacks a point")

    def _adapters(self, found: CacheMap, key: ApiKey) -> list[dict[str, Any]]:
        """Adapters on the device first, then the most recently used."""
        latest = found.adapters[::-1]
        ordered = [*(one for one in latest if one.device), *(one for one in latest if not one.device)]
        listed = [(self._owner(one, key), [one]) for one in ordered[:MAX_ADAPTERS]]
        if rest := ordered[MAX_ADAPTERS:]:
            listed.append(({"id": REST, "name": None, "who": REST}, rest))
        return [
            {
                **owner,
                "host": [run for one in members for run in one.host],
                "device": [run for one in members for run in one.device],
                "in_use": sum(one.in_use for one in members),
                "hits": sum(one.hits for one in members),
            }
            for owner, members in listed
        ]

    def _changes(self, found: CacheMap, key: ApiKey, after: int) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "number": one.number,
                "age_s": round(max(0.0, now - one.at), 2),
                "level": one.level,
                "loaded": one.loaded,
                "pages": one.pages,
                **self._owner(one, key),
            }
            for one in found.changes
            if one.number > after
        ]

    def _owner(self, one: MappedAdapter | CacheChange, key: ApiKey) -> dict[str, Any]:
        """An opaque id, and the name if the key may see it. who: "former": content that no name refers to
        now.
        """
        owner_of = self._backend.catalog.owner_of
        name = next((name for name in one.names if key.may_see(name, owner_of(name))), None)
        who = "named" if name is not None else "former" if key.sees_all and not one.names else "hidden"
        # Depends on the key, so that different keys cannot compare ids.
        opaque = hashlib.blake2b(f"{key.name}\n{one.digest}".encode(), key=self._secret, digest_size=6)
        return {"id": opaque.hexdigest(), "name": name, "who": who}

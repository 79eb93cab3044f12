"""Pinning: keeps chosen adapters of the catalog in the engine's cache, whatever happens to their files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Protocol

from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.entry import AdapterEntry, CatalogError
from manylora.errors import AdapterCacheFullError, AdapterNotCachedError, EngineDeadError, RequestError
from manylora.system.threads import Repeated

logger = logging.getLogger("manylora")

ATTEMPTS = 3  # the adapter may be evicted between its load and its pin
ANSWER_S = 60.0  # the engine may be in a step with a long prompt
CHECK_S = 1.0


class EnginePins(Protocol):
    """Pins adapters in the engine's cache."""

    def pin(self, task_id: int) -> Future[None]:
        """Pin an adapter in the cache. Raises RequestError or EngineDeadError, as its result may."""
        ...

    def unpin(self, task_id: int) -> None: ...


class Pinning:
    """Belongs to the event loop. engine: None if pinning is not possible. load: loads an adapter to the cache
    by name, as a request would. following: follows the catalog while it runs.
    """

    def __init__(
        self, engine: EnginePins | None, catalog: AdapterCatalog, load: Callable[[str], Awaitable[None]]
    ) -> None:
        self._engine, self._catalog, self._load = engine, catalog, load
        self._pinned: dict[str, int] = {}  # name -> task id of the pinned version
        self._told: dict[str, str] = {}  # name -> reason of a failed pin that was logged
        self._lock = asyncio.Lock()
        self.following = Repeated(self.follow, CHECK_S, "pinning adapters")

    def __len__(self) -> int:
        return len(self._pinned)

    def is_pinned(self, name: str) -> bool:
        return name in self._pinned

    def problem(self, name: str) -> str:
        """Why an adapter that should be pinned is not. "": it is, or that was not tried yet."""
        return self._told.get(name, "")

    async def pin(self, name: str) -> None:
        """Pin an adapter in the cache. Raises RequestError if that fails."""
        async with self._lock:
            entry = self._catalog.entry(name)
            entry.terms.pinned = True
            try:
                await self._bring(entry)
            except RequestError:
                entry.terms.pinned = False
                raise

    async def unpin(self, name: str) -> None:
        """Raises CatalogError if there is no adapter of this name."""
        self._catalog.entry(name).terms.pinned = False
        await self.follow()

    async def follow(self) -> None:
        """Pin what the catalog wants pinned, in the version that it serves, and unpin everything else."""
        async with self._lock:
            wanted = {entry.name: entry for entry in self._catalog.entries() if entry.terms.pinned}
            for name in self._pinned.keys() - wanted.keys():
                self._let_go(name)
            for name, entry in wanted.items():
                try:
                    await self._bring(entry)
                except RequestError as error:
                    if self._told.get(name) != str(error):
                        logger.error("%s", error)
                    self._told[name] = str(error)

    async def _bring(self, entry: AdapterEntry) -> None:
        name = entry.name
        if self._engine is None:
            reason = f"adapter {name!r} cannot be pinned: its cache is Triton's"
            raise CatalogError("unsupported_field", reason, "pinned")
        if entry.version is not None and self._pinned.get(name) == entry.version.task_id:
            return
        problem: Exception
        for _ in range(ATTEMPTS):
            await self._load(name)
            version = await self._catalog.version(name)
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._engine.pin(version.task_id)), ANSWER_S)
            except asyncio.TimeoutError:
                self._engine.unpin(version.task_id)
                problem = RequestError("the engine does not answer")
            except (RequestError, EngineDeadError) as error:
                problem = error
            else:
                self._let_go(name, but=version.task_id)
                self._pinned[name] = version.task_id
                self._told.pop(name, None)
                logger.info("adapter %s is pinned", name)
                return
            if not isinstance(problem, AdapterNotCachedError):
                break
        why = "the adapter cache is too busy, try again"
        if isinstance(problem, AdapterCacheFullError):
            raise CatalogError("no_room_to_pin", f"adapter {name!r} cannot be pinned: {problem}", "pinned")
        if not isinstance(problem, AdapterNotCachedError):
            why = str(problem)
        text = f"adapter {name!r} cannot be pinned: {why}"
        raise CatalogError("adapter_cache_busy", text, "pinned", retry_after=1)

    def _let_go(self, name: str, but: int | None = None) -> None:
        """Unpin the version of a name, unless another name has the same version pinned."""
        task_id = self._pinned.pop(name, None)
        if self._engine is None or task_id is None:
            return
        if task_id != but and task_id not in self._pinned.values():
            self._engine.unpin(task_id)

"""Pins: leases without a request, which keep adapters in the cache until they are unpinned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from manylora.errors import AdapterCacheFullError, AdapterError, AdapterNotCachedError
from manylora.lora.cache import AdapterCache
from manylora.lora.space import most_pages

if TYPE_CHECKING:
    from manylora.lora.lease import AdapterLease

logger = logging.getLogger("manylora")


class Pins:
    """Use on the engine's thread.

    acquire: returns a lease on the adapter of a task id, which is on the host. admit, release: the store's.
    largest: pages that must remain for others, so that every accepted adapter can still run.
    """

    def __init__(
        self,
        cache: AdapterCache,
        acquire: Callable[[int], AdapterLease],
        admit: Callable[[AdapterLease], bool],
        release: Callable[[AdapterLease], None],
        largest: Callable[[], int],
    ) -> None:
        self._cache, self._largest = cache, largest
        self._acquire, self._admit, self._release = acquire, admit, release
        self._leases: dict[int, AdapterLease] = {}

    def pin(self, task_id: int) -> None:
        """Keep the adapter of a task id on both levels from now on. Idempotent.

        Raises AdapterNotCachedError if it is not in the cache or cannot be loaded to the device now,
        AdapterCacheFullError if too little space would remain for others.
        """
        if task_id in self._leases:
            return
        lease = self._acquire(task_id)
        try:
            self._check_room(lease)
            if not self._admit(lease):
                raise AdapterNotCachedError(task_id)
        except BaseException:
            self._release(lease)
            raise
        self._leases[task_id] = lease
        self._count()

    def unpin(self, task_id: int) -> None:
        """Allow its eviction again. No effect if it is not pinned."""
        lease = self._leases.pop(task_id, None)
        if lease is not None:
            self._release(lease)
            self._count()

    def renew(self, task_id: int) -> None:
        """If a task id is pinned, pin what it means now. If that does not fit beside its old content, the old
        content stays pinned instead, which is logged.
        """
        old = self._leases.pop(task_id, None)
        if old is None:
            return
        self._count()
        try:
            self.pin(task_id)
        except AdapterError as error:
            logger.warning("lora task %d stays pinned in the version before: %s", task_id, error)
            self._leases[task_id] = old
            self._count()
        else:
            self._release(old)

    def drop(self, digests: Container[str]) -> None:
        """Unpin adapters that could not be written to the cache."""
        for task_id, lease in list(self._leases.items()):
            if lease.digest in digests:
                logger.warning("lora task %d is not pinned any more: it could not be read", task_id)
                self.unpin(task_id)

    def _check_room(self, lease: AdapterLease) -> None:
        if any(one.digest == lease.digest for one in self._leases.values()):
            return
        pages = most_pages([lease.layout.need])
        left, needed = self._cache.unkept_pages - pages, self._largest()
        if left < needed:
            raise AdapterCacheFullError(
                f"it needs {pages} pages, which would leave {max(0, left)} of the adapter cache for all "
                f"others, and {needed} must stay for the largest: unpin another, or make the cache larger"
            )

    def _count(self) -> None:
        needs = {lease.digest: lease.layout.need for lease in self._leases.values()}
        self._cache.kept_pages = most_pages(needs.values())

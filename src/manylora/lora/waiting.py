"""WaitingLeases: leases that are not admitted yet, and the adapters that they keep on the host or carry."""

from __future__ import annotations

from manylora.lora.arrivals import Arrivals
from manylora.lora.cache import AdapterCache
from manylora.lora.lease import AdapterLease
from manylora.lora.loaded import OtherRanks
from manylora.lora.loader import AdapterLoader
from manylora.lora.pool import AdapterPool
from manylora.lora.slicing import AdapterPart


class WaitingLeases:
    """Belongs to the engine's thread. in_parts: several ranks share adapters, and others are told of them."""

    def __init__(
        self,
        cache: AdapterCache,
        pool: AdapterPool,
        arrivals: Arrivals,
        loader: AdapterLoader,
        others: OtherRanks | None,
        *,
        in_parts: bool,
    ) -> None:
        self._cache, self._pool, self._arrivals, self._loader = cache, pool, arrivals, loader
        self._others, self._in_parts = others, in_parts
        self._leases: dict[
            str, set[AdapterLease]
        ] = {}  # by the digest of their adapter, which is on the host

    def __contains__(self, digest: str) -> bool:
        return digest in self._leases

    def add(self, lease: AdapterLease) -> None:
        """Its adapter is on the host."""
        self._leases.setdefault(lease.digest, set()).add(lease)

    def discard(self, lease: AdapterLease) -> None:
        leases = self._leases.get(lease.digest)
        if leases is not None:
            leases.discard(lease)
            if not leases:
                del self._leases[lease.digest]

    def bring_to_host(self, lease: AdapterLease, *, force: bool) -> bool:
        """Bring the adapter to the host, from the lease if it carries it. Returns False if no pages are
        free.
        """
        if not self._cache.on_host(lease.digest):
            assert lease.carried is not None
            layout = lease.layout
            victims = self._cache.host_victims(layout.need, self._leases, force=force)
            if victims is None:
                return False
            for victim in victims:
                if not self._return_to_waiting(victim):
                    return False
                self._cache.evict(victim)
                self._arrivals.forget(victim)
            self._cache.host.put(lease.digest, layout.need, layout)
            self._arrivals.write(lease.digest, lease.carried, layout)
        lease.carried = None
        return True

    def _return_to_waiting(self, digest: str) -> bool:
        """Hand an adapter that must leave the host to the leases that wait for it. Returns False if it was
        lost: the leases must be told first.
        """
        if digest in self._leases:
            self._arrivals.is_written(digest, wait=True)
            if digest in self._arrivals.lost:
                return False
            leases = self._leases.pop(digest)
            entry = self._cache.host.entries[digest]
            adapter = self._pool.read_host(digest, entry.content, entry.pages, entry.shared)
            if self._in_parts:
                adapter = AdapterPart(digest, adapter.rows, adapter.extras, num_pages=len(entry.pages))
            shared = self._loader.share(adapter)
            if self._others is not None and shared is adapter:
                self._others.keep(shared, entry.pages)
            for lease in leases:
                lease.carried = shared
        return True

    def check(self) -> None:
        """Assert that every adapter that is waited for is on the host, and that its leases carry none."""
        for digest, leases in self._leases.items():
            assert self._cache.on_host(digest)
            assert leases
            assert not any(lease.admitted or lease.carried for lease in leases)

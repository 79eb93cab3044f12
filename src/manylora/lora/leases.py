"""Leases: claims of sequences on adapters, and those of them that are not admitted yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from manylora.errors import AdapterInvalidError
from manylora.lora.extras import num_virtual
from manylora.lora.geometry import Layout
from manylora.lora.modules import FUSED, LoraModuleId
from manylora.lora.slicing import AdapterPart
from manylora.lora.tensors import Adapter, FileAdapter

if TYPE_CHECKING:
    from manylora.lora.cache import AdapterCache
    from manylora.lora.loaded import OtherRanks
    from manylora.lora.pool import AdapterPool
    from manylora.lora.transfers import AdapterLoader, Arrivals

TIERS = ("device", "host", "disk", "wire")  # nearest first


@dataclass(eq=False)
class AdapterLease:
    """One sequence's claim on one adapter.

    Before it is admitted, the adapter is on the host, or carried by the lease while no pages are free for it.
    After that it is pinned on both levels.
    """

    digest: str
    task_id: int
    layout: Layout
    carried: Adapter | FileAdapter | None = None
    admitted: bool = False
    tier: str = ""  # where the adapter was found: device, host, disk (its source), wire (sent along)

    @property
    def members(self) -> tuple[tuple[AdapterLease, float], ...]:
        return ((self, 1.0),)

    @property
    def num_virtual(self) -> int:
        """Number of virtual tokens that the adapter puts before each prompt."""
        return num_virtual(self.layout)

    @property
    def invocation(self) -> tuple[int, ...]:
        """As in `LoraInput`."""
        return self.layout.invocation


def digest_of_mix(members: Iterable[tuple[str, float]]) -> str:
    """Digest of adapters that act together and their scales, independent of their order."""
    text = "+".join(f"{digest}*{scale!r}" for digest, scale in sorted(members))
    return blake2b(f"mix {text}".encode(), digest_size=20).hexdigest()


@dataclass(frozen=True, eq=False)
class MixLease:
    """One sequence's claims on adapters that act together, each with its scale. All of them are admitted, or
    none.

    digest: of their contents and scales, independent of their order.
    """

    digest: str
    members: tuple[tuple[AdapterLease, float], ...]

    @classmethod
    def of(cls, members: Sequence[tuple[AdapterLease, float]]) -> MixLease:
        ordered = sorted(members, key=lambda member: (member[0].digest, member[1]))
        return cls(digest_of_mix((lease.digest, scale) for lease, scale in ordered), tuple(ordered))

    @property
    def num_virtual(self) -> int:
        """0: adapters with virtual tokens cannot be mixed."""
        return sum(lease.num_virtual for lease, _ in self.members)

    @property
    def invocation(self) -> tuple[int, ...]:
        """Empty: an activated LoRA cannot be mixed."""
        return ()

    @property
    def carried(self) -> Adapter | FileAdapter | None:
        """The adapter of a member that is not on the host yet."""
        return next((lease.carried for lease, _ in self.members if lease.carried is not None), None)

    @property
    def tier(self) -> str:
        """Where the farthest member was found."""
        return max((lease.tier for lease, _ in self.members), key=TIERS.index)


Lease = AdapterLease | MixLease


def check_mixable(name: str, layout: Layout) -> None:
    """Raises AdapterInvalidError for an adapter that can only act alone and with scale 1, because what it
    trains besides linear layers cannot be part of a sum.
    """
    extras = sorted(place.name for place in layout.extras)
    if not extras:
        return
    what = f"trains {extras[0]}"
    if layout.invocation:
        what = "is an activated LoRA, which acts from a place of its own on"
    raise AdapterInvalidError(
        f"adapter {name} {what}: it cannot be mixed or scaled, ask for it alone and with a scale of 1"
    )


def check_changes(leases: Iterable[AdapterLease]) -> None:
    """Raises AdapterInvalidError for a mix in which the base model's output of a DoRA module is unknown,
    because another member changes the same outputs through a fused matrix or a part of it.
    """
    rows = {(p.layer, p.module_id, p.format.dora) for lease in leases for p in lease.layout.placements}
    found = {(layer, module_id) for layer, module_id, _ in rows}
    for layer in sorted({layer for layer, _, dora in rows if dora}):
        for fused, parts in FUSED.items():
            whole, ids = LoraModuleId[fused.upper()], [LoraModuleId[part.upper()] for part in parts]
            if (layer, whole) in found and any((layer, one) in found for one in ids):
                raise AdapterInvalidError(
                    f"adapters with DoRA cannot be mixed where one has {fused} and another "
                    f"{' or '.join(parts)}: their changes of the base would not be apart"
                )


class WaitingLeases:
    """Leases that are not admitted yet, and the adapters that they keep on the host or carry. Belongs to
    the engine's thread. in_parts: several ranks share adapters, and others are told of them.
    """

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

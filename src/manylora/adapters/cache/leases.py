"""Leases: claims of sequences on adapters, alone (AdapterLease) or several together (MixLease)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from manylora.adapters.geometry import Layout
from manylora.adapters.modules import FUSED, LoraModuleId
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.errors import AdapterInvalidError

TIERS = ("device", "host", "disk", "wire")  # nearest first


@dataclass(eq=False)
class AdapterLease:
    """One sequence's claim on one adapter. Before it is admitted, the adapter is on the host, or carried by
    the lease while no pages are free for it. After that it is pinned on both levels.
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
        return self.layout.num_virtual

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

    digest: of their contents and scales, independent of their order. num_virtual, invocation: of none, since
    adapters with virtual tokens and activated LoRAs cannot be mixed.
    """

    digest: str
    members: tuple[tuple[AdapterLease, float], ...]
    num_virtual: ClassVar[int] = 0
    invocation: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def of(cls, members: Sequence[tuple[AdapterLease, float]]) -> MixLease:
        ordered = tuple(sorted(members, key=lambda member: (member[0].digest, member[1])))
        return cls(digest_of_mix((lease.digest, scale) for lease, scale in ordered), ordered)

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
    """Raises AdapterInvalidError for an adapter that trains more than linear layers: that has no sum."""
    if layout.extras:
        what = f"trains {min(place.name for place in layout.extras)}"
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

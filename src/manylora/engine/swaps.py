"""VersionSwaps: which version of its adapter each sequence uses, and when it switches to a newer one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from manylora.adapters.cache.leases import AdapterLease
from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.engine.kv_cache import KvCache
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.request import AdapterVersion, LoraInput

MAX_NEWEST = 4096  # names whose newest version is kept; beyond it the oldest is forgotten


class VersionSwaps:
    """Belongs to the engine's thread.

    A sequence that follows its adapter's name gets a lease on the newest version in addition to its own. It
    switches between two steps, when the pages of the new version have arrived. If the device has no room for
    both, the old version is evicted first.
    """

    def __init__(self, adapters: AdapterStore, scheduler: Scheduler, kv: KvCache) -> None:
        self.num_swaps = 0
        self._adapters, self._scheduler, self._kv = adapters, scheduler, kv
        self._versions = adapters.library.versions
        # By label, for names with followers: the version that was published or sent in a request last.
        self._newest: dict[str, tuple[LoraInput, AdapterVersion]] = {}
        self._due: dict[Sequence, None] = {}  # sequences with a `next_version`

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def begin(
        self, sequence: Sequence, adapter: Adapter | FileAdapter | None, others: Iterable[Sequence]
    ) -> None:
        """Record the version of a new sequence, whose request may have brought a new one for others."""
        lora, lease = sequence.request.lora, sequence.lease
        if not isinstance(lora, LoraInput) or not isinstance(lease, AdapterLease):
            return
        newest = self._newest.get(lora.label)
        if newest is not None and lora.follow and newest[1].number > lora.version > 0:
            # A newer version was published while the request was on its way.
            newer = self._adapters.acquire(newest[0], None)
            if _fits(newer, sequence):
                self._adapters.release(lease)
                sequence.change_adapter(newer, newest[1])
                return
            self._adapters.release(newer)
        version = self._count(lora, lease.digest)
        sequence.versions = (version,)
        if lora.follow or newest is not None:
            self._spread(lora, adapter, version, others)

    def publish(
        self, lora: LoraInput, adapter: Adapter | FileAdapter | None, sequences: Iterable[Sequence]
    ) -> AdapterVersion:
        """As `Engine.publish`. Afterwards the content is on the host, if there is room."""
        lease = self._adapters.acquire(lora, adapter)
        version = self._count(lora, lease.digest)
        self._spread(lora, adapter, version, sequences)
        self._adapters.renew_pin(lease.task_id)
        self._adapters.release(lease)
        return version

    def apply(self) -> None:
        """Switch the sequences that can. No step may be in flight."""
        due = sorted(self._due, key=lambda one: _next(one)[0].digest)
        for _, group in groupby(due, key=lambda one: _next(one)[0].digest):
            running = []
            for sequence in group:
                lease = sequence.lease
                if lease is not None and all(one.admitted for one, _ in lease.members):
                    running.append(sequence)
                else:
                    self._change(sequence)
            self._change_running(running)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._due.pop(sequence, None)
        if sequence.next_version is not None:
            self._adapters.release(sequence.next_version[0])
            sequence.next_version = None

    def forget_lost(self, lost: Mapping[str, object]) -> None:
        """Keep the old version of sequences whose new one could not be read."""
        for sequence in [one for one in self._due if _next(one)[0].digest in lost]:
            self.forget(sequence)

    def drop_superseded(self, sequences: Iterable[Sequence]) -> None:
        """Drop contents that no name refers to and no sequence uses any more."""
        if not self._versions.superseded:
            return
        leases = [sequence.lease for sequence in sequences if sequence.lease is not None]
        used = {one.digest for lease in leases for one, _ in lease.members}
        for digest in self._versions.superseded.copy() - used:
            self._versions.superseded.discard(digest)
            self._kv.drop(digest)
            self._adapters.drop(digest)

    def _count(self, lora: LoraInput, digest: str) -> AdapterVersion:
        number = lora.version or self._versions.put(lora.label, digest)[0]
        return AdapterVersion(lora.label, number, digest)

    def _spread(
        self,
        lora: LoraInput,
        adapter: Adapter | FileAdapter | None,
        version: AdapterVersion,
        sequences: Iterable[Sequence],
    ) -> None:
        """Let sequences that follow the name switch to this version, unless they know a newer one."""
        known = self._newest.get(lora.label)
        if known is not None and known[1].number >= version.number:
            return
        bare = lora.without_tensors()
        self._newest[lora.label] = bare, version
        if len(self._newest) > MAX_NEWEST:
            del self._newest[next(iter(self._newest))]
        for sequence in sequences:
            theirs = sequence.request.lora
            if not isinstance(theirs, LoraInput) or not theirs.follow or theirs.label != lora.label:
                continue
            if sequence.finished or sequence.versions[-1].number >= version.number:
                continue
            self.forget(sequence)
            lease = self._adapters.acquire(bare, adapter)
            if not _fits(lease, sequence):
                self._adapters.release(lease)
                continue
            sequence.next_version = lease, version
            self._due[sequence] = None

    def _change_running(self, sequences: list[Sequence]) -> None:
        """Switch running sequences from one content to another, the same for all of them."""
        if not sequences:
            return
        old = [one.lease for one in sequences if one.lease is not None]
        first = _next(sequences[0])[0]
        crowded = not (first.admitted or self._adapters.admit(first))
        if crowded:  # suspend the old content, so that it can be evicted
            for lease in old:
                self._adapters.suspend(lease)
            if not self._adapters.admit(first):
                for lease in old:
                    self._adapters.admit(lease)
                return
        for sequence in sequences:
            lease = _next(sequence)[0]
            if not lease.admitted:
                self._adapters.admit(lease)
        if crowded or self._adapters.is_loaded(first):
            for sequence in sequences:
                self._change(sequence)

    def _change(self, sequence: Sequence) -> None:
        lease, version = _next(sequence)
        if sequence.lease is not None:
            self._adapters.release(sequence.lease)
        sequence.change_adapter(lease, version)
        self._scheduler.adapter_changed(sequence)
        self._due.pop(sequence, None)
        self.num_swaps += 1


def _fits(lease: AdapterLease, sequence: Sequence) -> bool:
    """Whether a sequence can switch to this content: as many virtual tokens, and the same invocation."""
    now = sequence.lease
    return lease.num_virtual == sequence.num_virtual and (now is None or lease.invocation == now.invocation)


def _next(sequence: Sequence) -> tuple[AdapterLease, AdapterVersion]:
    assert sequence.next_version is not None
    return sequence.next_version

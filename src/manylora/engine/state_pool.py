"""StatePool: which sequence owns which slot of recurrent state, and which are kept for reuse. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.engine.sequence import BeamGroup, Sequence


class StatePool:
    """A running sequence has one slot. Slots that none has hold snapshots: copies of a sequence's state at
    the end of a full KV block, by the block's node. A prefix is reused up to its last snapshot.

    A step reads a sequence's state from one slot and writes it to its own, so that a snapshot is neither
    copied nor changed. It stays until its block is evicted or its slot is needed, the one used longest ago
    first; not while a step is to read it.
    """

    def __init__(self, num_slots: int, tokens_per_block: int, reuse: bool = True) -> None:
        self.num_slots = num_slots
        self._size, self._reuse = tokens_per_block, reuse
        self._free = list(range(num_slots))[::-1]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # node -> slot, the one used last at the end
        self._readers: Counter[int] = Counter()  # nodes that sequences will start from
        self._copies: list[tuple[int, int]] = []

    @property
    def num_available(self) -> int:
        """Slots that are free, or could be at once."""
        return len(self._free) + len(self._snapshots) - len(self._readers)

    def known(self, nodes: list[int]) -> list[int]:
        """Of a prefix's nodes those up to its last snapshot; none when no slot is left beside that."""
        last = next((i for i in reversed(range(len(nodes))) if nodes[i] in self._snapshots), -1)
        if last >= 0 and self.num_available <= (nodes[last] not in self._readers):
            return []
        return nodes[: last + 1]

    def begin(self, sequence: Sequence, nodes: Items[int]) -> None:
        """Give a sequence a slot, of which there must be one; it starts from the snapshot of the last of
        `nodes`, as `known` gave them, or from zeros."""
        state = sequence.state
        if nodes:
            state.source = nodes[-1]
            self._readers[nodes[-1]] += 1
            self._snapshots.move_to_end(nodes[-1])
        slot = self._claim()
        assert slot is not None
        state.slot, state.reads = slot, self._snapshots[nodes[-1]] if nodes else -1

    def reserve_beams(self, group: BeamGroup) -> bool:
        """Claim the slots of all beams after the first. False, and nothing changed: too few are left."""
        if group.width - 1 > self.num_available:
            return False
        group.state_reserve = [slot for _ in range(group.width - 1) if (slot := self._claim()) is not None]
        return True

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let one beam continue another: `take_copies` has the copy that is due."""
        state = target.state
        if state.slot < 0:
            assert source.beams is not None
            state.slot = source.beams.state_reserve.pop()
        state.reads = state.slot
        self._copies.append((source.state.slot, state.slot))

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the forks since the last call; no slot is in both columns."""
        copies, self._copies = self._copies, []
        return copies

    def border(self, sequence: Sequence, start: int, count: int) -> int:
        """Of a step over these tokens the last full block that a like prompt could start after. Where an
        adapter begins to act among them, that of the base model, which is of use to all."""
        stop = min(start + count, len(sequence.tokens) - 1)
        base = sequence.acts_from // self._size * self._size
        return base if start < base <= stop else stop // self._size * self._size

    def before_step(self, sequence: Sequence, start: int, count: int) -> None:
        """Decide what a step over these tokens stores beside the sequence's state: of a part of a prompt, the
        snapshot at its last full block that a like prompt could start after."""
        state, border = sequence.state, self.border(sequence, start, count)
        self._drop_save(sequence)
        alone = sequence.beams is None or not sequence.beams.forked
        if self._reuse and alone and count > 1 and border > start:
            slot = self._claim()
            if slot is not None:
                state.save_slot, state.cut, state.border = slot, border - start, border

    def after_step(self, sequence: Sequence) -> None:
        """The sequence's state is in its own slot now; a snapshot that was stored may be used, if its block
        is registered. To be called after `KvCache.commit`, while or after the step runs."""
        state = sequence.state
        if state.source is not None:
            self._unpin(state.source)
            state.source = None
        state.reads = state.slot
        if state.save_slot >= 0:
            number, nodes = state.border // self._size - 1, sequence.kv.nodes
            if 0 <= number < len(nodes) and nodes[number] not in self._snapshots:
                self._snapshots[nodes[number]] = state.save_slot
                state.save_slot = -1
            self._drop_save(sequence)

    def free(self, sequence: Sequence) -> None:
        """Take back what a sequence has. Steps that still run are done before others write to its slots."""
        state, group = sequence.state, sequence.beams
        if state.source is not None:
            self._unpin(state.source)
        self._drop_save(sequence)
        if state.slot >= 0:
            self._free.append(state.slot)
        if group is not None and group.leader is sequence:
            self._free += group.state_reserve
            group.state_reserve = []
        sequence.state = type(state)()

    def forget(self, node: int) -> None:
        """The block of a node is evicted."""
        slot = self._snapshots.pop(node, None)
        if slot is not None:
            assert node not in self._readers, "a block is evicted while a sequence starts from it"
            self._free.append(slot)

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that every slot is free, a snapshot's, or of exactly one of these sequences or groups."""
        groups = {id(s.beams): s.beams for s in sequences if s.beams is not None}.values()
        used = [s.state.slot for s in sequences if s.state.slot >= 0]
        used += [s.state.save_slot for s in sequences if s.state.save_slot >= 0]
        used += [slot for group in groups for slot in group.state_reserve]
        slots = [*self._free, *self._snapshots.values(), *used]
        assert sorted(slots) == list(range(self.num_slots)), "slots of state leak"
        assert self._readers == Counter(s.state.source for s in sequences if s.state.source is not None)

    def _claim(self) -> int | None:
        if self._free:
            return self._free.pop()
        node = next((node for node in self._snapshots if node not in self._readers), None)
        return None if node is None else self._snapshots.pop(node)

    def _unpin(self, node: int) -> None:
        self._readers[node] -= 1
        if not self._readers[node]:
            del self._readers[node]

    def _drop_save(self, sequence: Sequence) -> None:
        state = sequence.state
        if state.save_slot >= 0:
            self._free.append(state.save_slot)
        state.save_slot, state.cut = -1, 0

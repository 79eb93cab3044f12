"""StatePool: which sequence owns which slot of recurrent state, and which slots hold snapshots. No
tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.engine.sequence import BeamGroup, Sequence


class StatePool:
    """A running sequence owns one slot. Other slots may hold snapshots: a sequence's state at the end of a
    full KV block, identified by the block's node. A prefix is reused up to its last snapshot.

    A step reads a sequence's state from one slot and writes it to the sequence's own slot, so a snapshot is
    neither copied nor changed. It is dropped when its block is evicted, or when its slot is needed, least
    recently used first, but never before a step that will read it.
    """

    def __init__(self, num_slots: int, tokens_per_block: int, reuse: bool = True) -> None:
        self.num_slots = num_slots
        self._size, self._reuse = tokens_per_block, reuse
        self._free = list(range(num_slots))[::-1]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # node -> slot, most recently used last
        self._readers: Counter[int] = Counter()  # nodes that sequences will start from
        self._copies: list[tuple[int, int]] = []

    @property
    def num_available(self) -> int:
        """Slots that are free or hold a snapshot that can be dropped."""
        return len(self._free) + len(self._snapshots) - len(self._readers)

    def known(self, nodes: list[int]) -> list[int]:
        """The nodes of a prefix up to its last snapshot. None if no slot would be left."""
        last = next((i for i in reversed(range(len(nodes))) if nodes[i] in self._snapshots), -1)
        if last >= 0 and self.num_available <= (nodes[last] not in self._readers):
            return []
        return nodes[: last + 1]

    def begin(self, sequence: Sequence, nodes: Items[int]) -> None:
        """Give a sequence a slot, which must be available. nodes: from `known`; the sequence starts from the
        snapshot of the last one, or from zeros if there are none.
        """
        state = sequence.state
        if nodes:
            state.source = nodes[-1]
            self._readers[nodes[-1]] += 1
            self._snapshots.move_to_end(nodes[-1])
        slot = self._claim()
        assert slot is not None
        state.slot, state.reads = slot, self._snapshots[nodes[-1]] if nodes else -1

    def reserve_beams(self, group: BeamGroup) -> bool:
        """Claim the slots of all beams after the first. False: too few are left."""
        if group.width - 1 > self.num_available:
            return False
        group.state_reserve = [slot for _ in range(group.width - 1) if (slot := self._claim()) is not None]
        return True

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let one beam continue another. `take_copies` returns the copy of the state that this needs."""
        state = target.state
        if state.slot < 0:
            assert source.beams is not None
            state.slot = source.beams.state_reserve.pop()
        state.reads = state.slot
        self._copies.append((source.state.slot, state.slot))

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) slots of the forks since the last call. No slot is in both columns."""
        copies, self._copies = self._copies, []
        return copies

    def border(self, sequence: Sequence, start: int, count: int) -> int:
        """End of the last full block among the tokens of a step after which another sequence could start. If
        an adapter begins to act among them, the last block of the base model, which others can use.
        """
        stop = min(start + count, len(sequence.tokens) - 1)
        base = sequence.acts_from // self._size * self._size
        return base if start < base <= stop else stop // self._size * self._size

    def before_step(self, sequence: Sequence, start: int, count: int) -> None:
        """Decide whether a step over these tokens also stores a snapshot, at its `border`."""
        state, border = sequence.state, self.border(sequence, start, count)
        self._drop_save(sequence)
        alone = sequence.beams is None or not sequence.beams.forked
        if self._reuse and alone and count > 1 and border > start:
            slot = self._claim()
            if slot is not None:
                state.save_slot, state.cut, state.border = slot, border - start, border

    def after_step(self, sequence: Sequence) -> None:
        """The sequence's state is in its own slot now. A snapshot that was stored can be used if its block is
        registered. Call this after `KvCache.commit`, during the step or after it.
        """
        state = sequence.state
        self._unpin(sequence)
        state.reads = state.slot
        if state.save_slot >= 0:
            number, nodes = state.border // self._size - 1, sequence.kv.nodes
            if 0 <= number < len(nodes) and nodes[number] not in self._snapshots:
                self._snapshots[nodes[number]] = state.save_slot
                state.save_slot = -1
            self._drop_save(sequence)

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's slots back. Steps that still use them run before others write to them."""
        state, group = sequence.state, sequence.beams
        self._unpin(sequence)
        self._drop_save(sequence)
        if state.slot >= 0:
            self._free.append(state.slot)
        if group is not None and group.leader is sequence:
            self._free += group.state_reserve
            group.state_reserve = []
        sequence.state = type(state)()

    def forget(self, node: int) -> None:
        """The block of this node was evicted."""
        slot = self._snapshots.pop(node, None)
        if slot is not None:
            assert node not in self._readers, "a block is evicted while a sequence starts from it"
            self._free.append(slot)

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that every slot is free, holds a snapshot, or belongs to one of these sequences."""
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

    def _unpin(self, sequence: Sequence) -> None:
        """The sequence does not read its snapshot any more."""
        node, sequence.state.source = sequence.state.source, None
        if node is not None:
            self._readers[node] -= 1
            if not self._readers[node]:
                del self._readers[node]

    def _drop_save(self, sequence: Sequence) -> None:
        state = sequence.state
        if state.save_slot >= 0:
            self._free.append(state.save_slot)
        state.save_slot, state.cut = -1, 0

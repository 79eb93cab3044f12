"""KvCache: which sequence owns which KV blocks, and which full blocks can be reused. StatePool: the same for
slots of recurrent state. No tensors.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from manylora.adapters.pages import PageAllocator
from manylora.engine.kv_store import DEFAULT_PRIORITY, IdleBlocks
from manylora.engine.sequence import BeamGroup, KvBlocks, Restore, Sequence

if TYPE_CHECKING:
    from manylora.engine.kv_store import BlockKey, KvStore

STUCK_S = 30.0  # after which a prompt is computed instead of copied back

Key = tuple[object, tuple[int, ...], str]
"""Key of a block: its parent node or the sequence's root, its tokens, and their `Sequence.kv_key_suffix`."""


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

    def begin(self, sequence: Sequence, nodes: list[int]) -> None:
        """Give a sequence a slot, which must be available. nodes: from `known`; it starts from the last
        one's.
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
        """The state is in the sequence's own slot now. Call this after `KvCache.commit`."""
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

    def is_read(self, node: int) -> bool:
        """Whether a sequence will start from the snapshot of this node."""
        return node in self._readers

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


class KvCache:
    """Blocks of `tokens_per_block` tokens.

    A full block is registered under its content: its own tokens and the chain of blocks before it. The chain
    starts at the adapter's digest. If the adapter acts only from a later token on, it starts at the base
    model, and the block where the adapter begins to act has the digest in its key. Keys contain the tokens
    themselves, so a match is never a hash collision. A registered block that no sequence uses stays until its
    space is needed; see `IdleBlocks`.

    The beams of a search share blocks. A block that two of them would write to is copied first. All blocks
    that they may ever need are claimed when the search starts; those not in use are in the group's reserve.

    The keys and values that an encoder computes from a prompt take blocks of the same kind, for each decoder
    layer. They belong to one sequence and are not reused.

    states: for a model with recurrent layers. A sequence then has a state slot from `begin` to `free`.

    store: gets copies of blocks of at least min_priority, when they are evicted or before. A prefix that goes
    on there is copied back into the sequence's own blocks, which then count as computed.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        reuse: bool = True,
        states: StatePool | None = None,
        store: KvStore | None = None,
        min_priority: int = 0,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self._reuse = reuse
        self.states = states
        self._store, self._min_priority = store, min_priority
        self._stored_as: dict[int, BlockKey] = {}  # node -> key in the store
        self._unsaved: dict[int, tuple[int, int | None]] = {}  # block -> retention, until it is copied there
        self._restoring: list[Restore] = []
        self.num_blocks, self._pages = num_blocks, PageAllocator(num_blocks)
        self._node_of: dict[Key, int] = {}
        self._block_of: dict[int, int] = {}  # node -> block
        self._key_of: dict[int, Key] = {}  # block -> key
        self._idle: IdleBlocks[int] = IdleBlocks()  # registered blocks that no sequence uses
        self._next_node = 0

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted at once."""
        return self._pages.num_free + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def begin(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence its first blocks, and reuse blocks with the same prefix, but compute at least one
        token. Returns False, and changes nothing, if there are not enough. Sets `num_computed`.
        """
        kv = sequence.kv
        assert not kv.blocks
        nodes, states = self._match(sequence), self.states
        if states is not None:
            nodes = states.known(nodes)
            if not states.num_available:
                return False
        shared = [self._block_of[node] for node in nodes]
        num_idle = sum(block in self._idle for block in shared)
        num_cross = self.blocks_for(sequence.num_encoder)
        if self.blocks_for(num_tokens) + num_cross - len(shared) > self.num_available - num_idle:
            return False
        for block in shared:
            self._idle.discard(block)
            self._pages.share(block)
        kv.blocks, kv.nodes = shared, nodes
        if states is not None:
            states.begin(sequence, nodes)
        kv.stored_as = self._stored_as[nodes[-1]] if nodes and self._store is not None else None
        sequence.num_computed = len(shared) * self.tokens_per_block
        kv.num_reused, kv.num_claimed, kv.num_new = len(shared), 0, 0
        kv.num_reused_tokens = sequence.num_computed
        grown = self.grow(sequence, num_tokens)
        assert grown
        num_known = len(self._key_of)
        kv.cross_blocks = self._claim(num_cross)
        self._count_claimed(kv, num_cross, num_known)
        return True

    def begin_again(self, sequence: Sequence) -> None:
        """Let a sequence that has computed nothing yet reuse blocks that were registered since `begin`."""
        kv = sequence.kv
        nodes = [] if kv.is_mixed else self._match(sequence)
        if self.states is not None:
            nodes = self.states.known(nodes)
        if len(nodes) > len(kv.nodes):
            room = len(kv.blocks) * self.tokens_per_block
            self.free(sequence)
            begun = self.begin(sequence, room)
            assert begun
            self.restore(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for `num_tokens` in total. False: too few are left."""
        kv = sequence.kv
        missing = self.blocks_for(num_tokens) - len(kv.blocks)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        num_known, num_before = len(self._key_of), len(kv.blocks)
        kv.blocks += self._claim(missing)
        num_prompt = min(len(kv.blocks), self.blocks_for(sequence.num_prompt))
        self._count_claimed(kv, max(0, num_prompt - num_before), num_known)
        return True

    def reserve_beams(self, group: BeamGroup) -> bool:
        """Claim all blocks that the beams after the first may ever need. False: too few are left."""
        leader = group.leader
        own = self.blocks_for(leader.max_len) - leader.num_prompt // self.tokens_per_block
        count = (group.width - 1) * own
        if count > self.num_available or (self.states and not self.states.reserve_beams(group)):
            return False
        group.reserve = self._claim(count)
        return True

    def fork(self, source: Sequence, target: Sequence, reserve: list[int]) -> None:
        """Let one beam continue another, whose blocks it then shares."""
        used = self.blocks_for(source.num_computed)
        for block in source.kv.blocks[:used]:
            self._pages.share(block)
        self._give_back(target.kv.blocks, reserve)
        target.kv.blocks = source.kv.blocks[:used]
        target.num_computed = source.num_computed
        if self.states is not None:
            self.states.fork(source, target)

    def make_writable(self, sequence: Sequence, reserve: list[int]) -> tuple[int, int] | None:
        """Give a beam its own block for the next token. Returns (from, to) if a block must be copied."""
        blocks, index = sequence.kv.blocks, sequence.num_computed // self.tokens_per_block
        sequence.kv.replaced()
        self._give_back(blocks[index + 1 :], reserve)
        del blocks[index + 1 :]
        if index == len(blocks):
            blocks.append(reserve.pop())
            return None
        block = blocks[index]
        if self._pages.references(block) == 1:
            return None
        blocks[index] = reserve.pop()
        self._pages.release([block])
        return block, blocks[index]

    def commit(self, sequence: Sequence) -> None:
        """Register the blocks filled since the last call, up to `num_computed`."""
        forked = sequence.beams is not None and sequence.beams.forked
        if not self._reuse or forked or sequence.kv.is_mixed:
            return
        size, nodes = self.tokens_per_block, sequence.kv.nodes
        while (len(nodes) + 1) * size <= sequence.num_computed:
            position = len(nodes)
            key = _key(sequence, nodes[-1] if nodes else sequence.root, position * size, size)
            node = self._node_of.get(key)
            is_new = node is None
            if node is None:
                block, node = sequence.kv.blocks[position], self._next_node
                self._next_node += 1
                self._pages.share(block)
                self._node_of[key], self._block_of[node], self._key_of[block] = node, block, key
            if self._store is not None:
                if is_new:
                    parent = sequence.kv.stored_as
                    self._stored_as[node] = _store_key(self._store, sequence, parent, position * size, size)
                sequence.kv.stored_as = self._stored_as[node]
            nodes.append(node)

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's blocks. When space is needed, its last blocks are evicted first."""
        kv, group = sequence.kv, sequence.beams
        if group is not None and group.leader is sequence:
            self._pages.release(group.reserve)
            group.reserve = []
        for index in reversed(range(len(kv.blocks))):
            block = kv.blocks[index]
            self._pages.release([block])
            if block in self._key_of and self._pages.references(block) == 1:
                self._idle.add(block, *self._retention(sequence, index))
            if self._store is not None and block in self._key_of:
                key = self._stored_as[self._node_of[self._key_of[block]]]
                retention = self._retention(sequence, index)
                if retention[0] >= self._min_priority and not self._store.is_saved(key):
                    self._unsaved.setdefault(block, retention)
        self._pages.release(kv.cross_blocks)
        kv.blocks, kv.nodes, kv.cross_blocks, kv.is_encoded, kv.is_mixed = [], [], [], False, False
        kv.restore = None
        sequence.num_computed = 0
        if self.states is not None:
            self.states.free(sequence)

    def drop(self, digest: str) -> None:
        """Forget the blocks of a content that no name and no running sequence uses any more. Blocks of a
        sequence that switched to another content are evicted in their turn.
        """
        for block in self._registered(digest):
            self._unsaved.pop(block, None)
            if block in self._idle:
                self._idle.discard(block)
                self._forget(block)

    def reset(self, digest: str | None) -> None:
        """Let no later sequence reuse what is in the cache now. digest: only of this content; what a store
        has is not reused either, whatever its content.
        """
        if self._store is not None:
            self._store.reset()
        for block in self._registered(digest):
            self._unsaved.pop(block, None)
            # A snapshot from which a sequence is about to start must stay.
            if self.states is None or not self.states.is_read(self._node_of[self._key_of[block]]):
                self._idle.discard(block)
                self._forget(block)

    def _registered(self, digest: str | None) -> list[int]:
        """Blocks for reuse, of one content or of all."""
        if digest is None:
            return list(self._key_of)
        gone: set[object] = set()  # nodes; children have larger numbers than parents
        found: list[int] = []
        for node, block in sorted(self._block_of.items()):
            parent, _, maker = self._key_of[block]
            makers = (parent.partition(":")[0] if isinstance(parent, str) else "", maker.rpartition(":")[2])
            if parent in gone or digest in makers:
                gone.add(node)
                found.append(block)
        return found

    def drop_all(self) -> None:
        """Forget all blocks that no sequence uses."""
        while self._idle:
            self._forget(self._idle.pop())

    def shared(self, sequence: Sequence, other: Sequence, start: int, count: int) -> int:
        """How many of these tokens, now computed for `other`, a sequence without blocks can use then."""
        size, known = self.tokens_per_block, len(other.kv.nodes) * self.tokens_per_block
        limit = min(sequence.agrees_until(other), len(sequence.tokens) - sequence.num_draft - 1)
        stop = min(limit, start + count) // size * size
        if stop <= known or other.kv.is_mixed or not self._can_match(sequence):
            return 0
        stop = sequence.common_prefix(other, known, stop) // size * size
        if stop <= known:
            return 0
        parent = other.kv.nodes[-1] if known else sequence.root
        if _key(sequence, parent, known, size) in self._node_of:  # another sequence has computed it since
            return 0
        if self.states is not None:
            border = self.states.border(other, start, count)
            stop = border if border <= stop else start
        return max(0, stop - start)

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that every block is free, idle, or used by exactly these sequences and their reserves."""
        self._pages.check()
        if self.states is not None:
            self.states.check(sequences)
        used = [block for s in sequences for block in s.kv.blocks + s.kv.cross_blocks]
        groups = {id(s.beams): s.beams for s in sequences if s.beams is not None}
        used += [block for group in groups.values() for block in group.reserve]
        used += [block for restore in self._restoring for block in restore.blocks]
        for block in range(self.num_blocks):
            expected = used.count(block) + (block in self._key_of)
            assert self._pages.references(block) == expected, f"block {block} leaks"
        assert set(self._idle) == {b for b in self._key_of if b not in used}
        assert len(set(used)) + self.num_available == self.num_blocks

    def finish_restores(self) -> int:
        """Let sequences go on whose blocks were copied back. Returns the tokens in these."""
        total = 0
        for restore in [one for one in self._restoring if one.filled.done()]:
            self._restoring.remove(restore)
            self._pages.release(restore.blocks)
            sequence, kv = restore.sequence, restore.sequence.kv
            if kv.restore is not restore:  # its sequence has ended or was preempted
                continue
            kv.restore, count = None, restore.filled.result()
            sequence.num_computed += count * self.tokens_per_block
            kv.num_reused, kv.num_reused_tokens = kv.num_reused + count, sequence.num_computed
            kv.num_claimed, kv.num_new = kv.num_claimed - count, max(0, kv.num_new - count)
            total += count * self.tokens_per_block
            self.commit(sequence)
        return total

    @property
    def restoring(self) -> list[Restore]:
        """Of sequences that wait for them."""
        return [one for one in self._restoring if one.sequence.kv.restore is one]

    @property
    def is_stuck(self) -> bool:
        """Whether copying back takes so long that the disk may hang. Then no sequence waits for it."""
        return bool(self._restoring) and time.monotonic() - self._restoring[0].started > STUCK_S

    def wait_for_restore(self, timeout_s: float) -> None:
        wait([one.filled for one in self._restoring], timeout_s, FIRST_COMPLETED)

    def save_blocks(self, most: int) -> bool:
        """Copy at most so many blocks to the store. Returns whether there are more."""
        store = self._store
        while store is not None and most and self._unsaved and store.is_ready:
            block = next(iter(self._unsaved))
            store.save(self._stored_as[self._node_of[self._key_of[block]]], block, *self._unsaved.pop(block))
            most -= 1
        return bool(self._unsaved)

    def restore(self, sequence: Sequence) -> None:
        """After `begin`: start to copy back what the store has of the blocks after those that are shared."""
        kv, size, store = sequence.kv, self.tokens_per_block, self._store
        if store is None or self.is_stuck or not self._can_match(sequence):
            return
        keys: list[BlockKey] = []
        parent = kv.stored_as
        for start in range(len(kv.nodes) * size, len(sequence.tokens) - sequence.num_draft - size, size):
            parent = _store_key(store, sequence, parent, start, size)
            if not store.has(parent):
                break
            keys.append(parent)
        if keys:
            blocks = kv.blocks[len(kv.nodes) : len(kv.nodes) + len(keys)]
            for block in blocks:
                self._pages.share(block)
            kv.restore = Restore(sequence, blocks, store.restore(keys, blocks))
            self._restoring.append(kv.restore)

    def _match(self, sequence: Sequence) -> list[int]:
        nodes: list[int] = []
        if not self._can_match(sequence):
            return nodes
        parent: object = sequence.root
        size = self.tokens_per_block
        for start in range(0, len(sequence.tokens) - sequence.num_draft - size, size):
            node = self._node_of.get(_key(sequence, parent, start, size))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def _can_match(self, sequence: Sequence) -> bool:
        """Whether a sequence can reuse blocks: only the outputs of its prompt's last token are needed."""
        request = sequence.request
        every = request.pooling is not None and request.pooling.mode != "last"
        return self._reuse and not every and not request.params.return_context_logits

    def _count_claimed(self, kv: KvBlocks, num_claimed: int, num_known: int) -> None:
        """num_known: registered blocks before these were claimed. The missing ones were evicted."""
        kv.num_claimed += num_claimed
        kv.num_new += max(0, num_claimed - (num_known - len(self._key_of)))

    def _claim(self, count: int) -> list[int]:
        while self._pages.num_free < count:
            self._forget(self._idle.pop())
        return self._pages.claim(count) or []

    def _give_back(self, blocks: list[int], reserve: list[int]) -> None:
        """Release a beam's blocks. Those that no other beam uses go to the reserve."""
        for block in blocks:
            if self._pages.references(block) == 1:
                reserve.append(block)
            else:
                self._pages.release([block])

    def _retention(self, sequence: Sequence, index: int) -> tuple[int, int | None]:
        """Priority of a block, and its duration in ms: the highest for any of its tokens."""
        retention = sequence.request.retention
        if retention is None:
            return DEFAULT_PRIORITY, None
        start, stop = index * self.tokens_per_block, (index + 1) * self.tokens_per_block
        found = [
            (priority, duration)
            for first, end, priority, duration in retention.ranges
            if first < min(stop, sequence.num_prompt) and (end is None or end > start)
        ]
        if stop > sequence.num_prompt:
            found.append((retention.decode_priority, retention.decode_duration_ms))
        return max(found, key=lambda pair: pair[0], default=(DEFAULT_PRIORITY, None))

    def _forget(self, block: int) -> None:
        node = self._node_of.pop(self._key_of.pop(block))
        del self._block_of[node]
        if self._store is not None:
            key, retention = self._stored_as.pop(node), self._unsaved.pop(block, None)
            if retention is not None:
                self._store.save(key, block, *retention)
        if self.states is not None:
            self.states.forget(node)
        self._pages.release([block])


def _key(sequence: Sequence, parent: object, start: int, size: int) -> Key:
    stop = start + size
    return parent, tuple(sequence.tokens[start:stop]), sequence.kv_key_suffix(start, stop)


def _store_key(
    store: KvStore, sequence: Sequence, parent: BlockKey | None, start: int, size: int
) -> BlockKey:
    stop = start + size
    adapter = sequence.kv_key_suffix(start, stop)
    return store.key(parent, sequence.root, adapter, sequence.tokens[start:stop])

"""KvCache: which sequence owns which KV blocks, and which full blocks can be reused. No tensors."""

from __future__ import annotations

from collections import OrderedDict

from manylora.engine.sequence import Sequence
from manylora.pages import PageAllocator

__all__ = ["KvCache"]

Key = tuple[object, tuple[int, ...]]  # (parent node, or root of the adapter; the block's tokens)


class KvCache:
    """Blocks of `tokens_per_block` tokens.

    A full block is registered under its content: the chain of blocks before it, starting at the adapter's
    digest, and its own tokens. Keys hold the tokens themselves, so a match is never a hash collision. A
    registered block that no sequence uses stays until its room is needed, least recently used first.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, reuse: bool = True) -> None:
        self.tokens_per_block = tokens_per_block
        self._reuse = reuse
        self._pages = PageAllocator(num_blocks)
        self._node_of: dict[Key, int] = {}
        self._block_of: dict[int, int] = {}  # node -> block
        self._key_of: dict[int, Key] = {}  # block -> key
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered blocks no sequence uses, oldest first
        self._next_node = 0

    @property
    def num_blocks(self) -> int:
        return self._pages.num_pages

    @property
    def num_available(self) -> int:
        """Blocks that are free, or could be at once."""
        return self._pages.num_free + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def begin(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence without blocks room for `num_tokens`, reusing what is known of its beginning.

        False, and nothing changed, when there is no room. Sets `num_computed` to the tokens reused; at least
        one token is always left to compute, because its logits are needed.
        """
        assert not sequence.blocks
        nodes = self._match(sequence)
        shared = [self._block_of[node] for node in nodes]
        idle = sum(block in self._idle for block in shared)
        if self.blocks_for(num_tokens) - len(shared) > self.num_available - idle:
            return False
        for block in shared:
            self._idle.pop(block, None)
            self._pages.share(block)
        sequence.blocks, sequence.nodes = shared, nodes
        sequence.num_computed = len(shared) * self.tokens_per_block
        grown = self.grow(sequence, num_tokens)
        assert grown
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False, and nothing changed, when there is none."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        while self._pages.num_free < missing:
            self._forget(next(iter(self._idle)))
        sequence.blocks += self._pages.claim(missing) or []
        return True

    def commit(self, sequence: Sequence) -> None:
        """Register the blocks that `num_computed` has filled since the last call."""
        if not self._reuse:
            return
        size = self.tokens_per_block
        while (len(sequence.nodes) + 1) * size <= sequence.num_computed:
            position = len(sequence.nodes)
            parent: object = sequence.nodes[-1] if sequence.nodes else sequence.root
            key = (parent, tuple(sequence.tokens[position * size : (position + 1) * size]))
            node = self._node_of.get(key)
            if node is None:
                node = self._register(key, sequence.blocks[position])
            sequence.nodes.append(node)

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. The deepest are given up first when room is needed."""
        for block in reversed(sequence.blocks):
            self._pages.release([block])
            if block in self._key_of and self._pages.references(block) == 1:
                self._idle[block] = None
        sequence.blocks, sequence.nodes = [], []
        sequence.num_computed = 0

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that every block is free, idle, or held by exactly these sequences."""
        self._pages.check()
        held = [block for sequence in sequences for block in sequence.blocks]
        for block in range(self.num_blocks):
            expected = held.count(block) + (block in self._key_of)
            assert self._pages.references(block) == expected, f"block {block} leaks"
        assert set(self._idle) == {b for b in self._key_of if b not in held}
        assert len(set(held)) + self.num_available == self.num_blocks

    def _match(self, sequence: Sequence) -> list[int]:
        nodes: list[int] = []
        if not self._reuse:
            return nodes
        parent: object = sequence.root
        size = self.tokens_per_block
        for start in range(0, len(sequence.tokens) - size, size):
            node = self._node_of.get((parent, tuple(sequence.tokens[start : start + size])))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def _register(self, key: Key, block: int) -> int:
        node = self._next_node
        self._next_node += 1
        self._pages.share(block)
        self._node_of[key], self._block_of[node], self._key_of[block] = node, block, key
        return node

    def _forget(self, block: int) -> None:
        self._idle.pop(block)
        key = self._key_of.pop(block)
        del self._block_of[self._node_of.pop(key)]
        self._pages.release([block])

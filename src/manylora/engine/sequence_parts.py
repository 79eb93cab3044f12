"""The parts of a Sequence, each with who writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from manylora.request import AdapterVersion, Beam, RequestMetrics

if TYPE_CHECKING:
    from manylora.engine.sequence import Sequence
    from manylora.lora.lease import AdapterLease


@dataclass
class KvBlocks:
    """Written by `KvCache`; is_encoded by the runner."""

    blocks: list[int] = field(default_factory=list)  # in the order of the tokens
    nodes: list[int] = field(default_factory=list)  # identities of the full blocks, registered for reuse
    cross_blocks: list[int] = field(default_factory=list)  # keys and values of the encoder's output
    is_encoded: bool = False  # whether cross_blocks are filled
    is_mixed: bool = False  # whether more than one version of an adapter made them: nothing new is registered
    num_reused: int = 0
    num_reused_tokens: int = 0  # in these
    num_claimed: int = 0  # see `RequestMetrics.kv_taken_blocks`
    num_new: int = 0
    _array: np.ndarray | None = None  # `blocks` as they were when it was made,
    _array_of: list[int] | None = None  # of this list

    def first(self, count: int) -> np.ndarray:
        """The first `count` of `blocks`, int32; made again only when others were added."""
        if self._array is None or self._array_of is not self.blocks or len(self._array) < count:
            self._array, self._array_of = np.array(self.blocks, np.int32), self.blocks
        return self._array[:count]

    def replaced(self) -> None:
        """To be called when a block in `blocks` was exchanged for another."""
        self._array = None


@dataclass
class StateSlots:
    """Of a model with recurrent layers. Written by `StatePool`. -1: none."""

    slot: int = -1  # its own
    reads: int = -1  # where its state is before its next step
    source: int | None = None  # node of the snapshot that this is, while it is one
    cut: int = 0  # tokens of its next step after which the state is stored in save_slot too
    save_slot: int = -1
    border: int = 0  # tokens of the sequence up to there


@dataclass
class Alike:
    """How much of its tokens a sequence in the queue is known to share with another, so that those are not
    compared again in each step."""

    other: Sequence | None = None
    count: int = 0

    def until(self, tokens: list[int], other: Sequence, known: int, stop: int) -> int:
        """Up to which token, `stop` at most, both are the same; 0: not even up to `known`."""
        same, start = other.tokens, self.count if self.other is other else 0
        if start < known and tokens[known] != same[known]:  # nearly all that differ do so here
            return 0
        if start < known and tokens[start:known] != same[start:known]:
            return 0
        low, high = max(start, known), stop
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[low:middle] == same[low:middle]:
                low = middle
            else:
                high = middle - 1
        self.other, self.count = other, low
        return low


@dataclass
class QueueState:
    """Written by the scheduler."""

    num_overtaken: int = 0  # sequences admitted before this one though they came later
    is_prefetched: bool = False  # whether its adapter was copied to the device while it waited
    alike: Alike = field(default_factory=Alike)


@dataclass
class Times:
    """Nanoseconds of time.monotonic_ns; 0: not yet. Written by the scheduler, then where tokens arrive."""

    arrival_ns: int = field(default_factory=time.monotonic_ns)
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def mark_token(self, now_ns: int) -> None:
        self.last_token_ns = now_ns
        self.first_token_ns = self.first_token_ns or now_ns


@dataclass
class Output:
    """What events report beside the tokens. Logits are written by the runner."""

    num_reported: int = 0  # output tokens that were in an event
    log_probs: list[float] = field(default_factory=list)
    beams: tuple[Beam, ...] = ()  # results of a beam search that has ended
    context_logits: np.ndarray | None = None  # [prompt, vocab] float32
    generation_logits: list[np.ndarray] = field(default_factory=list)  # [vocab] float32 for each token
    pooled: list[np.ndarray] = field(default_factory=list)  # [n] at its end, or [tokens, n] of each chunk
    metrics: RequestMetrics | None = None  # of the last event


@dataclass
class Following:
    """Written by `VersionSwaps`. versions: of the adapter, the one that runs now last. next: a lease on the
    content that the sequence goes on with as soon as it can, and that one's version."""

    versions: tuple[AdapterVersion, ...] = ()
    next: tuple[AdapterLease, AdapterVersion] | None = None


def find_last(tokens: Rows[int], wanted: Rows[int]) -> int | None:
    """Where `wanted`, which is not empty, last begins among tokens. By Knuth, Morris and Pratt, from the end:
    both may come from strangers, so the time must not be that of one length times the other."""
    back = wanted[::-1]
    borders, known = [0] * len(back), 0  # of the longest beginning that each beginning ends with
    for i in range(1, len(back)):
        while known and back[i] != back[known]:
            known = borders[known - 1]
        known += back[i] == back[known]
        borders[i] = known
    known = 0
    for place in range(len(tokens) - 1, -1, -1):
        while known and tokens[place] != back[known]:
            known = borders[known - 1]
        known += tokens[place] == back[known]
        if known == len(back):
            return place
    return None

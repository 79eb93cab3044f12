"""Sequence: the state of one continuation of one request. Each part of it says who writes it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import RequestError
from manylora.request import AdapterVersion, Beam, FinishReason, Request, RequestMetrics

if TYPE_CHECKING:
    from manylora.adapters.cache.leases import AdapterLease, Lease
    from manylora.engine.guide import GuideState
    from manylora.engine.kv_store import BlockKey
    from manylora.engine.speculation import Drafter


class TokenCounts:
    """How often each token occurs among the first `length` of a sequence, without those beyond vocab (prompt
    embeddings). num_ignored: first tokens that are seen but not counted.
    """

    def __init__(self, tokens: list[int], num_ignored: int, vocab: int) -> None:
        counted = Counter(tokens[num_ignored:])
        seen = [token for token in dict.fromkeys(tokens) if token < vocab]
        self.length = len(tokens)
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.array(seen, np.int64)
        self._counts = np.array([counted[token] for token in seen], np.float32)

    @property
    def ids(self) -> np.ndarray:
        """[n] int64: the distinct tokens."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """[n] float32: how often each of them was counted."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """The next token of the sequence."""
        self.length += 1
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):  # full
            room = max(16, slot)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._ids[slot] = token
        self._counts[slot] += 1

    def copy(self) -> TokenCounts:
        other = object.__new__(TokenCounts)
        other.length, other._slots = self.length, dict(self._slots)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other


@dataclass
class KvBlocks:
    """KV blocks of a sequence. Written by `KvCache`; is_encoded by the runner."""

    blocks: list[int] = field(default_factory=list)  # in the order of the tokens
    nodes: list[int] = field(default_factory=list)  # ids of full blocks that are registered for reuse
    stored_as: BlockKey | None = None  # the last of `nodes`, which may be evicted as another sequence's block
    cross_blocks: list[int] = field(default_factory=list)  # keys and values of the encoder's output
    is_encoded: bool = False  # whether cross_blocks are filled
    is_mixed: bool = False  # several versions of an adapter computed them: no more blocks are registered
    num_reused: int = 0
    num_reused_tokens: int = 0  # in these
    restore: Restore | None = None  # it waits for blocks that are copied back
    num_claimed: int = 0  # see `RequestMetrics.kv_taken_blocks`
    num_new: int = 0
    _array: np.ndarray | None = None  # a copy of the first of `blocks`,
    _array_of: list[int] | None = None  # when they were this list

    def first(self, count: int) -> np.ndarray:
        """The first `count` of `blocks`, int32. The array is made again only after blocks were added."""
        if self._array is None or self._array_of is not self.blocks or len(self._array) < count:
            self._array, self._array_of = np.array(self.blocks, np.int32), self.blocks
        return self._array[:count]

    def replaced(self) -> None:
        """Call this when a block in `blocks` was exchanged for another one."""
        self._array = None


@dataclass(eq=False)
class Restore:
    """Blocks of a sequence that `KvStore` fills. filled: how many of the first, when it is done."""

    sequence: Sequence
    blocks: list[int]
    filled: Future[int]
    started: float = field(default_factory=time.monotonic)


@dataclass
class StateSlots:
    """Slots of recurrent state of a sequence; -1: none. Written by `StatePool`."""

    slot: int = -1  # its own
    reads: int = -1  # the slot with its state before its next step
    source: int | None = None  # node of the snapshot in `reads`; None: `reads` is no snapshot
    cut: int = 0  # the state after this many tokens of the next step is also stored in save_slot
    save_slot: int = -1
    border: int = 0  # tokens of the sequence up to that point


@dataclass
class Times:
    """Nanoseconds of time.monotonic_ns; 0: not yet. Written by the scheduler and the result processor."""

    arrival_ns: int = field(default_factory=time.monotonic_ns)
    first_scheduled_ns: int = 0
    adapter_read_ns: int = 0  # a duration, before the arrival
    adapter_ready_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def mark_token(self, now_ns: int) -> None:
        self.last_token_ns = now_ns
        self.first_token_ns = self.first_token_ns or now_ns


@dataclass
class Output:
    """What events report in addition to the tokens. Logits are written by the runner."""

    num_reported: int = 0  # output tokens that were in an event
    log_probs: list[float] = field(default_factory=list)
    beams: tuple[Beam, ...] = ()  # results of a finished beam search
    context_logits: np.ndarray | None = None  # [prompt, vocab] float32
    generation_logits: list[np.ndarray] = field(default_factory=list)  # [vocab] float32 for each token
    pooled: list[np.ndarray] = field(default_factory=list)  # [n] at its end, or [tokens, n] of each chunk
    metrics: RequestMetrics | None = None  # of the last event


def find_last(tokens: Rows[int], wanted: Rows[int]) -> int | None:
    """Index of the last `wanted` in `tokens`, in linear time, because both come from clients."""
    text, word = ("".join(map(chr, reversed(ids))) for ids in (tokens, wanted))
    behind = text.find(word)
    return None if behind < 0 else len(tokens) - behind - len(wanted)


NEVER = 2**62  # a position that no sequence reaches
PENDING = -1  # stands for a token that the device has sampled and the host does not know yet


@dataclass(eq=False)
class Sequence:
    """The state of one continuation. Its keys and values depend on its adapter and more: equal tokens of two
    sequences have the same only from the same `root`, and if no adapter begins to act in between.
    """

    handle: int  # of the request, as returned by `Engine.submit`
    request: Request
    index: int  # number among the request's return sequences
    max_len: int  # maximum number of tokens, including the prompt
    lease: Lease | None = None  # on its adapter; None: the base model
    beams: BeamGroup | None = None  # of a beam search
    guide: GuideState | None = None  # the tokens that guided decoding allows next
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_computed: int = 0  # first tokens with keys and values in the cache
    num_draft: int = 0  # draft tokens at the end of `tokens`, which the model has not verified yet
    num_drafted: int = 0  # draft tokens so far, from the client or from `drafter`
    num_accepted: int = 0  # draft tokens that the model has accepted
    drafter: Drafter | None = None  # proposes drafts while it decodes; None: only the client does
    is_pending: bool = False  # whether the last of `tokens` is PENDING
    top_p: float | None = None  # for the next token; it decays if the request asks for that
    counts: TokenCounts | None = None  # of its tokens, kept by the sampler if the request has penalties
    num_virtual: int = 0  # virtual tokens of its adapter at the beginning, not part of the request
    rope_length: int = 0  # tokens are rotated as in a sequence of at least this length
    rope_limit: int | None = None  # beyond it all are rotated differently and computed again; None: never
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    kv: KvBlocks = field(default_factory=KvBlocks)
    state: StateSlots = field(default_factory=StateSlots)
    times: Times = field(default_factory=Times)
    output: Output = field(default_factory=Output)
    versions: tuple[AdapterVersion, ...] = ()  # of its adapter, the current one last; by `VersionSwaps`
    next_version: tuple[AdapterLease, AdapterVersion] | None = None  # to which it switches when it can
    num_overtaken: int = 0  # later sequences that were admitted while it waited
    is_prefetched: bool = False  # whether its adapter was copied to the device while it waited
    alike: tuple[Sequence, int] | None = None  # another one, and how many first tokens both share

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt)
        draft = self.request.draft
        if self.rope_limit is not None and self.num_prompt <= self.rope_limit:
            draft = draft[: self.rope_limit - self.num_prompt]  # the rest cannot be verified in the same step
        self.tokens = [*self.request.prompt, *draft]
        self.num_draft, self.num_drafted = len(draft), len(self.request.draft)
        self.top_p = self.request.params.top_p
        # An activated LoRA acts from its last invocation sequence in the prompt on, or nowhere without one.
        wanted = self.lease.invocation if self.lease is not None else ()
        place = find_last(self.request.prompt, wanted) if wanted else 0
        self.acts_from = NEVER if place is None else place
        self.root = self._root()

    def change_adapter(self, lease: Lease, version: AdapterVersion) -> None:
        """Switch to another version of the adapter. Present keys and values stay, but later blocks are not
        reused.
        """
        self.lease, versions = lease, self.versions
        if versions and versions[-1].start == self.num_output:
            versions = versions[:-1]  # it has generated no token
        self.versions = (*versions, replace(version, start=self.num_output))
        self.next_version = None
        begun = self.num_computed > 0 or self.kv.is_encoded or self.kv.restore is not None
        self.root, self.kv.is_mixed = self._root(), begun

    def _root(self) -> str:
        """Where prefix reuse starts. Of an adapter that acts only later, `kv_key_suffix` has the rest."""
        digest = self.lease.digest if self.lease and not self.acts_from else ""
        if self.request.prompt_table is not None:  # other embeddings have other keys and values
            digest += ":" + self.request.table_digest
        if self.num_encoder:  # and so has another text for the encoder
            ids = np.array(self.request.encoder_prompt, np.int64)
            digest += ":" + blake2b(ids.data, digest_size=20).hexdigest()
        if self.request.cache_salt:
            digest += ":salt:" + blake2b(self.request.cache_salt.encode(), digest_size=20).hexdigest()
        if self.rope_length:  # tokens that are rotated differently have other keys
            digest += f":rope {self.rope_length}"
        return digest

    def kv_key_suffix(self, start: int, stop: int) -> str:
        """The part of a block's key that tells where in it the adapter begins to act."""
        if self.lease is None or not start <= self.acts_from < stop or not self.acts_from:
            return ""
        return f"{self.acts_from - start}:{self.lease.digest}"

    def agrees_until(self, other: Sequence) -> int:
        """The position up to which equal tokens have equal keys and values in both sequences."""
        if self.root != other.root:
            return 0
        begins = {  # of the adapters that are not in `root`
            (one.acts_from, one.lease.digest) if one.lease is not None and one.acts_from else (NEVER, "")
            for one in (self, other)
        }
        return min(begins)[0] if len(begins) > 1 else NEVER

    def common_prefix(self, other: Sequence, known: int, stop: int) -> int:
        """Number of first tokens that both have, at most `stop`. 0: fewer than `known`."""
        tokens, same = self.tokens, other.tokens
        start = self.alike[1] if self.alike is not None and self.alike[0] is other else 0
        if start < known and tokens[known] != same[known]:  # quick, and where most sequences differ
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
        self.alike = other, low
        return low

    def batch_key(self, start: int, stop: int) -> tuple[str, bool]:
        """Sort key of these rows in a batch: by adapter, and first a chunk in which it begins to act."""
        if self.lease is None or self.acts_from >= stop:
            return "", False
        return self.lease.digest, self.acts_from <= start

    @property
    def outgrows_rope(self) -> bool:
        """Whether the keys in the cache are rotated for a shorter sequence than this is now."""
        limit = self.rope_limit
        grown = limit is not None and self.rope_length <= limit < len(self.tokens) - self.num_draft
        return grown and not self.is_full

    def extend_rope(self) -> None:
        """From now on rotate all tokens for a length beyond `rope_limit`. No token may be computed yet."""
        assert self.rope_limit is not None and not self.num_computed
        self.rope_length = self.rope_limit + 1
        self.root = self._root()

    @property
    def num_encoder(self) -> int:
        """Tokens that the encoder reads, all in one step. 0: the model has no encoder."""
        return len(self.request.encoder_prompt)

    @property
    def num_unencoded(self) -> int:
        return 0 if self.kv.is_encoded else self.num_encoder

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt - self.num_draft

    @property
    def num_slots(self) -> int:
        """Batch slots that it takes while it decodes."""
        return self.beams.width if self.beams is not None and not self.beams.forked else 1

    @property
    def num_due(self) -> int:
        """Tokens that are not computed yet: one while decoding, more in prefill or after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes exactly one token."""
        plain = not self.num_draft and not self.num_unencoded
        return self.num_due == 1 and plain and self.request.pooling is None

    @property
    def in_prefill(self) -> bool:
        return self.num_due - self.num_draft > 1 or self.num_output == 0

    @property
    def drafts(self) -> bool:
        """Whether its next step may verify tokens that its drafter proposes."""
        return self.drafter is not None and len(self.tokens) >= self.drafter.wakes_at

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_full(self) -> bool:
        """Whether its pending token is its last one."""
        return self.is_pending and len(self.tokens) >= self.max_len

    @property
    def can_run_ahead(self) -> bool:
        """Whether its next step can be launched before the host knows the token of the last one."""
        # Guides, draft tokens and beams are handled on the host.
        on_host = self.guide is not None or self.num_draft or self.beams is not None
        return not on_host and not self.drafts and not self.request.params.reads_tokens

    def append_pending_token(self) -> None:
        """Continue as if the next token were known, until `remove_pending_token`."""
        assert not self.is_pending
        self.tokens.append(PENDING)
        self.is_pending = True

    def remove_pending_token(self) -> None:
        """Remove PENDING if it is there. The token itself, or an error, comes next."""
        if self.is_pending:
            self.tokens.pop()
            self.is_pending = False

    @property
    def draft_room(self) -> int:
        """Maximum number of tokens of a draft now, such that one more token can follow."""
        if self.is_pending or not self.num_output or not self.is_decoding:
            return 0
        longest = self.max_len - 1
        if self.rope_limit is not None and self.rope_length <= self.rope_limit:
            longest = min(longest, self.rope_limit)  # the rest could not be verified in one step
        return longest - len(self.tokens)

    def add_draft(self, draft: list[int]) -> None:
        self.tokens += draft
        self.num_draft = len(draft)
        self.num_drafted += len(draft)

    def take_back_draft(self) -> None:
        """Remove the drafter's draft, because the step that would have verified it did not run."""
        if self.drafter is not None and self.num_draft:
            del self.tokens[-self.num_draft :]
            self.num_drafted -= self.num_draft
            self.num_draft = 0

    def drop_draft(self, num_accepted: int) -> None:
        """Remove the draft, which was verified. The accepted tokens are then appended as output."""
        count = self.num_draft
        if count:
            del self.tokens[-count:]
            self.counts = None  # draft tokens were counted
            self.num_draft = 0
            self.num_accepted += num_accepted
            if self.drafter is not None:
                self.drafter.record_result(count, num_accepted, len(self.tokens))

    def append(self, token: int, log_prob: float | None) -> None:
        """Append the next token, and end the sequence if it is the last one. The end id is not output."""
        params = self.request.params
        if token == params.end_id:
            self.finish_reason = FinishReason.STOP
            return
        if self.guide is not None and not self.guide.consume(token):
            self.finish_reason = FinishReason.STOP
            if self.guide.failure:
                self.fail(RequestError(self.guide.failure))
            return
        self.tokens.append(token)
        if log_prob is not None:
            self.output.log_probs.append(log_prob)
        if self.top_p:
            reset = token == params.top_p_reset_id
            self.top_p = params.top_p if reset else max(self.top_p * params.top_p_decay, params.top_p_min)
        done = self.guide is not None and self.guide.is_stopped
        if done or (params.stop_words and any(self._ends_with(word) for word in params.stop_words)):
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = FinishReason.ERROR, error

    def _ends_with(self, word: tuple[int, ...]) -> bool:
        return (
            self.tokens[-1] == word[-1]  # quick, and false for most words
            and self.num_output >= len(word)
            and tuple(self.tokens[-len(word) :]) == word
        )


@dataclass(eq=False)
class BeamGroup:
    """A beam search: the sequences of one request, which share a prompt. `engine.step` extends them."""

    width: int
    leader: Sequence  # computes the prompt and represents the request
    beams: list[Sequence] = field(default_factory=list)  # the running ones, including the leader
    scores: list[float] = field(default_factory=lambda: [0.0])  # cumulative log probability of each
    reserve: list[int] = field(default_factory=list)  # KV blocks of the group that no beam uses now
    state_reserve: list[int] = field(default_factory=list)  # and slots of recurrent state
    results: list[tuple[float, Beam]] = field(default_factory=list)  # with their scores, best first
    forked: bool = False  # whether all beams exist, which is the case after the first step

    def __post_init__(self) -> None:
        self.beams = [self.leader]

"""Sequence: the state of one continuation of one request, kept as counters, in parts that say who writes
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import RequestError
from manylora.request import AdapterVersion, Beam, FinishReason, Request, RequestMetrics

if TYPE_CHECKING:
    from manylora.engine.guide import GuideState
    from manylora.engine.speculation import Drafter
    from manylora.lora.leases import AdapterLease, Lease


class TokenCounts:
    """Of the first `length` tokens of a sequence; each step adds its one token, whatever the length.

    tokens:      prompt and output so far. Ids from vocab on (prompt embeddings) are left out.
    num_ignored: tokens at the beginning that are not counted, but seen.
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
        """[n] int64: the distinct tokens that were seen."""
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
class CommonPrefix:
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
    alike: CommonPrefix = field(default_factory=CommonPrefix)


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
class AdapterFollow:
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


NEVER = 2**62  # a position that no sequence reaches
PENDING = -1  # in place of a token that the device has sampled and the host does not know yet


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt + output; the first `num_computed` of them have their keys and values in the cache.

    handle:       of the request, as `Engine.submit` returned it.
    index:        which of the request's return sequences.
    max_len:      tokens at which it ends, prompt included.
    lease:        on its adapter; None: the base model.
    beams:        the group of a beam search, None otherwise.
    guide:        which tokens guided decoding allows next, None without it.
    num_draft:    tokens at the end of `tokens` that are a draft: the model has not verified them.
    num_drafted:  tokens that were drafted so far, by the client or by `drafter`.
    num_accepted: those of them that the model has confirmed.
    drafter:      looks for drafts while it decodes; None: there are none but the client's.
    is_pending:   whether the last of `tokens` is PENDING; see `append_pending_token`.
    top_p:        for the next token; it decays where the request asks for that.
    counts:       of its tokens, kept by the sampler where the request has penalties.
    num_virtual:  tokens at the beginning that its adapter has put there; the request does not know of them.
    rope_length:  the least length by which its tokens are rotated, see `ModelConfig.rope_length`.
    acts_from:    its adapter acts on the tokens from this position on; on the others the base model does.
    rope_limit:   tokens beyond which all of it is rotated in another way, and computed again; None: never.
    """

    handle: int
    request: Request
    index: int
    max_len: int
    lease: Lease | None = None
    beams: BeamGroup | None = None
    guide: GuideState | None = None
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_draft: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafter: Drafter | None = None
    is_pending: bool = False
    top_p: float | None = None
    counts: TokenCounts | None = None
    num_virtual: int = 0
    rope_length: int = 0
    rope_limit: int | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    kv: KvBlocks = field(default_factory=KvBlocks)
    state: StateSlots = field(default_factory=StateSlots)
    queue: QueueState = field(default_factory=QueueState)
    times: Times = field(default_factory=Times)
    output: Output = field(default_factory=Output)
    following: AdapterFollow = field(default_factory=AdapterFollow)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt)
        draft = self.request.draft
        if self.rope_limit is not None and self.num_prompt <= self.rope_limit:
            draft = draft[: self.rope_limit - self.num_prompt]  # the rest could not be verified in one step
        self.tokens = [*self.request.prompt, *draft]
        self.num_draft, self.num_drafted = len(draft), len(self.request.draft)
        self.top_p = self.request.params.top_p
        self.acts_from = _acts_from(self.request.prompt, self.lease)
        self.root = self._root()
        """Where prefix reuse starts: the same tokens have other keys and values under another adapter. Where
        the adapter does not act from the start, that is the base model's; `kv_key_suffix` has the rest."""

    def change_adapter(self, lease: Lease, version: AdapterVersion) -> None:
        """Go on under another content. Keys and values that are there stay, so that what follows is of no
        use to others: no one adapter makes the same."""
        self.lease, versions = lease, self.following.versions
        if versions and versions[-1].start == self.num_output:
            versions = versions[:-1]  # it made no token
        self.following.versions = (*versions, replace(version, start=self.num_output))
        self.following.next = None
        self.root, self.kv.is_mixed = self._root(), self.num_computed > 0 or self.kv.is_encoded

    def _root(self) -> str:
        digest = self.lease.digest if self.lease and not self.acts_from else ""
        if self.request.prompt_table is not None:  # other embeddings have other keys and values
            digest += ":" + self.request.table_digest
        if self.num_encoder:  # and so has another text for the encoder
            ids = np.array(self.request.encoder_prompt, np.int64)
            digest += ":" + blake2b(ids.data, digest_size=20).hexdigest()
        if self.request.cache_salt:
            digest += ":salt:" + blake2b(self.request.cache_salt.encode(), digest_size=20).hexdigest()
        return digest + self._rope_root

    def kv_key_suffix(self, start: int, stop: int) -> str:
        """What beside the tokens and what is before them decides the keys and values of tokens [start, stop):
        the adapter, where it begins to act among them. Empty: nothing that is not decided before."""
        if self.lease is None or not start <= self.acts_from < stop or not self.acts_from:
            return ""
        return f"{self.acts_from - start}:{self.lease.digest}"

    def agrees_until(self, other: Sequence) -> int:
        """Up to which token the same tokens have the same keys and values in another sequence."""
        if self.root != other.root:
            return 0
        mine, theirs = self._begin_of_adapter, other._begin_of_adapter
        return NEVER if mine == theirs else min(mine[0], theirs[0])

    @property
    def _begin_of_adapter(self) -> tuple[int, str]:
        """Where an adapter begins to act that is not in `root`, and which."""
        later = self.lease is not None and self.acts_from
        return (self.acts_from, self.lease.digest) if later and self.lease else (NEVER, "")

    def batch_key(self, start: int, stop: int) -> tuple[str, bool]:
        """Where the rows of tokens [start, stop) belong in a batch: with those of their adapter, behind those
        that begin as the base model's."""
        acts = self.lease is not None and self.acts_from < stop
        return self.lease.digest if acts and self.lease else "", acts and self.acts_from <= start

    @property
    def _rope_root(self) -> str:
        """Tokens that are rotated in another way have other keys."""
        return f":rope {self.rope_length}" if self.rope_length else ""

    @property
    def outgrows_rope(self) -> bool:
        """Whether the keys in the cache are rotated for a shorter sequence than it is now."""
        limit = self.rope_limit
        grown = limit is not None and self.rope_length <= limit < len(self.tokens) - self.num_draft
        return grown and not self.is_full

    def extend_rope(self) -> None:
        """From now on all its tokens are rotated for a length beyond `rope_limit`; none may be computed."""
        assert self.rope_limit is not None and not self.num_computed
        self.rope_length = self.rope_limit + 1
        self.root += self._rope_root

    @property
    def num_encoder(self) -> int:
        """Tokens that the encoder reads, all in one step; 0: there is no encoder."""
        return len(self.request.encoder_prompt)

    @property
    def num_unencoded(self) -> int:
        return 0 if self.kv.is_encoded else self.num_encoder

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt - self.num_draft

    @property
    def num_slots(self) -> int:
        """Batch slots that it takes when it decodes."""
        return self.beams.width if self.beams is not None and not self.beams.forked else 1

    @property
    def num_due(self) -> int:
        """Tokens not yet computed: one while decoding, more in prefill or after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes one token and nothing else."""
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
    def is_waiting(self) -> bool:
        """Whether its guide takes long to find the tokens that are allowed next."""
        return self.guide is not None and self.guide.is_waiting

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
        # Draft tokens and beams are chosen on the host.
        on_host = self.guide is not None or self.num_draft or self.beams is not None
        return not on_host and not self.drafts and not self.request.params.reads_tokens

    def append_pending_token(self) -> None:
        """Go on as if the next token were known, until `remove_pending_token`."""
        assert not self.is_pending
        self.tokens.append(PENDING)
        self.is_pending = True

    def remove_pending_token(self) -> None:
        """Remove PENDING if it is there; the token itself, or an error, comes next."""
        if self.is_pending:
            self.tokens.pop()
            self.is_pending = False

    @property
    def draft_room(self) -> int:
        """Tokens that a draft may have now, the token after it left out."""
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
        """What its drafter has proposed was not verified, as the step did not run."""
        if self.drafter is not None and self.num_draft:
            del self.tokens[-self.num_draft :]
            self.num_drafted -= self.num_draft
            self.num_draft = 0

    def drop_draft(self, num_accepted: int) -> None:
        """The draft was verified: the tokens that were accepted are appended again, as output."""
        count = self.num_draft
        if count:
            del self.tokens[-count:]
            self.counts = None  # draft tokens were counted
            self.num_draft = 0
            self.num_accepted += num_accepted
            if self.drafter is not None:
                self.drafter.record_result(count, num_accepted, len(self.tokens))

    def append(self, token: int, log_prob: float | None) -> None:
        """Append the next token, and see whether it ends the sequence. The end id itself is not output."""
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

    def add_pooled(self, start: int, values: np.ndarray, ends: bool) -> None:
        """Of a chunk from token `start` on; a chunk at 0 begins again after a preemption. ends: it is the
        prompt's last."""
        if start == 0:
            self.output.pooled = []
        self.output.pooled.append(values)
        if ends:
            self.finish_reason = FinishReason.STOP

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = FinishReason.ERROR, error

    def _ends_with(self, word: tuple[int, ...]) -> bool:
        return (
            self.tokens[-1] == word[-1]  # false for most words, and quick
            and self.num_output >= len(word)
            and tuple(self.tokens[-len(word) :]) == word
        )


@dataclass(eq=False)
class BeamGroup:
    """A beam search: the sequences of one request that share a prompt. `engine.beam` moves it on.

    leader:  computes the prompt and stands for the request.
    beams:   the running ones, the leader among them.
    scores:  cumulative log probability of each beam.
    reserve, state_reserve: KV blocks, and slots of recurrent state, of the group that no beam uses now.
    results: (score with the length penalty, result), the best first.
    forked:  whether the beams after the first exist, which is after the first step.
    """

    width: int
    leader: Sequence
    beams: list[Sequence] = field(default_factory=list)
    scores: list[float] = field(default_factory=lambda: [0.0])
    reserve: list[int] = field(default_factory=list)
    state_reserve: list[int] = field(default_factory=list)
    results: list[tuple[float, Beam]] = field(default_factory=list)
    forked: bool = False

    def __post_init__(self) -> None:
        self.beams = [self.leader]


def _acts_from(prompt: tuple[int, ...], lease: Lease | None) -> int:
    """Where the last invocation sequence in the prompt begins. Without one in it an activated LoRA acts
    nowhere; an adapter that is none acts from the start."""
    wanted = lease.invocation if lease is not None else ()
    if not wanted:
        return 0
    place = find_last(prompt, wanted)
    return NEVER if place is None else place

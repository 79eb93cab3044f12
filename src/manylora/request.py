"""Request and Event: the engine's input and output. Plain data, validated on creation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from typing import Any

import numpy as np

from manylora.errors import RequestError


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises RequestError unless ok."""
    if not ok:
        raise RequestError(f"{name} {rule}, got {value}")


MOST = 2**31 - 1  # maximum of counts and token ids
WHOLE_PROMPT = MOST  # as prompt_ignore_length: longer than any prompt
MOST_FLOAT = 3.4e38  # maximum of values used in float32
FINITE = " and finite in float32"
MOST_LENGTH_PENALTY = 30.0  # largest magnitude: a length to a higher power overflows
LEAST_DIVISOR = 1e-6  # lower temperatures count as this one: dividing logits by them could overflow
# Limits of one request. Limits that depend on the engine are in `engine.requests`.
MAX_WORDS = 1024  # stop words, and bad words: each new token is compared with all
MAX_WORD_TOKENS = 2**14  # all words of either kind together
MAX_GUIDE_BYTES = 2**18
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "lark_grammar", "llguidance", "structural_tag")
COUNTS = (
    "max_tokens", "end_id", "top_k", "top_p_reset_id", "prompt_ignore_length", "min_tokens",
    "num_return_sequences", "beam_width",
)  # fmt: skip
# A parameter, its name in errors, and what it must be unless it is None.
RULES: tuple[tuple[str, str, str, Callable[[Any], bool]], ...] = (
    ("max_tokens", "request_output_len (max_tokens)", "must be > 0", lambda n: n > 0),
    ("temperature", "temperature", f"must be >= 0{FINITE}", lambda x: 0 <= x <= MOST_FLOAT),
    ("top_k", "top_k", "must be >= 0", lambda n: n >= 0),
    ("top_p", "top_p", "must be in (0, 1]", lambda x: 0 <= x <= 1),
    ("seed", "random_seed", "must be an unsigned 64-bit integer", lambda n: 0 <= n < 2**64),
    ("repetition_penalty", "repetition_penalty", f"must be > 0{FINITE}", lambda x: 0 < x <= MOST_FLOAT),
    ("presence_penalty", "presence_penalty", "must be finite in float32", lambda x: abs(x) <= MOST_FLOAT),
    ("frequency_penalty", "frequency_penalty", "must be finite in float32", lambda x: abs(x) <= MOST_FLOAT),
    ("prompt_ignore_length", "prompt_ignore_length", "must be >= 0", lambda n: n >= 0),
    ("min_tokens", "min_length (min_tokens)", "must be >= 0", lambda n: n >= 0),
    ("num_return_sequences", "num_return_sequences", "must be > 0", lambda n: n > 0),
    ("min_p", "min_p", "must be in [0, 1]", lambda x: 0 <= x <= 1),
    ("typical_p", "typical_p", "must be in (0, 1]", lambda x: 0 < x <= 1),
    ("top_p_min", "runtime_top_p_min", "must be in (0, 1]", lambda x: 0 < x <= 1),
    ("top_p_decay", "runtime_top_p_decay", "must be in (0, 1]", lambda x: 0 < x <= 1),
    ("beam_width", "beam_width", "must be > 0", lambda n: n > 0),
    ("length_penalty", "length_penalty", f"must be from {-MOST_LENGTH_PENALTY:g} to {MOST_LENGTH_PENALTY:g}",
     lambda x: abs(x) <= MOST_LENGTH_PENALTY),
    ("beam_search_diversity_rate", "beam_search_diversity_rate", f"must be >= 0{FINITE}",
     lambda x: 0 <= x <= MOST_FLOAT),
)  # fmt: skip


@dataclass(frozen=True)
class Guide:
    """Constrains an output to JSON, a JSON schema, a regular expression, a grammar (EBNF, Lark, llguidance),
    or parts of it by a structural tag.
    """

    type: str
    text: str = ""

    def __post_init__(self) -> None:
        size = len(self.text) if self.text.isascii() else len(self.text.encode(errors="replace"))
        kinds, name = ", ".join(GUIDE_TYPES), "guided_decoding_guide"
        require(self.type in GUIDE_TYPES, "guided_decoding_guide_type", f"must be one of {kinds}", self.type)
        require(self.type == "json" or size > 0, name, f"must be given for {self.type}", repr(self.text))
        require(size <= MAX_GUIDE_BYTES, name, f"must have at most {MAX_GUIDE_BYTES} bytes", size)


@dataclass(frozen=True)
class SamplingConfig:
    """How a request is decoded. Token ids, counts in tokens. Raises RequestError for a value that cannot
    work.

    Greedy by default: `top_k` in {None, 0, 1} with `top_p` in {None, 0}, or `top_k` 1, or `temperature` 0,
    takes the most probable token.
    """

    max_tokens: int = 32  # new tokens, at least 1
    end_id: int | None = None  # generation stops at this token; None: only at max_tokens
    temperature: float = 1.0
    top_k: int | None = None  # 0 or None: no limit
    top_p: float | None = None  # 0 or None: not set
    min_p: float = 0.0  # exclude tokens less probable than this times the most probable one
    typical_p: float = (
        1.0  # of what is left, keep the tokens whose information is nearest to the expected one
    )
    top_p_min: float = 1e-6  # top_p is multiplied by top_p_decay after every token, down to this,
    top_p_decay: float = 1.0
    top_p_reset_id: int | None = None  # and is reset to its first value after this token
    seed: int | None = None  # None: 0, so that a repeated request repeats its answer
    repetition_penalty: float = 1.0  # > 1: lowers the logits of tokens in prompt or output
    presence_penalty: float = 0.0  # subtracted once from tokens in prompt or output,
    frequency_penalty: float = 0.0  # and this per occurrence; both after division by the temperature
    prompt_ignore_length: int = 0  # these two ignore this many tokens at the prompt's start
    min_tokens: int = 0  # end_id is not allowed before this many new tokens
    stop_words: tuple[tuple[int, ...], ...] = ()  # stop after any of these; the word stays in the output
    bad_words: tuple[tuple[int, ...], ...] = ()  # never completed
    num_return_sequences: int = 1  # independent samples of one prompt; with beams: number returned
    beam_width: int = 1  # > 1: beam search
    length_penalty: float = 0.0  # of a beam's score: log probability / length ** length_penalty
    early_stopping: bool = True  # end when beam_width beams ended; False: when none can still improve
    beam_search_diversity_rate: float = 0.0  # a beam's n-th best token is ranked n * rate lower
    logit_bias: np.ndarray | None = field(default=None, compare=False)  # [vocab] float32, added to the logits
    guide: Guide | None = None
    use_drafts: bool = True  # if the engine uses n-gram drafts
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False

    def __post_init__(self) -> None:
        for field_name, name, rule, check in RULES:
            value = getattr(self, field_name)
            require(value is None or check(value), name, rule, value)
        for name in COUNTS:
            count = getattr(self, name)
            require(count is None or count <= MOST, name, f"must be at most {MOST}", count)
        sequences, width = self.num_return_sequences, self.beam_width
        fit = width == 1 or sequences <= width
        require(fit, "num_return_sequences", f"must be <= beam_width ({width})", sequences)
        if self.beam_width > 1 and self.guide is not None:
            raise RequestError("Guided decoding does not support with beam search.")
        if self.beam_width > 1 and self.return_generation_logits:
            raise RequestError("return_generation_logits needs beam_width 1: beams share no row of logits")
        if self.logit_bias is not None:
            finite = bool(np.isfinite(self.logit_bias).all())
            require(finite, "embedding_bias", "must be finite", "a NaN or infinity")
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            size = sum(map(len, words))
            require(len(words) <= MAX_WORDS, name, f"must be at most {MAX_WORDS} words", len(words))
            rule = f"must have at most {MAX_WORD_TOKENS} tokens, all together"
            require(size <= MAX_WORD_TOKENS, name, rule, size)
            require(all(words), name, "must not hold an empty word", words)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or (not self.top_k and not self.top_p)

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the host must know a token before the next can be sampled, or collects logits."""
        logits = self.return_context_logits or self.return_generation_logits
        return logits or any(len(word) > 1 for word in self.bad_words)

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether each token changes how the next is sampled, in a way that the device tracks itself."""
        return self.has_penalties or bool(self.top_p and self.top_p_decay != 1)

    @cached_property
    def divisor(self) -> float:
        """Divisor of the logits: the temperature; 1 if it is 0 or has no effect."""
        matters = not self.greedy or self.has_penalties or self.return_log_probs or self.beam_width > 1
        return max(self.temperature, LEAST_DIVISOR) if self.temperature and matters else 1.0

    def with_output_penalties(self) -> SamplingConfig:
        """The same with penalties as of OpenAI and vLLM: counted over the output, before the temperature."""
        if not (self.presence_penalty or self.frequency_penalty):
            return self
        presence, frequency = self.presence_penalty / self.divisor, self.frequency_penalty / self.divisor
        changed = replace(self, presence_penalty=presence, frequency_penalty=frequency)
        return replace(changed, prompt_ignore_length=WHOLE_PROMPT)


MAX_MIXED = 8  # adapters of one request
MAX_SCALE = 100.0  # largest magnitude of an adapter's scale
INVOCATION = "invocation"  # name of a LoraExtra
MAX_INVOCATION = 4096  # maximum number of its tokens


@dataclass(frozen=True, eq=False)
class LoraExtra:
    """A part of an adapter without a row in the tensor form: a bias, a norm, a part of embedding or head."""

    name: str  # one of those listed in `manylora.adapters.extras`
    values: np.ndarray  # [n] or [rows, columns], as `LoraInput.weights`, with the scaling folded in
    token_ids: tuple[int, ...] = ()  # for a matrix with rows for these tokens only; ascending

    @classmethod
    def invocation(cls, token_ids: Iterable[int]) -> LoraExtra:
        """For an activated LoRA: it acts from the last of these sequences in the prompt on. Has no values."""
        return cls(INVOCATION, np.empty(0, np.float32), tuple(token_ids))


class CheckedAdapter:
    """Base of the adapters of `manylora.adapters.tensors`, whose contents were validated and digested."""

    digest: str


@dataclass(frozen=True, eq=False)
class LoraInput:
    """The adapter part of a request, as received. `manylora.adapters.tensors` checks shapes and contents.

    weights: [1, rows, W], float32, float16, 2-byte void ("V2", the bits of bfloat16) or 1-byte void ("V1", of
    float8_e4m3fn, which only comes from files). config: [1, rows, 3 or 4] int32, columns module id, layer,
    rank[, is_dora]. Both are None if the adapter is cached.
    """

    task_id: int | None  # unsigned 64-bit id that the client uses for this adapter
    weights: np.ndarray | None = None
    config: np.ndarray | None = None
    name: str | None = None  # of an adapter in the server's catalog, instead of all of these
    source: str | None = None  # required kind of checkpoint of `name`, "hf" or "nemo"; None: any
    extras: tuple[LoraExtra, ...] = ()  # parts besides the tensors, from files; clients send only INVOCATION
    checked: CheckedAdapter | None = None  # made from these tensors or files earlier: not validated again
    scales: np.ndarray | None = None  # [rows] float32, factors on B A, for float8_e4m3fn weights; None: 1
    version: int = 0  # number of this content among those of its name; 0: the engine counts
    follow: bool = False  # switch to newer versions of the name, from one step to the next

    @property
    def label(self) -> str:
        """The key under which versions are counted: the name, or else the id."""
        return str(self.task_id) if self.name is None else self.name

    def without_tensors(self) -> LoraInput:
        """The same adapter with only its identity."""
        if not self.has_tensors:
            return self
        return replace(self, weights=None, config=None, extras=(), checked=None, scales=None)

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens from which an activated LoRA acts. Empty: the adapter acts everywhere."""
        return next((extra.token_ids for extra in self.extras if extra.name == INVOCATION), ())

    @property
    def has_tensors(self) -> bool:
        """Whether the request brought tensors, or an adapter made from them."""
        return self.weights is not None or self.config is not None or self.checked is not None

    @property
    def members(self) -> tuple[tuple[LoraInput, float], ...]:
        """As those of a mix."""
        return ((self, 1.0),)

    @property
    def task_ids(self) -> list[int]:
        return [] if self.task_id is None else [self.task_id]


@dataclass(frozen=True, eq=False)
class LoraMix:
    """Several adapters that act together, or one with a scale. Created by `mix`.

    members: each with the factor on its B A, rounded to float32. It is not 0, and for a single adapter not 1.
    """

    members: tuple[tuple[LoraInput, float], ...]

    @property
    def task_ids(self) -> list[int]:
        return [number for lora, _ in self.members for number in lora.task_ids]

    @property
    def has_tensors(self) -> bool:
        """Whether the request brought tensors, or an adapter made from them."""
        return any(lora.has_tensors for lora, _ in self.members)

    def without_tensors(self) -> LoraMix:
        """The same adapters with only their identity."""
        return self.map(LoraInput.without_tensors)

    def map(self, change: Callable[[LoraInput], LoraInput]) -> LoraMix:
        """The same with each member replaced by `change` of it."""
        return LoraMix(tuple((change(lora), scale) for lora, scale in self.members))


@dataclass(frozen=True)
class AdapterVersion:
    """The content of an adapter that generated the output tokens from `start` on."""

    name: str  # as in `LoraInput.label`
    number: int  # of the contents of the name, from 1
    digest: str
    start: int = 0


def mix(members: Sequence[tuple[LoraInput, float]], field: str = "lora") -> LoraInput | LoraMix | None:
    """The adapter part for these, None: the base model. Scales of the same one add up, as in PEFT; one of
    scale 0 is dropped. field: that names them. Raises RequestError.
    """
    require(len(members) <= MAX_MIXED, field, f"must name at most {MAX_MIXED} adapters", len(members))
    sums: dict[object, tuple[LoraInput, float]] = {}
    for lora, scale in members:
        key = lora.name if lora.task_id is None else lora.task_id
        known, sofar = sums.get(key, (lora, 0.0))
        sums[key] = known, sofar + _scale(scale, field)
    found = tuple((lora, _scale(total, field)) for lora, total in sums.values() if total)
    if len(found) == 1 and found[0][1] == 1:
        return found[0][0]
    if any(lora.follow for lora, _ in found):
        raise RequestError("lora_version follow is for one adapter with a scale of 1: use keep")
    return LoraMix(found) if found else None


def _scale(value: float, field: str) -> float:
    """Rounded to float32, as used by kernels."""
    ok = isfinite(value) and abs(value) <= MAX_SCALE
    require(ok, field, f"must have scales that are finite, of at most {MAX_SCALE:g} up or down", value)
    return float(np.float32(value))


class FinishReason(str, Enum):
    """Why a sequence ended."""

    __str__ = str.__str__  # StrEnum, for Python 3.10

    STOP = "stop"  # end_id or a stop word
    LENGTH = "length"  # max_tokens, or the model's maximum length
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"


@dataclass(frozen=True)
class ActivatedTokens:
    """Tokens of a request with an activated LoRA, in prompt and output together."""

    before: int  # where it does not act, so the base model does
    shared: int  # of these, tokens whose KV blocks were cached by any request
    acted: int  # the others, from its invocation on; 0 without an invocation


@dataclass(frozen=True)
class RequestMetrics:
    """Times in nanoseconds of a monotonic clock, 0: not yet; numbers of KV blocks and of draft tokens."""

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    kv_new_blocks: int = 0  # of the taken ones, those that did not evict a reusable block
    kv_taken_blocks: int = 0  # the other blocks of the prompt
    kv_reused_blocks: int = 0  # blocks of the prompt that were cached
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, whose KV blocks were cached
    output_tokens: int = 0
    adapter_tier: str = ""  # where the adapter was found: device, host, disk, wire; empty: no adapter
    adapter_read_ns: int = 0  # how long its adapter was read and checked before the arrival
    adapter_ready_ns: int = 0  # when it could be computed with its adapter
    activated: ActivatedTokens | None = None  # for an activated LoRA

    @property
    def adapter_load_ns(self) -> int:
        """How long it waited for its adapter; 0: that was on the device."""
        if self.adapter_tier in ("", "device") or not self.adapter_ready_ns:
            return 0
        return self.adapter_read_ns + self.adapter_ready_ns - self.first_scheduled_ns

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in the engine's queue, until its adapter was there, of prefill and of decoding, in this
        order and without what it did not reach.
        """
        if not self.first_scheduled_ns:
            return {}
        found, ready_ns = {"queue": self.first_scheduled_ns - self.arrival_ns}, self.first_scheduled_ns
        if self.adapter_load_ns:
            found["adapter_load"], ready_ns = self.adapter_load_ns, self.adapter_ready_ns
        if self.first_token_ns:
            found["prefill"] = self.first_token_ns - ready_ns
        if self.last_token_ns:
            found["decode"] = self.last_token_ns - self.first_token_ns
        return {name: ns / 1e9 for name, ns in found.items()}


@dataclass(frozen=True)
class Beam:
    """One result of a beam search. log_probs as in Event. cum_log_prob includes the end id."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    cum_log_prob: float


@dataclass(slots=True, eq=False)  # not frozen, which is slower to create: a stream has one per token
class Event:
    """New tokens of one sequence of a request, or its end."""

    token_ids: tuple[int, ...] = ()  # since its last event (all of them if not streaming), without the prompt
    # Natural-log probabilities of `token_ids`, if requested, after temperature and penalties, before cuts.
    log_probs: tuple[float, ...] = ()
    sequence_index: int = 0
    finish_reason: FinishReason | None = None  # None while the sequence continues
    last: bool = False  # True on exactly one event, the final one of the request
    error: Exception | None = None  # set exactly if finish_reason is ERROR
    beams: tuple[Beam, ...] = ()  # results of a beam search, best first; token_ids is empty then
    context_logits: np.ndarray | None = None  # [prompt, vocab] float32, on the first event, if requested
    # [output, vocab] float32, on the last event of the sequence, if requested; of `token_ids` when streaming.
    generation_logits: np.ndarray | None = None
    pooled: np.ndarray | None = None  # float32, if asked for: [n], or [prompt, n] for all tokens
    # On the last event of each sequence; when streaming on every event, until the last as in the first.
    metrics: RequestMetrics | None = None
    versions: tuple[AdapterVersion, ...] = ()  # of the adapter, for all tokens so far


Sink = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread. It must not block and must not raise."""


MAX_RANGES = 1024  # maximum number of retention ranges
POOLING_MODES = ("last", "mean", "cls", "all")


@dataclass(frozen=True)
class Retention:
    """Priority with which the KV blocks of a prompt and its output are kept for reuse, from 0 to 100; 35 is
    the default.

    ranges: (first token, token after the last or None, priority, milliseconds or None) of the prompt.
    """

    ranges: tuple[tuple[int, int | None, int, int | None], ...] = ()
    decode_priority: int = 35
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        name, count = "retention_token_range_starts", len(self.ranges)
        require(count <= MAX_RANGES, name, f"must be at most {MAX_RANGES}", count)
        for start, end, priority, duration in self.ranges:
            require(start >= 0, name, "must be >= 0", start)
            after = end is None or end > start
            require(after, "retention_token_range_ends", f"must be > {start} or -1", end)
            _priority("retention_token_range_priorities", priority, duration)
        _priority("retention_decode_priority", self.decode_priority, self.decode_duration_ms)


@dataclass(frozen=True)
class Pooling:
    """Compute hidden states after the final norm of the prompt, instead of new tokens."""

    mode: str = "last"  # last, cls (the first), mean, or all tokens
    head: bool = False  # apply a classification head, the adapter's or the model's, except after `all`
    first: int = 0  # tokens of the first of two texts, for models with token types; 0: a single text

    def __post_init__(self) -> None:
        rule = f"must be one of {', '.join(POOLING_MODES)}"
        require(self.mode in POOLING_MODES, "pooling", rule, self.mode)


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue, with one adapter, several, or none."""

    prompt: tuple[int, ...]  # at least one token; ids from the vocabulary's size on: rows of prompt_table
    params: SamplingConfig = field(default_factory=SamplingConfig)
    lora: LoraInput | LoraMix | None = None
    streaming: bool = False  # whether each step with new tokens gives an Event, not only a finished sequence
    request_id: str = ""  # the client's own, for logs and `stop`: may be empty or repeated
    draft: tuple[int, ...] = ()  # a guess of the next tokens; what the model confirms is accepted in one step
    prompt_table: np.ndarray | None = None  # [n, hidden_size] float16 or float32
    retention: Retention | None = None
    # The input of a model's encoder; `prompt` is then the decoder's, empty for the model's own start. Without
    # it `prompt` is for the encoder.
    encoder_prompt: tuple[int, ...] = ()
    cache_salt: str = ""  # KV blocks of equal prefixes are shared only if this is equal, too
    pooling: Pooling | None = None  # what to compute instead of new tokens; `params` is then ignored

    def __post_init__(self) -> None:
        if self.pooling is not None:
            self._check_pooled()
        if self.params.beam_width > 1:
            if self.streaming:
                raise RequestError("streaming needs beam_width 1: beams may still change their beginning")
            if self.draft:
                raise RequestError("draft_input_ids need beam_width 1")
            if isinstance(self.lora, LoraInput) and self.lora.follow:
                raise RequestError("lora_version follow needs beam_width 1: beams keep the version they have")

    def _check_pooled(self) -> None:
        params = self.params
        logits = params.return_context_logits or params.return_generation_logits or params.return_log_probs
        wrong = {
            "streaming": self.streaming,
            "draft_input_ids": self.draft,
            "beam_width": params.beam_width > 1,
            "num_return_sequences": params.num_return_sequences > 1,
            "guided_decoding_guide": params.guide,
            "logits or log probabilities": logits,
        }
        for name, value in wrong.items():
            if value:
                raise RequestError(f"a request for pooled outputs generates no tokens: leave {name} out")

    @cached_property
    def table_digest(self) -> str:
        """Digest of prompt_table. Empty without one. Computed once for all sequences."""
        if self.prompt_table is None:
            return ""
        return blake2b(np.ascontiguousarray(self.prompt_table).data, digest_size=20).hexdigest()


def _priority(name: str, priority: int, duration: int | None) -> None:
    require(0 <= priority <= 100, name, "must be from 0 to 100", priority)
    name = name.replace("priorit", "duration_ms of priorit")
    require(duration is None or duration >= 0, name, "must be >= 0 or -1", duration)

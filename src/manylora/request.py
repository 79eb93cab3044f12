"""Request and Event: what goes into the engine, and what comes out. Plain data, checked where it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from math import isfinite

import numpy as np

from manylora.errors import RequestError

MAX_SEED = 2**64 - 1
MOST = 2**31 - 1  # of a count or a token's id
WHOLE_PROMPT = MOST  # as prompt_ignore_length: a longer one than any prompt
MOST_FLOAT = 3.4e38  # of what is computed with in float32
FINITE = " and finite in float32"
MOST_LENGTH_PENALTY = 30.0  # or its negative: a length to the power of more is no float
LEAST_DIVISOR = 1e-6  # lower temperatures are as this one: logits divided by them could overflow
# What one request may bring. Bounds that depend on the engine are in `engine.checks`.
MAX_WORDS = 1024  # stop words, and bad words: every new token is compared with each
MAX_WORD_TOKENS = 2**14  # of either, all together
MAX_RANGES = 1024  # of token retention
MAX_GUIDE_BYTES = 2**18
MAX_MIXED = 8  # adapters of one request
MAX_SCALE = 100.0  # of an adapter, or less than its negative
INVOCATION = "invocation"  # name of a LoraExtra
MAX_INVOCATION = 4096  # tokens of it
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "lark_grammar", "llguidance")


POOLING_MODES = ("last", "mean", "cls", "all")


class FinishReason(str, Enum):
    """Why a sequence ended."""

    __str__ = str.__str__  # StrEnum, for Python 3.10

    STOP = "stop"  # end_id or a stop word
    LENGTH = "length"  # max_tokens, or the model's longest sequence
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"


@dataclass(frozen=True)
class Guide:
    """What the output must match: any JSON, a JSON schema, a regular expression, or a grammar in EBNF, in
    Lark or in the JSON form of llguidance."""

    type: str
    text: str = ""

    def __post_init__(self) -> None:
        size = len(self.text) if self.text.isascii() else len(self.text.encode(errors="replace"))
        kinds, name = ", ".join(GUIDE_TYPES), "guided_decoding_guide"
        _require(self.type in GUIDE_TYPES, "guided_decoding_guide_type", f"must be one of {kinds}", self.type)
        _require(self.type == "json" or size > 0, name, f"must be given for {self.type}", repr(self.text))
        _require(size <= MAX_GUIDE_BYTES, name, f"must have at most {MAX_GUIDE_BYTES} bytes", size)


COUNTS = (
    "max_tokens", "end_id", "top_k", "top_p_reset_id", "prompt_ignore_length", "min_tokens",
    "num_return_sequences", "beam_width",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingConfig:
    """How one request is decoded. Token ids, counts in tokens. Raises RequestError when a value cannot work.

    Greedy unless asked otherwise: `top_k` in {None, 0, 1} with `top_p` in {None, 0}, or `top_k` 1, or
    `temperature` 0, takes the most probable token.
    """

    max_tokens: int = 32  # new tokens, at least 1
    end_id: int | None = None  # generation stops at this token; None: runs to max_tokens
    temperature: float = 1.0
    top_k: int | None = None  # 0 or None: no limit
    top_p: float | None = None  # 0 or None: not set
    min_p: float = 0.0  # tokens less probable than this times the most probable one are not drawn
    top_p_min: float = 1e-6  # top_p decays by top_p_decay with every token, down to this,
    top_p_decay: float = 1.0
    top_p_reset_id: int | None = None  # and returns to its first value after this token
    seed: int | None = None  # None: 0, so that a repeated request repeats its answer
    repetition_penalty: float = 1.0  # > 1: logits of tokens seen in prompt or output are made lower by it
    presence_penalty: float = 0.0  # subtracted once from tokens of prompt and output,
    frequency_penalty: float = 0.0  # and this per occurrence; both after the division by the temperature
    prompt_ignore_length: int = 0  # so many tokens of the prompt, from its beginning, count for neither
    min_tokens: int = 0  # end_id is not taken before this many new tokens
    stop_words: tuple[tuple[int, ...], ...] = ()  # stops after any of these; the word stays in the output
    bad_words: tuple[tuple[int, ...], ...] = ()  # never completed
    num_return_sequences: int = 1  # independent samples of one prompt; with beams: how many are returned
    beam_width: int = 1  # > 1: beam search
    length_penalty: float = 0.0  # of a beam's score: log probability / length ** length_penalty
    early_stopping: bool = True  # ends when beam_width beams ended; False: when none can still become better
    beam_search_diversity_rate: float = 0.0  # a beam's n-th best token counts n * rate less when ranked
    logit_bias: np.ndarray | None = field(default=None, compare=False)  # [vocab] float32, added to the logits
    guide: Guide | None = None
    use_drafts: bool = True  # where the engine drafts by n-grams
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False

    def __post_init__(self) -> None:
        for ok, name, rule, value in self._rules():
            _require(ok, name, rule, value)
        if self.beam_width > 1 and self.guide is not None:
            raise RequestError("Guided decoding does not support with beam search.")
        if self.beam_width > 1 and self.return_generation_logits:
            raise RequestError("return_generation_logits needs beam_width 1: beams share no row of logits")
        if self.logit_bias is not None:
            finite = bool(np.isfinite(self.logit_bias).all())
            _require(finite, "embedding_bias", "must be finite", "a NaN or infinity")
        _check_words("stop_words", self.stop_words)
        _check_words("bad_words", self.bad_words)

    def _rules(self) -> Iterator[tuple[bool, str, str, object]]:
        """Whether a parameter is right, its name, what it must be, its value."""
        yield self.max_tokens > 0, "request_output_len (max_tokens)", "must be > 0", self.max_tokens
        heat, repetition = self.temperature, self.repetition_penalty
        yield 0 <= heat <= MOST_FLOAT, "temperature", f"must be >= 0{FINITE}", heat
        yield self.top_k is None or self.top_k >= 0, "top_k", "must be >= 0", self.top_k
        yield self.top_p is None or 0 <= self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p
        seed_is_right = self.seed is None or 0 <= self.seed <= MAX_SEED
        yield seed_is_right, "random_seed", "must be an unsigned 64-bit integer", self.seed
        yield 0 < repetition <= MOST_FLOAT, "repetition_penalty", f"must be > 0{FINITE}", repetition
        for name in ("presence_penalty", "frequency_penalty"):
            yield (
                abs(getattr(self, name)) <= MOST_FLOAT,
                name,
                "must be finite in float32",
                getattr(self, name),
            )
        ignored = self.prompt_ignore_length
        yield ignored >= 0, "prompt_ignore_length", "must be >= 0", ignored
        yield self.min_tokens >= 0, "min_length (min_tokens)", "must be >= 0", self.min_tokens
        sequences, width = self.num_return_sequences, self.beam_width
        yield sequences > 0, "num_return_sequences", "must be > 0", sequences
        yield 0 <= self.min_p <= 1, "min_p", "must be in [0, 1]", self.min_p
        yield 0 < self.top_p_min <= 1, "runtime_top_p_min", "must be in (0, 1]", self.top_p_min
        yield 0 < self.top_p_decay <= 1, "runtime_top_p_decay", "must be in (0, 1]", self.top_p_decay
        yield width > 0, "beam_width", "must be > 0", width
        penalty, most = self.length_penalty, MOST_LENGTH_PENALTY
        yield -most <= penalty <= most, "length_penalty", f"must be from {-most:g} to {most:g}", penalty
        rate = self.beam_search_diversity_rate
        yield 0 <= rate <= MOST_FLOAT, "beam_search_diversity_rate", f"must be >= 0{FINITE}", rate
        for name in COUNTS:
            count = getattr(self, name)
            yield count is None or count <= MOST, name, f"must be at most {MOST}", count
        fit = width == 1 or sequences <= width
        yield fit, "num_return_sequences", f"must be <= beam_width ({width})", sequences

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or (not self.top_k and not self.top_p)

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the host must know a token before the next can be drawn, or collects logits."""
        logits = self.return_context_logits or self.return_generation_logits
        return logits or any(len(word) > 1 for word in self.bad_words)

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether each token changes how the next is drawn, which a device keeps account of itself."""
        return self.has_penalties or bool(self.top_p and self.top_p_decay != 1)

    @cached_property
    def divisor(self) -> float:
        """Of the logits: the temperature; 1 where it is 0, or could change nothing."""
        matters = not self.greedy or self.has_penalties or self.return_log_probs or self.beam_width > 1
        return max(self.temperature, LEAST_DIVISOR) if self.temperature and matters else 1.0

    def with_output_penalties(self) -> SamplingConfig:
        """The same with the penalties of OpenAI and vLLM: presence and frequency are counted over the output
        alone, and subtracted before the division by the temperature."""
        if not (self.presence_penalty or self.frequency_penalty):
            return self
        presence, frequency = self.presence_penalty / self.divisor, self.frequency_penalty / self.divisor
        changed = replace(self, presence_penalty=presence, frequency_penalty=frequency)
        return replace(changed, prompt_ignore_length=WHOLE_PROMPT)


@dataclass(frozen=True, eq=False)
class LoraExtra:
    """A part of an adapter that has no row in the tensor form: a bias, a norm, something of the embedding or
    the head.

    name: as `manylora.lora.extras` lists them.
    values: [n] or [rows, columns], of the types of `LoraInput.weights`, the scaling in them.
    token_ids: of a matrix that has rows for these tokens only; ascending.
    """

    name: str
    values: np.ndarray
    token_ids: tuple[int, ...] = ()

    @classmethod
    def invocation(cls, token_ids: Iterable[int]) -> LoraExtra:
        """Of an activated LoRA, which acts from the last of these sequences in the prompt on; no values."""
        return cls(INVOCATION, np.empty(0, np.float32), tuple(token_ids))


@dataclass(frozen=True, eq=False)
class LoraInput:
    """The adapter part of a request, as it came.

    task_id: unsigned 64-bit identity the client uses for this adapter.
    weights: [1, rows, W], float32, float16, 2-byte void ("V2", the bits of bfloat16) or 1-byte void ("V1", of
             float8_e4m3fn, which comes from files and crosses no wire); None when cached.
    config:  [1, rows, 3 or 4] int32, columns module id, layer, rank[, is_dora]; None when cached.
    name:    of an adapter in the server's catalog, in place of all of these.
    source:  what kind of checkpoint `name` must be, "hf" or "nemo"; None: whatever it is.
    extras:  parts of the adapter beside its tensors; they come from files, and only INVOCATION crosses wires.
    checked: the adapter that the engine's own store made of these tensors before, or of files: then nothing
             is checked and digested again.
    scales:  [rows] float32, what each row's B A is multiplied by, of float8_e4m3fn weights; None: 1.
    version: which one of its name this content is, where the caller counts them; 0: the engine does.
    follow:  go on with newer versions of the name, from one step to the next.
    Shapes and contents are checked by `manylora.lora.tensors`, not here.
    """

    task_id: int | None
    weights: np.ndarray | None = None
    config: np.ndarray | None = None
    name: str | None = None
    source: str | None = None
    extras: tuple[LoraExtra, ...] = ()
    checked: object | None = None
    scales: np.ndarray | None = None
    version: int = 0
    follow: bool = False

    @property
    def label(self) -> str:
        """What versions are counted under: the name, else the id."""
        return str(self.task_id) if self.name is None else self.name

    def without_tensors(self) -> LoraInput:
        """The same adapter, by what identifies it."""
        bare = {"weights": None, "config": None, "extras": (), "checked": None, "scales": None}
        return replace(self, **bare) if self.has_tensors else self  # type: ignore[arg-type]

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens from which on an activated LoRA acts; none: the adapter acts everywhere."""
        return next((extra.token_ids for extra in self.extras if extra.name == INVOCATION), ())

    @property
    def has_tensors(self) -> bool:
        """True when the request brought tensors (possibly only one of the two, which is an error later), or
        what was made of them."""
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
    """Several adapters that act together, or one with a scale. Made by `mix`.

    members: each with what its B A is multiplied by; of float32, and neither 0 nor, of one alone, 1.
    """

    members: tuple[tuple[LoraInput, float], ...]

    @property
    def task_ids(self) -> list[int]:
        return [number for lora, _ in self.members for number in lora.task_ids]

    @property
    def has_tensors(self) -> bool:
        """Whether any has."""
        return any(lora.has_tensors for lora, _ in self.members)

    def without_tensors(self) -> LoraMix:
        """The same adapters, by what identifies them."""
        return self.map(LoraInput.without_tensors)

    def map(self, change: Callable[[LoraInput], LoraInput]) -> LoraMix:
        """The same with other members in place of these."""
        return LoraMix(tuple((change(lora), scale) for lora, scale in self.members))


def mix(members: Sequence[tuple[LoraInput, float]], field: str = "lora") -> LoraInput | LoraMix | None:
    """What a request asks for that names these adapters with these scales; None: the base model.

    An adapter that is named twice has the sum of its scales, as with PEFT, and with 0 takes no part.
    field: which names them. Raises RequestError.
    """
    _require(len(members) <= MAX_MIXED, field, f"must name at most {MAX_MIXED} adapters", len(members))
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
    """In float32, as kernels have it."""
    ok = isfinite(value) and abs(value) <= MAX_SCALE
    _require(ok, field, f"must have scales that are finite, of at most {MAX_SCALE:g} up or down", value)
    return float(np.float32(value))


@dataclass(frozen=True)
class Retention:
    """How long the KV blocks of a prompt and its output are kept for reuse, from 0 to 100; 35 is usual.

    ranges: (first token, token after the last or None, priority, milliseconds or None) of the prompt.
    """

    ranges: tuple[tuple[int, int | None, int, int | None], ...] = ()
    decode_priority: int = 35
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        name, count = "retention_token_range_starts", len(self.ranges)
        _require(count <= MAX_RANGES, name, f"must be at most {MAX_RANGES}", count)
        for start, end, priority, duration in self.ranges:
            _require(start >= 0, name, "must be >= 0", start)
            after = end is None or end > start
            _require(after, "retention_token_range_ends", f"must be > {start} or -1", end)
            _priority("retention_token_range_priorities", priority, duration)
        _priority("retention_decode_priority", self.decode_priority, self.decode_duration_ms)


@dataclass(frozen=True)
class ActivatedTokens:
    """Tokens of a request with an activated LoRA, of prompt and output together.

    before: where it does not act, as in the base model. shared: of these, the ones whose KV blocks were
    there, made for whomever. acted: the others, from its invocation on; 0 without one.
    """

    before: int
    shared: int
    acted: int


@dataclass(frozen=True)
class RequestMetrics:
    """Times in nanoseconds of one monotonic clock, 0: not yet; counts of KV blocks and of draft tokens.

    kv_reused_blocks: of the prompt, those that were there. kv_taken_blocks: the others, generated tokens not
    counted; kv_new_blocks: those of them for which nothing known had to go.
    """

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    kv_new_blocks: int = 0
    kv_taken_blocks: int = 0
    kv_reused_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    adapter_tier: str = ""  # where the adapter was found: device, host, disk, wire; empty without one
    activated: ActivatedTokens | None = None  # of an activated LoRA


@dataclass(frozen=True)
class Pooling:
    """What a request wants of its prompt in place of new tokens: hidden states behind the final norm.

    mode: last, cls (the first), mean, or all tokens. head: they go through a classification head, the
    adapter's own or else the model's, after `last`, `cls` and `mean`. first: tokens of the first of two texts
    in the prompt, which models with token types tell apart; 0: there is one text.
    """

    mode: str = "last"
    head: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        _require(
            self.mode in POOLING_MODES, "pooling", f"must be one of {', '.join(POOLING_MODES)}", self.mode
        )


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue, under one adapter, several, or none.

    request_id: the client's own, for logs and `stop`; may be empty or repeated, the engine never keys by it.
    prompt:     token ids, at least one. Ids from the vocabulary's size on are rows of prompt_table.
    encoder_prompt: of an encoder-decoder model: what the encoder reads; `prompt` is then the decoder's, empty
                for the model's own start. Without it `prompt` is for the encoder.
    streaming:  True: an Event for every step with new tokens; False: one Event for each finished sequence.
    draft:      a guess at the next tokens; those that the model confirms are taken in one step.
    prompt_table: [n, hidden_size] float16 or float32, embeddings for the ids beyond the vocabulary.
    cache_salt: requests share KV blocks of equal beginnings only where this is equal too.
    pooling:    what is wanted in place of new tokens; of `params` nothing counts then. None: new tokens.
    """

    prompt: tuple[int, ...]
    params: SamplingConfig = field(default_factory=SamplingConfig)
    lora: LoraInput | LoraMix | None = None
    streaming: bool = False
    request_id: str = ""
    draft: tuple[int, ...] = ()
    prompt_table: np.ndarray | None = None
    retention: Retention | None = None
    encoder_prompt: tuple[int, ...] = ()
    cache_salt: str = ""
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            _check_pooled(self)
        if self.params.beam_width > 1:
            if self.streaming:
                raise RequestError("streaming needs beam_width 1: beams may still change their beginning")
            if self.draft:
                raise RequestError("draft_input_ids need beam_width 1")
            if isinstance(self.lora, LoraInput) and self.lora.follow:
                raise RequestError("lora_version follow needs beam_width 1: beams keep the version they have")

    @cached_property
    def table_digest(self) -> str:
        """Of prompt_table; empty without one. Made once for all sequences."""
        if self.prompt_table is None:
            return ""
        return blake2b(np.ascontiguousarray(self.prompt_table).data, digest_size=20).hexdigest()


@dataclass(frozen=True)
class AdapterVersion:
    """The content of an adapter that made the output tokens from `start` on, up to the next version's.

    name: as in `LoraInput.label`. number: counts the contents that the name has had, from 1.
    """

    name: str
    number: int
    digest: str
    start: int = 0


@dataclass(frozen=True)
class Beam:
    """One result of a beam search; log_probs as in Event. cum_log_prob counts the end id too."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    cum_log_prob: float


@dataclass(slots=True, eq=False)  # not frozen, which takes longer to make: a stream has one for each token
class Event:
    """New tokens of one sequence of a request, or its end.

    token_ids: new since the last event of this sequence (all of them when not streaming); the prompt never.
    log_probs: natural-log probabilities of `token_ids`, same length; empty unless asked for. Taken after
               temperature and penalties, before the top-k and top-p cuts.
    finish_reason: None while the sequence goes on.
    last: True on exactly one event, the final one of the request.
    error: set exactly when finish_reason is ERROR.
    beams: of a beam search, the best first; token_ids is empty then.
    context_logits: [prompt, vocab] float32, on the first event, when asked for.
    generation_logits: [output, vocab] float32, on the last event of the sequence, when asked for; of a stream
               [len(token_ids), vocab] on each of its events.
    pooled: float32, of a request with a pooling: [n], or [prompt, n] of all tokens.
    metrics: on the last event of each sequence, and on every event of a stream, where they are those of the
             first event until the last.
    versions: of the adapter, for all of the sequence's tokens so far; empty for the base model.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    sequence_index: int = 0
    finish_reason: FinishReason | None = None
    last: bool = False
    error: Exception | None = None
    beams: tuple[Beam, ...] = ()
    context_logits: np.ndarray | None = None
    generation_logits: np.ndarray | None = None
    pooled: np.ndarray | None = None
    metrics: RequestMetrics | None = None
    versions: tuple[AdapterVersion, ...] = ()


Sink = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread; must not block and must not raise."""


def _priority(name: str, priority: int, duration: int | None) -> None:
    _require(0 <= priority <= 100, name, "must be from 0 to 100", priority)
    name = name.replace("priorit", "duration_ms of priorit")
    _require(duration is None or duration >= 0, name, "must be >= 0 or -1", duration)


def _check_pooled(request: Request) -> None:
    params = request.params
    logits = params.return_context_logits or params.return_generation_logits or params.return_log_probs
    wrong = {
        "streaming": request.streaming,
        "draft_input_ids": request.draft,
        "beam_width": params.beam_width > 1,
        "num_return_sequences": params.num_return_sequences > 1,
        "guided_decoding_guide": params.guide,
        "logits or log probabilities": logits,
    }
    for name, value in wrong.items():
        if value:
            raise RequestError(f"a request for pooled outputs generates no tokens: leave {name} out")


def _require(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise RequestError(f"{name} {rule}, got {value}")


def _check_words(name: str, words: tuple[tuple[int, ...], ...]) -> None:
    _require(len(words) <= MAX_WORDS, name, f"must be at most {MAX_WORDS} words", len(words))
    size = sum(map(len, words))
    _require(size <= MAX_WORD_TOKENS, name, f"must have at most {MAX_WORD_TOKENS} tokens, all together", size)
    _require(all(words), name, "must not hold an empty word", words)

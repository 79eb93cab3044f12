"""SamplingConfig: how a request is decoded. Guide: a constraint on its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from manylora.errors import RequestError


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises RequestError unless ok."""
    if not ok:
        raise RequestError(f"{name} {rule}, got {value}")


MAX_SEED = 2**64 - 1
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
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "lark_grammar", "llguidance")
COUNTS = (
    "max_tokens", "end_id", "top_k", "top_p_reset_id", "prompt_ignore_length", "min_tokens",
    "num_return_sequences", "beam_width",
)  # fmt: skip


@dataclass(frozen=True)
class Guide:
    """A constraint on the output: any JSON, a JSON schema, a regular expression, or a grammar in EBNF, in
    Lark or in llguidance's JSON form.
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
        for ok, name, rule, value in self._rules():
            require(ok, name, rule, value)
        if self.beam_width > 1 and self.guide is not None:
            raise RequestError("Guided decoding does not support with beam search.")
        if self.beam_width > 1 and self.return_generation_logits:
            raise RequestError("return_generation_logits needs beam_width 1: beams share no row of logits")
        if self.logit_bias is not None:
            finite = bool(np.isfinite(self.logit_bias).all())
            require(finite, "embedding_bias", "must be finite", "a NaN or infinity")
        _check_words("stop_words", self.stop_words)
        _check_words("bad_words", self.bad_words)

    def _rules(self) -> Iterator[tuple[bool, str, str, object]]:
        """For each parameter: whether it is valid, its name, what it must be, and its value."""
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
        """The same with the penalties of OpenAI and vLLM: presence and frequency are counted only over the
        output, and subtracted before division by the temperature.
        """
        if not (self.presence_penalty or self.frequency_penalty):
            return self
        presence, frequency = self.presence_penalty / self.divisor, self.frequency_penalty / self.divisor
        changed = replace(self, presence_penalty=presence, frequency_penalty=frequency)
        return replace(changed, prompt_ignore_length=WHOLE_PROMPT)


def _check_words(name: str, words: tuple[tuple[int, ...], ...]) -> None:
    require(len(words) <= MAX_WORDS, name, f"must be at most {MAX_WORDS} words", len(words))
    size = sum(map(len, words))
    require(size <= MAX_WORD_TOKENS, name, f"must have at most {MAX_WORD_TOKENS} tokens, all together", size)
    require(all(words), name, "must not hold an empty word", words)

"""PARAMETERS, from which every entry point takes its names; SamplingParams, with TensorRT-LLM's fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from manylora.request import MOST, MOST_FLOAT, Guide


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter that is a single value, and what each entry point calls it.

    name: field of SamplingConfig and of SamplingParams; key in HTTP bodies, in `sampling_parameters` of
    `vllm_model` and in generation_config.json; input sampling_param_NAME of `llmapi`. default, least, most:
    in HTTP bodies; the bounds apply to generation_config.json, too. Where another name is empty, it is this
    one: tensor: input of `tensorrt_llm`. text: input of `tensorrt_llm_bls` and of the ensemble. option: key
    of Ollama's options, with its default. anthropic_most: Anthropic's bound. without: entry points that do
    not take it. draws: it only affects which of the likely tokens is drawn, so beam search does without.
    """

    name: str
    kind: type[bool] | type[int] | type[float]
    default: bool | float | None = None
    least: float | None = None
    most: float | None = None
    tensor: str = ""
    text: str = ""
    option: str = ""
    option_default: float | None = None
    anthropic_most: float | None = None
    without: tuple[str, ...] = ()
    draws: bool = False

    def __post_init__(self) -> None:
        for names in ("tensor", "text", "option"):
            object.__setattr__(self, names, getattr(self, names) or self.name)


ENTRY_POINTS = ("bls", "llmapi", "vllm", "http", "ollama", "anthropic", "files")
"""Of PARAMETERS. LLM and `tensorrt_llm` take all. files: generation_config.json of models and adapters."""
NOT_BLS = ("llmapi", "vllm", "http", "ollama", "anthropic", "files")
PARAMETERS = (
    Parameter("temperature", float, 1.0, 0, 100, option_default=0.8, anthropic_most=1, draws=True),
    Parameter("top_p", float, 1.0, 0, 1, "runtime_top_p", option_default=0.9, draws=True),
    Parameter("top_k", int, -1, -1, MOST, "runtime_top_k", option_default=40, draws=True),
    Parameter("min_p", float, 0.0, 0, 1, without=("bls", "llmapi", "anthropic"), draws=True),
    Parameter("typical_p", float, 1.0, 0.001, 1, without=("bls", "llmapi", "vllm", "anthropic"), draws=True),
    Parameter("use_drafts", bool, True, without=("bls", "llmapi", "vllm", "ollama", "anthropic", "files")),
    Parameter(
        "repetition_penalty", float, 1.0, 0.001, 100, option="repeat_penalty", without=("llmapi", "anthropic")
    ),
    Parameter("presence_penalty", float, 0.0, -2, 2, without=("anthropic",)),
    Parameter("frequency_penalty", float, 0.0, -2, 2, without=("anthropic",)),
    Parameter(
        "min_tokens", int, 0, 0, MOST, "min_length", "min_length", without=("llmapi", "ollama", "anthropic")
    ),
    Parameter(
        "seed", int, None, -(2**63), 2**64 - 1, "random_seed", "random_seed",
        without=("ollama", "anthropic", "files"),
    ),
    # For these there is no usual name elsewhere.
    Parameter("prompt_ignore_length", int, without=NOT_BLS),
    Parameter("length_penalty", float, tensor="len_penalty", without=NOT_BLS),
    Parameter("top_p_min", float, tensor="runtime_top_p_min", without=ENTRY_POINTS),
    Parameter("top_p_decay", float, tensor="runtime_top_p_decay", without=ENTRY_POINTS),
    Parameter("early_stopping", bool, without=ENTRY_POINTS),
    Parameter("beam_search_diversity_rate", float, without=ENTRY_POINTS),
)  # fmt: skip
"""A new one also needs its field in SamplingConfig and in SamplingParams, and its effect in the sampler."""


OF_DRAWING = tuple(one.name for one in PARAMETERS if one.draws)


def parameters_of(entry_point: str) -> list[Parameter]:
    """Those that an entry point takes."""
    return [one for one in PARAMETERS if entry_point not in one.without]


@dataclass(frozen=True)
class GuidedDecodingParams:
    """Set exactly one field; otherwise raises ValueError. A guide that does not compile fails its request.

    json: a JSON schema, as text, a mapping, or a pydantic model. regex: matches the whole output. grammar:
    EBNF in llama.cpp's notation, starting at `root`. json_object: any JSON value. structural_tag: JSON.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "regex", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        for name in names[1:]:
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r:.80}")
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            named = f": {', '.join(given)}" if given else ""
            raise ValueError(f"GuidedDecodingParams takes exactly one guide, got {len(given)}{named}")
        self.guide()

    def guide(self) -> Guide:
        """The guide in the engine's form."""
        if self.json_object:
            return Guide("json")
        if self.regex is not None:
            return Guide("regex", self.regex)
        if self.grammar is not None:
            return Guide("ebnf_grammar", self.grammar)
        if self.structural_tag is not None:
            return Guide("structural_tag", self.structural_tag)
        schema = self.json
        if not isinstance(schema, str | Mapping):
            make = getattr(schema, "model_json_schema", None)
            if make is None:
                raise ValueError(f"json must be a schema or a pydantic model, got {schema!r:.80}")
            schema = make()
        return Guide("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value are valid Unicode: an escape can make half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


# Fields that are not implemented, and the values that are accepted.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "prompt_logprobs": (None,),
    "exclude_input_from_output": (True,),
    "spaces_between_special_tokens": (True,),
    "logits_processor": (None,),
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = bool(isinstance(value, Real) and not isinstance(value, bool))
    return is_number and abs(value) <= MOST_FLOAT


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_ | Integral) and value in (0, 1)


def _is_list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple | np.ndarray) and all(map(kind, value))


TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (_is_flag, "True or False"),
    "str | list[str]": (
        lambda one: _is_text(one) or _is_list_of(_is_text)(one),
        "a text or a list of texts, of valid Unicode",
    ),
    "list[int]": (_is_list_of(lambda one: _is_whole(one) and 0 <= one <= MOST), "a list of token ids"),
}
"""By a field's annotation: a check of the value's type, and what it must be."""
LEAST = {"max_tokens": 1, "n": 1, "best_of": 1, "end_id": -1, "truncate_prompt_tokens": 1}
LEAST |= dict.fromkeys(("top_k", "min_tokens", "logprobs", "prompt_ignore_length"), 0)
FLAGS = ("early_stopping",)  # numbers that may be True or False


@dataclass
class SamplingParams:
    """How a prompt is continued. Lengths in tokens. None is the engine's default.

    Greedy unless `temperature`, `top_k` or `top_p` asks for sampling. Checked when created and again when
    used. Raises ValueError, also for fields of TensorRT-LLM that this engine does not implement.

    end_id: generation stops at this token, which is not part of the output. None: the model's; -1: none.
    stop, stop_token_ids: end the output, and are part of it only with include_stop_str_in_output. bad,
    bad_token_ids: texts and tokens that are never generated; texts as the tokenizer splits them.
    repetition_penalty: > 1 lowers the logits of tokens in prompt and output. presence_penalty,
    frequency_penalty: subtracted from them, once or per occurrence, after the temperature.
    prompt_ignore_length: ignore this many tokens at the prompt's start for these two. min_p: exclude tokens
    less probable than this factor times the most probable one. typical_p: of the tokens that are left, keep
    those whose information (-log p) is nearest to the expected one, until their probabilities add up to it.
    min_tokens: nothing ends the output before. n, best_of: return the n of best_of samples with the highest
    cumulative log probability, best first.
    use_beam_search: the n best of best_of beams, by log probability / length ** length_penalty.
    early_stopping: 1 ends when best_of beams have ended, 0 when no other can become better.
    beam_search_diversity_rate: rank a beam's n-th best token n * rate lower. top_p_min, top_p_decay,
    top_p_reset_ids: top_p is multiplied by top_p_decay after every token, down to top_p_min, and is reset
    after the token top_p_reset_ids. embedding_bias: [vocabulary or fewer], added to the logits.
    guided_decoding: a constraint on the output. return_context_logits, return_generation_logits: for each
    prompt token, and for each output token. logprobs: 0: of each output token. 1: the same, for greedy
    decoding, where that is the most probable one. truncate_prompt_tokens: use only this many, from the end.
    use_drafts: False: no n-gram drafts. seed: None is 0.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    use_drafts: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        silent = self.temperature is None and self.top_k is None and self.top_p is None
        chosen = silent or self.temperature == 0 or self.top_k == 1 or self.top_p == 0
        return not self.use_beam_search and chosen

    @property
    def num_samples(self) -> int:
        """Number of continuations to generate, or of beams: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def bad_texts(self) -> list[str]:
        return [self.bad] if isinstance(self.bad, str) else list(self.bad or ())

    def check(self) -> None:
        """Raises ValueError for values that are wrong, not implemented, or cannot be combined."""
        for name, accepted in IGNORED_FIELDS.items():
            value = getattr(self, name)
            is_scalar = isinstance(value, bool | int | float | str)  # == of arrays compares each element
            if not any(value is other or (is_scalar and value == other) for other in accepted):
                raise ValueError(f"SamplingParams: {name} is not supported, got {value!r}; leave it out")
        self._check_types()
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.num_samples > 1 and self.greedy and not self.top_p:  # with a top_p equal outputs are wanted
            raise ValueError(
                "Greedy decoding in the LLM API does not allow multiple returns. Ask for sampling with "
                f"temperature, top_k or top_p, got best_of={self.num_samples}"
            )
        for name, share in (("min_p", self.min_p), ("top_p", self.top_p)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {share}")
        if self.early_stopping not in (None, 0, 1):
            raise ValueError(f"early_stopping must be None, 0 or 1, got {self.early_stopping}")
        for name in ("guided_decoding", "return_generation_logits"):
            if self.use_beam_search and getattr(self, name):
                raise ValueError(f"use_beam_search cannot be combined with {name}")
        guide = self.guided_decoding
        if not (guide is None or isinstance(guide, GuidedDecodingParams)):
            raise ValueError(f"guided_decoding must be a GuidedDecodingParams, got {guide!r:.80}")
        for name, texts in (("stop", self.stop_texts), ("bad", self.bad_texts)):
            if not all(texts):
                raise ValueError(f"{name} must be a text or a list of texts, none of them empty")
        if self.logprobs is not None and self.logprobs > int(self.greedy):
            raise ValueError(
                f"logprobs must be None or 0, or 1 with greedy decoding, got {self.logprobs}: "
                "only the log probability of the tokens of the output is known"
            )

    def _check_types(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            kind = str(field.type).removesuffix(" | None")
            if kind not in TYPES or (value is None and kind != field.type):
                continue
            right, wanted = TYPES["bool"] if name in FLAGS and _is_flag(value) else TYPES[kind]
            if not right(value):
                raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")
            if kind == "int" and name != "seed" and value > MOST:
                raise ValueError(f"{name} must be <= {MOST}, got {value!r:.80}")

"""Converts the LLM API's SamplingParams to the engine's, and to stop rules applied above the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from manylora import request as engine
from manylora.generation.defaults import GenerationDefaults
from manylora.generation.sampling import OF_DRAWING, SamplingParams
from manylora.generation.tokenizer import Tokenizer

# Fields with the same name and meaning in both classes are copied; None leaves the engine's default.
CONVERTED_FIELDS = {"end_id", "top_k", "top_p", "early_stopping"}
COPIED_FIELDS = {f.name for f in fields(SamplingParams)} & {f.name for f in fields(engine.SamplingConfig)}
COPIED_FIELDS -= CONVERTED_FIELDS
FLOATS = {f.name for f in fields(SamplingParams) if str(f.type).startswith("float")}


@dataclass(frozen=True)
class StopRules:
    """When an output ends, and how its text is made. end_ids: never part of it. ids: stop token ids, with the
    reasons. texts: end it wherever they appear. min_tokens: nothing ends it before. include: keep stop ids
    and texts. shown: special tokens that are part of the text in any case.
    """

    end_ids: frozenset[int] = frozenset()
    ids: Mapping[int, int | str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Decoding:
    """How one prompt is continued. n: number of outputs to return, out of the engine's num_results.

    top: number of alternatives per token, from logits; None: no log probabilities. prompt_top: the same for
    the prompt. prompt_only: the engine generates one token that is not shown. cache_salt: as in `Request`.
    """

    params: engine.SamplingConfig
    rules: StopRules
    n: int
    logprobs: bool
    top: int | None = None
    prompt_top: int | None = None
    prompt_only: bool = False
    cache_salt: str = ""

    @property
    def num_results(self) -> int:
        """Number of outputs that the engine generates: beams or samples."""
        return max(self.params.beam_width, self.params.num_return_sequences)

    def within(self, num_tokens: int) -> Decoding:
        """At most this many new tokens, so that truncated beams are recognised. Unchanged for 0 or less."""
        if not 0 < num_tokens < self.params.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=num_tokens))

    @property
    def stepwise(self) -> bool:
        """Whether stop rules must be checked after every step because the engine cannot apply them itself."""
        rules = self.rules
        return bool(rules.texts or (rules.min_tokens and (rules.ids or rules.end_ids)))


def with_defaults(
    params: SamplingParams, defaults: GenerationDefaults, *, own_length: bool
) -> SamplingParams:
    """The same with defaults for fields that are None, except in beam search those of sampling. own_length:
    the caller set `max_tokens`. Raises ValueError if they do not fit the other fields.
    """
    skipped = OF_DRAWING if params.use_beam_search else ()
    unset = [name for name in defaults.fields if name not in skipped and getattr(params, name) is None]
    more = {name: defaults.fields[name] for name in unset if defaults.fields[name] is not None}
    if "top_k" in more:
        more["top_k"] = max(0, more["top_k"])
    if not own_length and defaults.max_tokens is not None:
        more["max_tokens"] = defaults.max_tokens
    if not more:
        return params
    made = replace(params, **more)
    if "min_tokens" in more and more["min_tokens"] > made.max_tokens:
        made.min_tokens = made.max_tokens
    return made


def decoding_of(
    params: SamplingParams, tokenizer: Tokenizer | None, model_end_ids: Sequence[int]
) -> Decoding:
    """tokenizer: None if prompts are token ids. Raises ValueError, and RequestError for single values."""
    params.check()
    end_ids: list[int] = []  # the first is the engine's end_id, the others become stop words
    if params.end_id is not None and params.end_id != -1 and not params.ignore_eos:
        end_ids = [params.end_id]
    elif params.end_id is None and not params.ignore_eos:
        named = tokenizer.eos_id if tokenizer else None
        end_ids = list(dict.fromkeys([*([] if named is None else [named]), *model_end_ids]))
    stop_ids, stop_texts = _stops(params, tokenizer)
    rules = StopRules(
        end_ids=frozenset(end_ids[1:]),
        ids=stop_ids,
        texts=stop_texts,
        include=params.include_stop_str_in_output,
        min_tokens=params.min_tokens or 0,
        detokenize=params.detokenize,
        skip_special_tokens=params.skip_special_tokens,
    )
    engine_params = _engine_params(params, rules, end_ids, _bad_words(params, tokenizer))
    decoding = Decoding(engine_params, rules, params.n, params.logprobs is not None)
    if params.use_beam_search and decoding.stepwise:
        raise ValueError(
            "use_beam_search cannot be combined with stop texts, nor with min_tokens and several end or stop "
            "tokens: beams are looked at when they are finished; use stop_token_ids"
        )
    return decoding


def _engine_params(
    params: SamplingParams, rules: StopRules, end_ids: list[int], bad_words: tuple[tuple[int, ...], ...]
) -> engine.SamplingConfig:
    given = {name: getattr(params, name) for name in COPIED_FIELDS}
    # torch would treat a whole number as an integer, and NumPy numbers are not accepted.
    given |= {name: float(given[name]) for name in FLOATS & given.keys() if given[name] is not None}
    # The engine's stop words ignore min_tokens. With min_tokens the text thread stops the output instead.
    words = () if rules.min_tokens else tuple((i,) for i in (*end_ids[1:], *rules.ids))
    samples, beams = params.num_samples, params.use_beam_search
    # The engine samples if top_k or top_p ask for it. Here a temperature does so, too.
    unlimited = not (params.greedy or params.top_k or params.top_p)
    return engine.SamplingConfig(
        **{name: value for name, value in given.items() if value is not None},
        end_id=end_ids[0] if end_ids else None,
        top_k=None if beams else 1 if params.top_p == 0 else params.top_k,
        top_p=None if beams else 1.0 if unlimited else params.top_p,
        top_p_reset_id=params.top_p_reset_ids,
        stop_words=words,
        bad_words=bad_words,
        num_return_sequences=1 if beams else samples,
        beam_width=samples if beams else 1,
        early_stopping=params.early_stopping is None or bool(params.early_stopping),
        logit_bias=None if params.embedding_bias is None else _bias(params.embedding_bias),
        guide=params.guided_decoding.guide() if params.guided_decoding else None,
        return_log_probs=params.logprobs is not None or samples > params.n,
    )


def _bias(values: Any) -> np.ndarray:
    """A list, an array or a tensor as float32 [vocabulary]."""
    try:
        bias = np.asarray(values.detach().float().cpu() if hasattr(values, "detach") else values, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"embedding_bias must be a list, array or tensor of numbers: {error}") from None
    if bias.ndim != 1:
        raise ValueError(f"embedding_bias must have one dimension, got shape {bias.shape}")
    return bias


def _stops(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[dict[int, int | str], tuple[str, ...]]:
    """Stop ids with their reasons, and texts. One special token is an id: the text may omit it."""
    ids: dict[int, int | str] = {}
    texts: list[str] = []
    for text in params.stop_texts:
        if tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this LLM has none: use stop_token_ids")
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) == 1 and not tokenizer.decode(encoded, skip_special_tokens=True):
            ids[encoded[0]] = text
        else:
            texts.append(text)
    for token in params.stop_token_ids or ():
        ids.setdefault(token, token)
    return ids, tuple(texts)


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each text as written and after a space: a word has other tokens within a sentence than at its start."""
    words: dict[tuple[int, ...], None] = {}
    for text in params.bad_texts:
        if tokenizer is None:
            raise ValueError("bad needs a tokenizer, and this LLM has none: use bad_token_ids")
        for form in (text, f" {text}"):
            words[tuple(tokenizer.encode(form, add_special_tokens=False))] = None
    for token in params.bad_token_ids or ():
        words[token,] = None
    return tuple(words)

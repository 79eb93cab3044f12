"""SamplingParams of the API to the engine's, and the rules that end an output outside the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from manylora import request as engine
from manylora.llmapi.sampling import SamplingParams
from manylora.text.tokenizer import Tokenizer

__all__ = ["Decoding", "StopRules", "decoding_of"]


@dataclass(frozen=True)
class StopRules:
    """When an output ends, and what of it is text.

    end_ids: end it and are never part of it. ids: end it, each with its stop reason. texts: end it wherever
    they appear. Nothing ends it before min_tokens tokens.
    """

    end_ids: frozenset[int] = frozenset()
    ids: Mapping[int, int | str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    include: bool = False  # stop ids and texts stay in the output
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Decoding:
    """How one prompt is continued. n: continuations to give back, of the engine's num_results."""

    params: engine.SamplingParams
    rules: StopRules
    n: int
    logprobs: bool

    @property
    def num_results(self) -> int:
        """Continuations that the engine makes: beams, or samples."""
        return max(self.params.beam_width, self.params.num_return_sequences)

    def within(self, room: int) -> Decoding:
        """At most `room` new tokens, where there is room at all: then it is known which beams are cut off."""
        limit = min(self.params.max_tokens, room)
        return replace(self, params=replace(self.params, max_tokens=limit)) if limit > 0 else self

    @property
    def stepwise(self) -> bool:
        """Whether the output must be looked at while it grows."""
        rules = self.rules
        return bool(rules.texts or (rules.min_tokens and (rules.ids or rules.end_ids)))


def decoding_of(
    params: SamplingParams, tokenizer: Tokenizer | None, model_end_ids: Sequence[int]
) -> Decoding:
    """tokenizer: None where prompts are token ids. Raises ValueError, and RequestError for single values."""
    params.check()
    end_ids = _end_ids(params, tokenizer, model_end_ids)
    stops, texts = _stops(params, tokenizer)
    min_tokens = params.min_tokens or 0
    rules = StopRules(
        end_ids=frozenset(end_ids[1:]),
        ids=stops,
        texts=texts,
        include=params.include_stop_str_in_output,
        min_tokens=min_tokens,
        detokenize=params.detokenize,
        skip_special_tokens=params.skip_special_tokens,
    )
    # The engine's stop words do not wait for min_tokens: then they are looked for as the output grows.
    words = () if min_tokens else tuple((i,) for i in (*end_ids[1:], *stops))
    samples, beams = params.num_samples, params.use_beam_search
    bias = params.embedding_bias
    engine_params = engine.SamplingParams(
        max_tokens=params.max_tokens,
        end_id=end_ids[0] if end_ids else None,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=None if beams else params.top_k,
        # top_k 0 lifts the limit and asks for sampling; without a top_p the engine would take it for greedy.
        top_p=None if beams else 1.0 if params.top_k == 0 and not params.top_p else params.top_p,
        min_p=_or(params.min_p, 0.0),
        top_p_min=_or(params.top_p_min, 1e-6),
        top_p_decay=_or(params.top_p_decay, 1.0),
        top_p_reset_id=params.top_p_reset_ids,
        seed=params.seed,
        repetition_penalty=_or(params.repetition_penalty, 1.0),
        presence_penalty=_or(params.presence_penalty, 0.0),
        frequency_penalty=_or(params.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        stop_words=words,
        bad_words=_bad_words(params, tokenizer),
        num_return_sequences=1 if beams else samples,
        beam_width=samples if beams else 1,
        length_penalty=_or(params.length_penalty, 0.0),
        early_stopping=params.early_stopping is None or bool(params.early_stopping),
        beam_search_diversity_rate=_or(params.beam_search_diversity_rate, 0.0),
        logit_bias=None if bias is None else _bias(bias),
        guide=params.guided_decoding.guide() if params.guided_decoding else None,
        return_log_probs=params.logprobs is not None or samples > params.n,
        return_context_logits=params.return_context_logits,
        return_generation_logits=params.return_generation_logits,
    )
    decoding = Decoding(engine_params, rules, params.n, params.logprobs is not None)
    if beams and decoding.stepwise:
        raise ValueError(
            "use_beam_search cannot be combined with stop texts, nor with min_tokens and several end or stop "
            "tokens: beams are looked at when they are finished; use stop_token_ids"
        )
    return decoding


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(values: Any) -> np.ndarray:
    """[vocabulary] float32, of a list, an array or a tensor."""
    bias = np.asarray(values.detach().float().cpu() if hasattr(values, "detach") else values, np.float32)
    if bias.ndim != 1:
        raise ValueError(f"embedding_bias must have one dimension, got shape {bias.shape}")
    return bias


def _end_ids(params: SamplingParams, tokenizer: Tokenizer | None, model: Sequence[int]) -> list[int]:
    """End tokens, the engine's own first."""
    if params.ignore_eos or params.end_id == -1:
        return []
    if params.end_id is not None:
        return [params.end_id]
    named = tokenizer.eos_id if tokenizer else None
    return list(dict.fromkeys([*([named] if named is not None else []), *model]))


def _stops(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[dict[int, int | str], tuple[str, ...]]:
    """Stop ids with their reasons, and stop texts. A special token is looked for as an id: the text of an
    output need not show it."""
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
    """As written and after a space: inside a sentence a word has other tokens than at its start."""
    words: dict[tuple[int, ...], None] = {}
    for text in params.bad_texts:
        if tokenizer is None:
            raise ValueError("bad needs a tokenizer, and this LLM has none: use bad_token_ids")
        for form in (text, f" {text}"):
            words[tuple(tokenizer.encode(form, add_special_tokens=False))] = None
    for token in params.bad_token_ids or ():
        words[token,] = None
    return tuple(words)

"""Converts the fields of a request body to the engine's sampling parameters, and to stop rules on text."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields, replace

import numpy as np

from manylora.config.model import ModelConfig
from manylora.generation.decoding import Decoding, decoding_of
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.openai.api.errors import FORMAT, ApiError, context_length, invalid_value, unsupported_field
from manylora.openai.api.guides import guide_of
from manylora.openai.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from manylora.request import Guide

DEFAULT_COMPLETION_TOKENS = 16  # the API's default; a chat may use the rest of the context
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy: dividing by them would overflow the logits
# Fields with the same name and meaning in a body and in the LLM API's SamplingParams are copied.
CONVERTED_FIELDS = {"max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "prompt_logprobs"}
COPIED_FIELDS = {f.name for f in fields(SamplingParams)} & set(CompletionRequest.model_fields)
COPIED_FIELDS -= CONVERTED_FIELDS
FORBIDDEN = -1e9  # added to logits of forbidden tokens; infinity is not allowed as a bias


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    max_seq_len: prompt and output, in tokens. max_sequences: outputs of all prompts together. logits_bytes:
    float32 logits of one prompt, needed for log probabilities with echo. max_samples: outputs of one prompt;
    the engine's batch size.
    """

    max_seq_len: int
    vocab_size: int
    max_sequences: int = 256
    logits_bytes: int = 2**28
    max_samples: int = 128


@dataclass(frozen=True)
class Shared:
    """Computed once for all prompts of a body. logit_bias: [vocabulary] float32. guide_field: the field that
    the guide came from.
    """

    logit_bias: np.ndarray | None
    guide: Guide | None
    guide_field: str = FORMAT


def shared_of(body: GenerationRequest, limits: Limits) -> Shared:
    """Raises ApiError."""
    field, guide = guide_of(body)
    return Shared(_logit_bias(body, limits.vocab_size), guide, field)


def plan(
    body: GenerationRequest,
    num_prompt: int,
    tokenizer: Tokenizer,
    model: ModelConfig,
    limits: Limits,
    shared: Shared | None = None,
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> Decoding:
    """num_prompt: number of prompt tokens. shared: computed if None. defaults: for fields that the body
    leaves out.

    Raises ApiError, and what `decoding_of` raises.
    """
    own_minimum = "min_tokens" in body.model_fields_set
    more = {name: value for name, value in defaults.fields.items() if name not in body.model_fields_set}
    body = body.model_copy(update=more)
    shared = shared or shared_of(body, limits)
    top, prompt_top = _num_alternatives(body), body.prompt_logprobs
    echo = isinstance(body, CompletionRequest) and body.echo
    shows_prompt = (echo and top is not None) or prompt_top is not None
    if model.encoder is not None:
        if echo or shows_prompt:
            name = "echo" if echo else "prompt_logprobs"
            raise unsupported_field(f"{name} is not supported on encoder-decoder models", name)
        num_prompt = 1  # the encoder reads the prompt; the decoder starts from its start token
    max_tokens, prompt_only = _max_tokens(body, num_prompt, limits, defaults.max_tokens)
    _check_samples(body, limits)
    _check_order(body)
    if shows_prompt:
        _check_logits(num_prompt, limits, "logprobs" if prompt_top is None else "prompt_logprobs")
    if body.min_tokens > max_tokens:
        if own_minimum:
            raise invalid_value("min_tokens must be at most max_tokens", "min_tokens")
        body = body.model_copy(update={"min_tokens": max_tokens})
    end_ids = model.eos_token_ids if defaults.end_ids is None else defaults.end_ids
    decoding = decoding_of(_sampling_params(body, max_tokens, top), tokenizer, end_ids)
    params = replace(
        decoding.params.with_output_penalties(),
        logit_bias=shared.logit_bias,
        guide=shared.guide,
        return_generation_logits=bool(top),
        return_context_logits=shows_prompt,
    )
    return replace(
        decoding,
        params=params,
        top=top,
        prompt_top=prompt_top,
        prompt_only=prompt_only,
        cache_salt=body.cache_salt or "",
    )


def _sampling_params(body: GenerationRequest, max_tokens: int, top: int | None) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(body, name) for name in COPIED_FIELDS if name in type(body).model_fields},
        max_tokens=max_tokens,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=1 if body.top_p == 0 else max(0, body.top_k),
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        logprobs=None if top is None else 0,
        bad=body.bad_words or None,
    )


def _check_order(body: GenerationRequest) -> None:
    """Refuse fields of vLLM that need another kind of server or response."""
    if body.priority != 0:
        reason = "priority: only 0 is supported, as adapters take turns: leave it out, or set it to 0"
        raise unsupported_field(reason, "priority")
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported_field("prompt_logprobs needs stream false", "prompt_logprobs")


def _check_samples(body: GenerationRequest, limits: Limits) -> None:
    """Check that n and best_of are consistent and fit the engine's batch."""
    best_of = body.best_of if isinstance(body, CompletionRequest) else None
    if body.stream and best_of is not None and best_of != body.n:
        raise unsupported_field("best_of other than n needs stream false", "best_of")
    if best_of is not None and best_of < body.n:
        raise invalid_value("best_of must be at least n", "best_of")
    if max(body.n, best_of or 0) > limits.max_samples:
        name = "n" if body.n > limits.max_samples else "best_of"
        raise invalid_value(f"{name} must be at most max_batch_size ({limits.max_samples})", name)


def _num_alternatives(body: GenerationRequest) -> int | None:
    """`Decoding.top`."""
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise invalid_value("top_logprobs needs logprobs true", "top_logprobs")
        return body.top_logprobs if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _max_tokens(
    body: GenerationRequest, num_prompt: int, limits: Limits, default: int | None = None
) -> tuple[int, bool]:
    """Number of tokens to generate, and `Decoding.prompt_only`. default: None: the API's."""
    wanted, field = body.max_tokens, "max_tokens"
    left = limits.max_seq_len - num_prompt
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        if wanted not in (None, body.max_completion_tokens):
            raise invalid_value("max_tokens and max_completion_tokens disagree: give one", field)
        wanted, field = body.max_completion_tokens, "max_completion_tokens"
    prompt_only = wanted == 0
    if prompt_only and not (isinstance(body, CompletionRequest) and body.echo):
        raise invalid_value(f"{field}: must be at least 1 without echo", field)
    if wanted is None:
        usual = left if isinstance(body, ChatRequest) else DEFAULT_COMPLETION_TOKENS
        wanted = min(default or usual, left)
    wanted = max(1, wanted)
    if wanted > left:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"{context_length(limits.max_seq_len)}. The prompt has {num_prompt}, and {wanted} more are "
            "asked for",
            "messages" if isinstance(body, ChatRequest) else "prompt",
        )
    return wanted, prompt_only


def _check_logits(num_prompt: int, limits: Limits, field: str) -> None:
    """Check the size: log probabilities of a prompt need a row of logits for each of its tokens at once."""
    if num_prompt * limits.vocab_size * 4 > limits.logits_bytes:
        most = limits.logits_bytes // (4 * limits.vocab_size)
        of = "with echo" if field == "logprobs" else "with it"
        raise invalid_value(f"{field}: at most {most} tokens in a prompt {of}", field)


def _logit_bias(body: GenerationRequest, vocab_size: int) -> np.ndarray | None:
    """[vocabulary] float32, which includes allowed_token_ids."""
    allowed = body.allowed_token_ids
    if not body.logit_bias and allowed is None:
        return None
    bias = np.zeros(vocab_size, np.float32)
    if allowed is not None:
        if max(allowed) >= vocab_size:
            raise invalid_value(
                "allowed_token_ids: one id is not in this model's vocabulary", "allowed_token_ids"
            )
        bias[:] = FORBIDDEN
        bias[allowed] = 0
    for key, value in body.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise invalid_value(f"logit_bias: {key[:20]!r} is not a token id of this model", "logit_bias")
        bias[int(key)] += value
    return bias

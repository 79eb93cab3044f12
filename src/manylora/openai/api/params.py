"""Fields of a body to how the engine decodes, and to what ends an output."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manylora.config.engine import ModelConfig
from manylora.llmapi.decoding import Decoding, decoding_of
from manylora.llmapi.sampling import SamplingParams
from manylora.openai.api.errors import ApiError
from manylora.openai.api.schema import ChatRequest, CompletionRequest, GenerationRequest, ResponseFormat
from manylora.openai.api.tools import json_guide, tool_use
from manylora.request import Guide
from manylora.text.tokenizer import Tokenizer

__all__ = ["Limits", "Plan", "Shared", "guide_of", "plan", "shared_of"]

COMPLETION_TOKENS = 16  # the API's default; a chat goes on to the end of the model's context
GUIDES = {  # type of response_format: the engine's type, and the field that holds the text
    "regex": ("regex", "regex"),
    "ebnf": ("ebnf_grammar", "ebnf"),
    "lark_grammar": ("lark_grammar", "lark_grammar"),
    "llguidance": ("llguidance", "grammar"),
}
GREEDY_BELOW = 1e-5  # a temperature that no longer leaves a choice, and would overflow the logits


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. logits_bytes: of the float32 logits of a prompt. max_samples: of one
    prompt: what the engine runs at once."""

    max_seq_len: int
    vocab_size: int
    max_sequences: int = 256
    logits_bytes: int = 2**28
    max_samples: int = 128


@dataclass(frozen=True)
class Plan:
    """How one prompt is continued. top: alternatives for each token, None: no log probabilities at all.

    prompt_only: the one token that the engine cannot do without is not shown.
    """

    decoding: Decoding
    top: int | None
    prompt_only: bool = False


@dataclass(frozen=True)
class Shared:
    """What all prompts of a body have in common and is dear to make."""

    logit_bias: np.ndarray | None
    guide: Guide | None


def shared_of(body: GenerationRequest, limits: Limits) -> Shared:
    """Raises ApiError."""
    return Shared(_logit_bias(body, limits.vocab_size), _guide(body))


def plan(
    body: GenerationRequest,
    num_prompt: int,
    tokenizer: Tokenizer,
    model: ModelConfig,
    limits: Limits,
    shared: Shared | None = None,
) -> Plan:
    """shared: where several prompts are planned. Raises ApiError, and what the engine's parameters raise."""
    shared = shared or shared_of(body, limits)
    top = _top(body)
    echo = isinstance(body, CompletionRequest) and body.echo
    if model.encoder is not None:
        if echo:
            raise ApiError(
                400, "unsupported_field", "echo is not supported on encoder-decoder models", "echo"
            )
        num_prompt = 1  # the prompt is the encoder's; the decoder has its start
    max_tokens, prompt_only = _max_tokens(body, num_prompt, limits)
    best_of = body.best_of if isinstance(body, CompletionRequest) else None
    if body.stream and best_of is not None and best_of != body.n:
        raise ApiError(400, "unsupported_field", "best_of other than n needs stream false", "best_of")
    if best_of is not None and best_of < body.n:
        raise ApiError(400, "invalid_value", "best_of must be at least n", "best_of")
    if max(body.n, best_of or 0) > limits.max_samples:
        name = "n" if body.n > limits.max_samples else "best_of"
        raise ApiError(
            400, "invalid_value", f"{name} must be at most max_batch_size ({limits.max_samples})", name
        )
    if echo and top is not None:
        _check_logits(num_prompt, limits)
    if body.min_tokens > max_tokens:
        raise ApiError(400, "invalid_value", "min_tokens must be at most max_tokens", "min_tokens")
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    params = SamplingParams(
        max_tokens=max_tokens,
        n=body.n,
        best_of=best_of,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=1 if body.top_p == 0 else max(0, body.top_k),
        min_p=body.min_p,
        seed=seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=None if top is None else 0,
    )
    decoding = decoding_of(params, tokenizer, model.eos_token_ids)
    engine = replace(
        decoding.params,
        logit_bias=shared.logit_bias,
        guide=shared.guide,
        return_generation_logits=bool(top),
        return_context_logits=echo and top is not None,
    )
    return Plan(replace(decoding, params=engine), top, prompt_only)


def guide_of(wanted: ResponseFormat | None) -> Guide | None:
    """Raises ApiError when a part is missing."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_guide({"type": "object"})
    if wanted.type == "json_schema":
        schema: Any = (wanted.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ApiError(
                400, "missing_field", "response_format.json_schema.schema is required", "response_format"
            )
        return json_guide(schema)
    kind, field = GUIDES[wanted.type]
    text = getattr(wanted, field)
    if text is None:
        raise ApiError(400, "missing_field", f"response_format.{field} is required", "response_format")
    return Guide(kind, text if isinstance(text, str) else json.dumps(text))


def _guide(body: GenerationRequest) -> Guide | None:
    use = tool_use(body) if isinstance(body, ChatRequest) else None
    return guide_of(body.response_format) if use is None else use.guide()


def _top(body: GenerationRequest) -> int | None:
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "invalid_value", "top_logprobs needs logprobs true", "top_logprobs")
        return body.top_logprobs if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _max_tokens(body: GenerationRequest, num_prompt: int, limits: Limits) -> tuple[int, bool]:
    """New tokens, and whether none of them is wanted."""
    wanted, field = body.max_tokens, "max_tokens"
    room = limits.max_seq_len - num_prompt
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        if wanted not in (None, body.max_completion_tokens):
            raise ApiError(
                400, "invalid_value", "max_tokens and max_completion_tokens disagree: give one", field
            )
        wanted, field = body.max_completion_tokens, "max_completion_tokens"
    prompt_only = wanted == 0
    if prompt_only and not (isinstance(body, CompletionRequest) and body.echo):
        raise ApiError(400, "invalid_value", f"{field}: must be at least 1 without echo", field)
    if wanted is None:
        wanted = max(1, room if isinstance(body, ChatRequest) else min(COMPLETION_TOKENS, room))
    if num_prompt + max(1, wanted) > limits.max_seq_len:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"The prompt has {num_prompt} tokens and {max(1, wanted)} more are asked for; the model's "
            f"context has {limits.max_seq_len}",
            "messages" if isinstance(body, ChatRequest) else "prompt",
        )
    return max(1, wanted), prompt_only


def _check_logits(num_prompt: int, limits: Limits) -> None:
    """Log probabilities of a prompt come from a row of logits for each of its tokens, all at once."""
    if num_prompt * limits.vocab_size * 4 > limits.logits_bytes:
        most = limits.logits_bytes // (4 * limits.vocab_size)
        reason = f"logprobs: at most {most} tokens in a prompt with echo"
        raise ApiError(400, "invalid_value", reason, "logprobs")


def _logit_bias(body: GenerationRequest, vocab_size: int) -> np.ndarray | None:
    if not body.logit_bias:
        return None
    bias = np.zeros(vocab_size, np.float32)
    for key, value in body.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise ApiError(
                400, "invalid_value", f"logit_bias: {key[:20]!r} is no token of this model", "logit_bias"
            )
        bias[int(key)] = value
    return bias

"""Converts a request body to a Decoding: sampling parameters, stop rules, and a guide."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from manylora.config.model import ModelConfig
from manylora.doors.http.api import errors, schema
from manylora.doors.http.api.errors import FORMAT, ApiError, context_length, invalid_value, unsupported_field
from manylora.doors.http.api.parsing import check_size
from manylora.doors.http.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from manylora.doors.http.api.tools import ToolUse, any_call, json_marks, reply_format, tool_use
from manylora.errors import RequestError
from manylora.generation.decoding import Decoding, decoding_of
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.generation.guides import after_thinking, choice_pattern, json_guide, or_calls
from manylora.generation.reply import ReplyFormat
from manylora.generation.reply_formats import CHOSEN_BY_TEMPLATE, Parsers
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
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

    max_sequences: of all prompts together; max_samples: of one. logits_bytes: float32 logits of one prompt,
    needed for log probabilities with echo. priorities: whether requests may have one.
    """

    max_seq_len: int
    vocab_size: int
    max_sequences: int = 256
    logits_bytes: int = 2**28
    max_samples: int = 128
    priorities: bool = False


@dataclass(frozen=True)
class Shared:
    """Computed once for all prompts of a body. guide_field: the field that the guide came from."""

    logit_bias: np.ndarray | None
    guide: Guide | None
    guide_field: str = FORMAT
    reply: ReplyFormat | None = None


def shared_of(
    body: GenerationRequest,
    limits: Limits,
    tokenizer: Tokenizer,
    prompt: str = "",
    parsers: Parsers = CHOSEN_BY_TEMPLATE,
) -> Shared:
    """prompt: the rendered template of a chat. Raises ApiError."""
    use = tool_use(body) if isinstance(body, ChatRequest) else None
    field, guide = guide_of(body, use)
    bias, reply = _logit_bias(body, limits.vocab_size), None
    if isinstance(body, ChatRequest):
        reply = reply_format(body, use, parsers, tokenizer.chat_template, prompt)
    if use is not None and guide is not None and field != TOOLS and guide.type != "structural_tag":
        with _naming(TOOLS):
            marks = json_marks(parsers, tokenizer.chat_template)
            guide = or_calls(guide, any_call(use.tools), marks, tokenizer.mark_id)
    if reply is not None and reply.thinking is not None:
        if guide is not None:
            with _naming(field):
                guide = after_thinking(guide, reply.thinking, reply.opened, tokenizer.mark_id)
        if isinstance(body, ChatRequest) and not body.separate_reasoning:
            reply = replace(reply, thinking=None) if use else None
    return Shared(bias, guide, field, reply)


def plan(
    body: GenerationRequest,
    num_prompt: int,
    tokenizer: Tokenizer,
    model: ModelConfig,
    limits: Limits,
    shared: Shared | None = None,
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> Decoding:
    """defaults: for fields that the body leaves out. Raises ApiError, and what `decoding_of` raises."""
    own_minimum = "min_tokens" in body.model_fields_set
    more = {name: value for name, value in defaults.fields.items() if name not in body.model_fields_set}
    body = body.model_copy(update=more)
    shared = shared or shared_of(body, limits, tokenizer)
    top, prompt_top = None, body.prompt_logprobs
    if isinstance(body, CompletionRequest):
        top = body.logprobs
    elif isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise invalid_value("top_logprobs needs logprobs true", "top_logprobs")
        top = body.top_logprobs if body.logprobs else None
    echo = isinstance(body, CompletionRequest) and body.echo
    shows_prompt = (echo and top is not None) or prompt_top is not None
    if model.encoder is not None:
        if echo or shows_prompt:
            name = "echo" if echo else "prompt_logprobs"
            raise unsupported_field(f"{name} is not supported on encoder-decoder models", name)
        num_prompt = 1  # the encoder reads the prompt; the decoder starts from its start token
    max_tokens, prompt_only = _max_tokens(body, num_prompt, limits, defaults.max_tokens)
    _check_support(body, limits)
    if shows_prompt and num_prompt * limits.vocab_size * 4 > limits.logits_bytes:
        most = limits.logits_bytes // (4 * limits.vocab_size)  # a row of logits for each token at once
        field, of = ("logprobs", "with echo") if prompt_top is None else ("prompt_logprobs", "with it")
        raise invalid_value(f"{field}: at most {most} tokens in a prompt {of}", field)
    if body.min_tokens > max_tokens:
        if own_minimum:
            raise invalid_value("min_tokens must be at most max_tokens", "min_tokens")
        body = body.model_copy(update={"min_tokens": max_tokens})
    end_ids = model.eos_token_ids if defaults.end_ids is None else defaults.end_ids
    sampling = SamplingParams(
        **{name: getattr(body, name) for name in COPIED_FIELDS if name in type(body).model_fields},
        max_tokens=max_tokens,
        temperature=0.0 if body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=1 if body.top_p == 0 else max(0, body.top_k),
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        logprobs=None if top is None else 0,
        bad=body.bad_words or None,
    )
    decoding = decoding_of(sampling, tokenizer, end_ids)
    params = replace(
        decoding.params.with_output_penalties(),
        logit_bias=shared.logit_bias,
        guide=shared.guide,
        return_generation_logits=bool(top),
        return_context_logits=shows_prompt,
    )
    shown = tokenizer.special_ids(shared.reply.shown) if shared.reply is not None else frozenset()
    return replace(
        decoding,
        params=params,
        rules=replace(decoding.rules, shown=shown) if shown else decoding.rules,
        top=top,
        prompt_top=prompt_top,
        prompt_only=prompt_only,
        cache_salt=body.cache_salt or "",
    )


def _check_support(body: GenerationRequest, limits: Limits) -> None:
    """Refuse samples that do not fit the engine's batch, and fields that need another server or response."""
    best_of = body.best_of if isinstance(body, CompletionRequest) else None
    if body.stream and best_of is not None and best_of != body.n:
        raise unsupported_field("best_of other than n needs stream false", "best_of")
    if best_of is not None and best_of < body.n:
        raise invalid_value("best_of must be at least n", "best_of")
    if max(body.n, best_of or 0) > limits.max_samples:
        name = "n" if body.n > limits.max_samples else "best_of"
        raise invalid_value(f"{name} must be at most max_batch_size ({limits.max_samples})", name)
    check_priority(body.priority, limits)
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported_field("prompt_logprobs needs stream false", "prompt_logprobs")


def check_priority(priority: int, limits: Limits) -> None:
    """Raises ApiError."""
    if priority and not limits.priorities:
        reason = "priority: this server does not order requests by it: it needs --scheduling-policy priority"
        raise unsupported_field(reason, "priority")


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
        reason = f"{context_length(limits.max_seq_len)}. The prompt has {num_prompt}, and {wanted} more are "
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise ApiError(400, "context_length_exceeded", reason + "asked for", field)
    return wanted, prompt_only


def _logit_bias(body: GenerationRequest, vocab_size: int) -> np.ndarray | None:
    """[vocabulary] float32, which includes allowed_token_ids."""
    allowed = body.allowed_token_ids
    if not body.logit_bias and allowed is None:
        return None
    bias = np.zeros(vocab_size, np.float32)
    if allowed is not None:
        if max(allowed) >= vocab_size:
            reason = "allowed_token_ids: one id is not in this model's vocabulary"
            raise invalid_value(reason, "allowed_token_ids")
        bias[:] = FORBIDDEN
        bias[allowed] = 0
    for key, value in body.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise invalid_value(f"logit_bias: {key[:20]!r} is not a token id of this model", "logit_bias")
        bias[int(key)] += value
    return bias


# Fields that constrain the output, by what they hold: for `_guide`.
GUIDES = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "ebnf_grammar",
}
TOOLS = "tools"
FORMATS = {  # response_format type -> the same, and its field
    "regex": ("regex", "regex"),
    "ebnf": ("ebnf_grammar", "ebnf"),
    "lark_grammar": ("lark_grammar", "lark_grammar"),
    "llguidance": ("llguidance", "grammar"),
}
SOME_SPACE = r"[ \n\t]{0,20}"  # without a limit, small models write nothing else
ANY_OBJECT = {"type": "object"}
OF_STRUCTURED = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")


def guide_of(body: GenerationRequest, use: ToolUse | None) -> tuple[str, Guide | None]:
    """The field that constrains the output, and its guide. Raises ApiError, also if two fields differ."""
    found = list(_guides(body))
    if use is not None:
        # If only tool calls are allowed, a text format has no effect. Some clients send both.
        found = [one for one in found if not (use.only_calls and one[0] == FORMAT)]
        with _naming(TOOLS):
            guide = use.guide()
        if not found:
            return TOOLS, guide
        if guide is not None and (use.only_calls or found[0][1].type == "structural_tag"):
            reason = f"tools and {found[0][0]} cannot be combined: leave one out"
            raise invalid_value(reason, found[0][0])
    for field, guide in found[1:]:
        if guide != found[0][1]:  # some clients send vLLM's newer and older field
            raise invalid_value(f"{found[0][0]} and {field} both bind the answer: give one", field)
    return found[0] if found else (FORMAT, None)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Raises ApiError that names the field, in place of a RequestError."""
    try:
        yield
    except RequestError as error:
        raise errors.renamed(errors.as_api_error(error), {FORMAT: field}) from error


def _guides(body: GenerationRequest) -> Iterator[tuple[str, Guide]]:
    """Of each field that is set. Raises ApiError."""
    for field in (FORMAT, "structured_outputs", *GUIDES):
        wanted = getattr(body, field)
        if wanted is None:
            continue
        with _naming(field):
            if field == FORMAT:
                guide = _of_format(wanted)
            elif field == "structured_outputs":
                guide = _of_structured(wanted)
            else:
                guide = _guide(GUIDES[field], wanted, field, body.guided_whitespace_pattern)
        if guide is not None:
            yield field, guide


def _of_format(wanted: schema.ResponseFormat) -> Guide | None:
    """Raises ApiError if a field that its type requires is missing."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_guide(ANY_OBJECT)
    if wanted.type == "json_schema":
        if wanted.schema_given is None:
            reason = "response_format.json_schema.schema is required"
            raise ApiError(400, "missing_field", reason, FORMAT)
        return json_guide(wanted.schema_given)
    if wanted.type == "structural_tag":
        fields = wanted.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        if fields.keys() not in ({"format"}, {"structures", "triggers"}):
            reason = f"{FORMAT}: structural_tag needs format, or structures and triggers"
            raise ApiError(400, "missing_field", reason, FORMAT)
        return _guide("structural_tag", fields)
    kind, field = FORMATS[wanted.type]
    text = getattr(wanted, field)
    if text is None:
        raise ApiError(400, "missing_field", f"{FORMAT}.{field} is required", FORMAT)
    return _guide(kind, text)


def _of_structured(wanted: schema.StructuredOutputs) -> Guide | None:
    given = [name for name in OF_STRUCTURED if getattr(wanted, name) not in (None, False)]
    if len(given) > 1:
        names = " and ".join(name.strip("_") for name in given)
        raise invalid_value(f"structured_outputs: {names} exclude each other: give one", "structured_outputs")
    space = wanted.whitespace_pattern or (None if wanted.disable_any_whitespace else SOME_SPACE)
    if not given:
        return None
    kind = given[0].strip("_")
    if kind == "json_object":
        return _guide("json", ANY_OBJECT, space=space)
    return _guide(kind, getattr(wanted, given[0]), "structured_outputs.json", space)


def _guide(kind: str, wanted: Any, field: str = "", space: str | None = None) -> Guide:
    """kind: json (a schema, also as text), choice (texts), grammar (EBNF or Lark), or a type of the engine's.
    space: regular expression for white space between JSON tokens. None: no white space. Raises ApiError.
    """
    if kind == "choice":
        return Guide("regex", choice_pattern(wanted))
    if kind == "grammar":  # EBNF is recognised by `::=`, which Lark does not have
        kind = "ebnf_grammar" if "::=" in wanted else "lark_grammar"
    if kind != "json":
        return Guide(kind, wanted if isinstance(wanted, str) else json.dumps(wanted))
    if isinstance(wanted, str):
        try:
            check_size(wanted.encode())
            wanted = json.loads(wanted)
        except (ValueError, RecursionError) as error:
            raise invalid_value(f"{field}: not valid JSON", field) from error
        if not isinstance(wanted, dict):
            raise invalid_value(f"{field}: must be a JSON schema", field)
    return json_guide(wanted if space is None else {"x-guidance": {"whitespace_pattern": space}, **wanted})

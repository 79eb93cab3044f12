"""VllmModel: requests and responses of vllm_backend's model, with vLLM's SamplingParams as JSON, and with the
`embedding_request` that Triton's OpenAI frontend sends for `/v1/embeddings`.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.config.settings import read_settings
from manylora.doors.triton.bls import ClientRequest, Values
from manylora.doors.triton.bls_worker import LastOutputs
from manylora.doors.triton.prompts import (
    Answer,
    PromptRequest,
    PromptRunner,
    named_mix,
    read_json,
    scalar,
    text_tensor,
)
from manylora.doors.triton.server_types import (
    ADAPTER,
    SERVERS_OWN,
    Arrays,
    ServerRequest,
    adapter_hint,
    check_parameters,
    check_phase,
    refuse,
)
from manylora.doors.triton.shape_guard import read_inputs
from manylora.errors import AdapterNotFoundError, RequestError
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.generation.guides import choice_pattern
from manylora.generation.outputs import CompletionOutput, PoolingParams, check_dimensions, embedding
from manylora.generation.sampling import GuidedDecodingParams, SamplingParams, is_unicode, parameters_of
from manylora.generation.tokenizer import WINDOW
from manylora.request import MOST, MOST_FLOAT, LoraInput, LoraMix, Pooling

EMBEDDING_REQUEST = "embedding_request"
MAX_EMBEDDING_BYTES = 2**22  # maximum size of the JSON
MAX_ID = 2**31 - 1
EXTRAS = (
    "return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
    "return_num_output_tokens",
)  # fmt: skip
NOT_ENABLED = "LoRA feature is not enabled."
NAME = "sampling_parameters"
LORA_KEYS = ("lora_name", "lora_mix_names", "lora_mix_scales")
MAX_BYTES = 2**20  # maximum size of the JSON
MAX_ALTERNATIVES = 20
MAX_SEQUENCES = 128  # maximum outputs of one prompt
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy
DEFAULTS: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 1}
GUIDES = ("structured_outputs", "guided_decoding")  # the second is the older name
# Keys about how something is done or shown, which cannot change an answer.
NO_EFFECT = ("skip_reading_prefix_cache", "stream_interval", "output_text_buffer_length", "skip_clone")
# Keys for features that are not supported, unless they have one of these values.
REFUSED: dict[str, tuple[Any, ...]] = {
    "output_kind": (0,), "flat_logprobs": (False,), "prompt_logprobs": (), "logits_processors": (),
    "spaces_between_special_tokens": (True,), "extra_args": ({},), "logprob_token_ids": (),
    "prompt_logprob_token_ids": (), "prompt_logprob_start": (), "thinking_token_budget": (),
    "repetition_detection": (), "trace_decode_token_ids": (), "routed_experts_prompt_start": (0,),
    "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1.0, 0.0),
}  # fmt: skip

logger = logging.getLogger("manylora")

Observe = Callable[[PromptRequest, Answer], None]


def _check_keys(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {value!r:.80}")
    unknown = next((key for key in value if key not in keys), None)
    if unknown is not None:
        raise RequestError(f"{name} has the unknown key {unknown!r:.80}: leave it out")
    return value


class VllmModel:
    """names: of the adapters in multi_lora.json, for an error message. enabled: whether adapters are
    supported. observe: called with every finished answer; None: no metrics.
    """

    def __init__(
        self,
        runner: PromptRunner,
        names: Sequence[str],
        enabled: bool = True,
        observe: Observe | None = None,
    ) -> None:
        self._runner = runner
        self._names, self._enabled, self._observe = list(names), enabled, observe

    def answer(self, client: ClientRequest, request: ServerRequest) -> Iterator[Values]:
        name = ""
        try:
            arrays = read_inputs(request.inputs())
            extras = {name for name in EXTRAS if scalar(arrays, name, False)}
            given = self._given(arrays, request.parameters())
            name = given.get("lora_name", "")
            if "embedding_request" in arrays:
                yield self._embedding(client, arrays, given, extras)
                return
            what, prompt = self._asked(arrays, given, extras)
            for answer in self._runner.answers(client, what):
                if answer.finished and self._observe is not None:
                    self._observe(what, answer)
                found = self._response(answer, what, extras, prompt)
                yield LastOutputs(found) if answer.finished else found
                prompt = ""  # only once
        except RequestError as error:
            text = str(error)  # in vllm_backend's words
            if self._names and text == str(AdapterNotFoundError(name)):
                text = f"LoRA {name} is not supported, we currently support {self._names}"
            elif text != NOT_ENABLED:
                text = f"Error generating stream: {text}"
            raise RequestError(text) from None

    def _given(self, arrays: Arrays, own: str) -> dict[str, Any]:
        """The result of `read_parameters`. own: the request's own parameters, used if there is no input."""
        sent = scalar(arrays, NAME)
        if sent is None:
            check_phase(own)
        else:
            check_parameters(own)
        given = read_parameters(own if sent is None else sent, own=sent is None)
        if any(name in given for name in LORA_KEYS) and not self._enabled:
            raise RequestError(NOT_ENABLED)
        return given

    def _embedding(
        self, client: ClientRequest, arrays: Arrays, given: Mapping[str, Any], extras: set[str]
    ) -> LastOutputs:
        others = sorted(given.keys() - set(LORA_KEYS))
        if others:
            raise RequestError(f"{NAME}: {others[0]} means nothing to an embedding: leave it out")
        flags = [name for name in ("stream", *EXTRAS[:3]) if scalar(arrays, name, False)]
        for name in [name for name in ("text_input", "image") if name in arrays] + flags:
            raise RequestError(f"{name} means nothing beside embedding_request: leave it out")
        sent = read_json(scalar(arrays, EMBEDDING_REQUEST), EMBEDDING_REQUEST, MAX_EMBEDDING_BYTES)
        prompt: Any = _check_keys(sent, EMBEDDING_REQUEST, ("input", "pooling_params")).get("input")
        if isinstance(prompt, str):
            right, wanted = is_unicode(prompt), "valid Unicode"
        else:
            each = prompt if isinstance(prompt, list) and prompt else [None]
            right = all(type(one) is int and 0 <= one <= MAX_ID for one in each)
            wanted = "one text, or token ids"
        if not right:
            raise RequestError(f"{EMBEDDING_REQUEST}: input must be {wanted}, got {prompt!r:.80}")
        pooling, name = sent.get("pooling_params") or {}, f"{EMBEDDING_REQUEST}: pooling_params"
        dimensions = _check_keys(pooling, name, ("dimensions",)).get("dimensions")
        if isinstance(dimensions, list) and len(dimensions) == 1:
            [dimensions] = dimensions
        settings, params = self._runner.pooling, PoolingParams()
        if dimensions is not None and type(dimensions) is not int:
            raise RequestError(
                f"{EMBEDDING_REQUEST}: dimensions must be a whole number, got {dimensions!r:.80}"
            )
        if dimensions is not None:
            try:
                check_dimensions(dimensions, settings)
            except ValueError as error:
                raise RequestError(f"{EMBEDDING_REQUEST}: {error}") from None
            params = PoolingParams(dimensions)
        ids, values = self._runner.pooled(client, prompt, Pooling(settings.mode), adapters(given))
        found = {"text_output": text_tensor([json.dumps(embedding(values, settings, params).tolist())])}
        for name, count in (("num_input_tokens", len(ids)), ("num_output_tokens", 0)):
            if f"return_{name}" in extras:
                found[name] = np.array([count], np.uint32)
        return LastOutputs(found)

    def _asked(self, arrays: Arrays, given: Mapping[str, Any], extras: set[str]) -> tuple[PromptRequest, str]:
        refuse(arrays, "image")
        if "text_input" not in arrays:
            raise RequestError("text_input is required")
        text, streaming = scalar(arrays, "text_input"), bool(scalar(arrays, "stream", False))
        exclude = scalar(arrays, "exclude_input_in_output", streaming)
        if streaming and not exclude:
            raise RequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
        lora = adapters(given)
        defaults = self._runner.text_of(lora).defaults
        made = asked(text, given, streaming, "return_cumulative_logprob" in extras, lora, defaults)
        made = replace(made, statistics=self._observe is not None)
        return made, "" if exclude else text

    def _response(
        self, answer: Answer, what: PromptRequest, extras: set[str], prompt: str
    ) -> dict[str, np.ndarray]:
        outputs = answer.outputs
        found = {"text_output": text_tensor(prompt + one.text_diff for one in outputs)}
        if "return_finish_reason" in extras:
            reasons = ("abort" if one.finish_reason == "cancelled" else one.finish_reason for one in outputs)
            found["finish_reason"] = text_tensor(map(str, reasons))
        if "return_cumulative_logprob" in extras:
            found["cumulative_logprob"] = np.array([one.cumulative_logprob for one in outputs], np.float32)
        if "return_logprobs" in extras:
            rows = [self._logprobs(answer, one, what.top) for one in outputs]
            found["logprobs"] = text_tensor(json.dumps(row) for row in rows)
        if "return_num_input_tokens" in extras:
            found["num_input_tokens"] = np.array([len(answer.prompt)], np.uint32)
        if "return_num_output_tokens" in extras:
            found["num_output_tokens"] = np.array([len(one.token_ids_diff) for one in outputs], np.uint32)
        return found

    def _logprobs(
        self, answer: Answer, output: CompletionOutput, top: int | None
    ) -> list[dict[str, Any]] | None:
        """For each new token, by id: the token itself and the `top` most probable ones. Their texts
        concatenate to the output's: of the tokens of one character, only the last has text.
        """
        if top is None:
            return None
        ids = [*answer.prompt[-WINDOW:], *output.token_ids]
        first, found = len(ids) - len(output.token_ids_diff), []
        for at, one in enumerate(answer.alternatives[output.index], first):
            before, final = ids[max(0, at - WINDOW) : at], answer.finished and at + 1 == len(ids)
            best = [(token, value, rank) for rank, (token, value) in enumerate(one.top[:top], 1)]
            shown: dict[str, Any] = {}
            for token, value, rank in [(one.token_id, one.logprob or 0.0, one.rank), *best]:
                text = answer.tokenizer.delta(before, [token], final, False)
                shown.setdefault(str(token), {"logprob": value, "rank": rank, "decoded_token": text})
            found.append(shown)
        return found


def takes_adapters(file: Path) -> bool:
    """Whether model.json, if it exists, leaves adapters enabled. Its other keys configure an engine, which
    here is that of `tensorrt_llm`. Raises ConfigError.
    """
    given = read_settings(file)
    others = ", ".join(sorted(given.keys() - {"enable_lora"}))
    if others:
        logger.warning("model.json: %s have no effect here: the engine is that of tensorrt_llm", others)
    return str(given.get("enable_lora", True)).lower() == "true"


KINDS = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "a text",
    "texts": "a text or a list of texts",
    "ids": "a list of token ids",
    "numbers": "a list of numbers",
    "bias": "an object of token ids and numbers",
    "object": "an object, or its JSON as text",
}
LISTS = {"texts": "text", "ids": "token", "numbers": "number"}  # and of what each is
TAKEN: dict[str, str] = {
    **{one.name: {int: "whole", float: "number", bool: "flag"}[one.kind] for one in parameters_of("vllm")},
    **dict.fromkeys(("n", "best_of", "max_tokens", "logprobs", "truncate_prompt_tokens"), "whole"),
    **dict.fromkeys(
        ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"), "flag"
    ),
    **dict.fromkeys(("stop", "bad_words", "lora_mix_names"), "texts"),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), "ids"),
    **dict.fromkeys(("structured_outputs", "guided_decoding"), "object"),
    "logit_bias": "bias",
    "lora_name": "text",
    "lora_mix_scales": "numbers",
}
"""Supported keys: of KINDS, which say what a value must be."""


def _read(value: Any, kind: str) -> Any:
    """The value as one of KINDS. Raises ValueError, TypeError, OverflowError, RecursionError."""
    if kind in LISTS:
        value = [value] if kind == "texts" and isinstance(value, str) else value
        return [_read(one, LISTS[kind]) for one in _typed(value, list)]
    if kind == "bias":
        return {_read(i, "whole"): _read(bias, "number") for i, bias in _typed(value, dict).items()}
    if kind == "object":
        return _typed(json.loads(value) if isinstance(value, str) else value, dict)
    if kind == "text":
        return _typed(value, str)
    if kind == "flag":
        words = {"true": True, "false": False}
        return _typed(words.get(value.lower()) if isinstance(value, str) else value, bool)
    found = float(value) if kind == "number" else int(value)
    is_cut = kind != "number" and isinstance(value, float) and found != value
    if isinstance(value, bool) or is_cut or (kind == "number" and not abs(found) <= MOST_FLOAT):
        raise ValueError
    if kind == "token" and not 0 <= found <= MOST:
        raise ValueError
    return found


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError
    return value


def read_parameters(text: str, own: bool) -> dict[str, Any]:
    """Values by key, each of its type; null counts as not set. Numbers may be text. Raises RequestError.

    own: these are the request's own parameters, which include some of the server's, not the input.
    """
    given = read_json(text or "{}", NAME, MAX_BYTES)
    if not isinstance(given, dict):
        raise RequestError(f"{NAME} must be a JSON object, got {text!r:.80}")
    found = {}
    escaped = "\\u" in text  # only an escape can be half of a surrogate pair
    for key, value in given.items():
        if value is None or key in NO_EFFECT or (own and SERVERS_OWN.fullmatch(key)):
            continue
        if key in REFUSED:
            if value not in REFUSED[key]:
                raise RequestError(f"{NAME}: {key} is not supported by this server: leave it out")
            continue
        if ADAPTER.fullmatch(key):
            raise RequestError(adapter_hint(key))
        if key not in TAKEN:
            raise RequestError(f"{NAME} has the unknown key {key!r:.80}: leave it out")
        wanted = KINDS[TAKEN[key]]
        try:
            found[key] = _read(value, TAKEN[key])
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise RequestError(f"{NAME}: {key} must be {wanted}, got {value!r:.80}") from None
        if escaped and not is_unicode(found[key]):
            raise RequestError(f"{NAME}: {key} must be valid Unicode, got {value!r:.80}")
    return found


def adapters(given: Mapping[str, Any]) -> LoraInput | LoraMix | None:
    """The adapter by name, or several that act together. Raises RequestError."""
    names, scales = given.get("lora_mix_names"), given.get("lora_mix_scales")
    if names is None and scales is None:
        return LoraInput(None, name=given["lora_name"]) if "lora_name" in given else None
    if "lora_name" in given:
        raise RequestError(f"{NAME}: lora_mix_names stand alone: leave lora_name out")
    return named_mix(names, scales, f"{NAME}: lora_mix_names")


def asked(
    text: str,
    given: Mapping[str, Any],
    streaming: bool,
    cumulative: bool,
    lora: LoraInput | LoraMix | None = None,
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> PromptRequest:
    """text: the prompt. given: from `read_parameters`. cumulative: whether the sum of log probabilities is
    shown. lora: from `adapters`. defaults: that come with it. Raises RequestError.
    """
    own = dict(defaults.fields)
    if defaults.max_tokens is not None:
        own["max_tokens"] = defaults.max_tokens
    if own.get("top_p") == 0:
        own |= {"top_p": 1.0, "top_k": 1}  # greedy
    found = {**DEFAULTS, **own, **given}
    if "min_tokens" not in given and "min_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])
    for name in LORA_KEYS:
        found.pop(name, None)
    top = found.pop("logprobs", None)
    if top is not None and not 0 <= top <= MAX_ALTERNATIVES:
        raise RequestError(f"{NAME}: logprobs must be from 0 to {MAX_ALTERNATIVES}, got {top}")
    _check(found)
    bias, allowed = found.pop("logit_bias", {}), tuple(found.pop("allowed_token_ids", ()))
    guides = {key: found.pop(key) for key in GUIDES if key in found}
    found["bad"] = found.pop("bad_words", None)
    greedy = found["temperature"] < GREEDY_BELOW
    found |= {
        "temperature": 0.0 if greedy else found["temperature"],
        "top_k": max(0, min(found["top_k"], MOST)),
        "seed": found["seed"] % 2**64 if "seed" in found else secrets.randbits(63),
        "max_tokens": min(found["max_tokens"], MOST),
        "logprobs": 0 if top is not None or cumulative else None,
        "guided_decoding": _guide(guides),
    }
    try:
        params = SamplingParams(**found)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{NAME}: {error}") from None
    return PromptRequest(text, params, lora, streaming, top, allowed, bias, output_penalties=True)


def _check(found: Mapping[str, Any]) -> None:
    for key, right, rule in (
        ("temperature", found["temperature"] >= 0, "must be at least 0"),
        ("top_p", 0 < found["top_p"] <= 1, "must be in (0, 1]"),
        ("top_k", found["top_k"] >= -1, "must be -1 or 0 (all tokens), or more"),
        ("n", found["n"] <= MAX_SEQUENCES, f"must be at most {MAX_SEQUENCES}"),
        ("best_of", found.get("best_of", 1) <= MAX_SEQUENCES, f"must be at most {MAX_SEQUENCES}"),
        ("max_tokens", found["max_tokens"] >= 1, "must be >= 1"),
        ("min_tokens", found.get("min_tokens", 0) <= found["max_tokens"], "must be at most max_tokens"),
        ("bad_words", all(found.get("bad_words", ())), "must have no empty text"),
        ("allowed_token_ids", found.get("allowed_token_ids") != [], "must have at least one"),
    ):
        if not right:
            raise RequestError(f"{NAME}: {key} {rule}, got {found[key]}")
    if found["n"] > 1 and found["temperature"] < GREEDY_BELOW:
        raise RequestError(f"{NAME}: n must be 1 when using greedy sampling, got {found['n']}.")


def _guide(guides: Mapping[str, Mapping[str, Any]]) -> GuidedDecodingParams | None:
    """vLLM's StructuredOutputsParams. guides: by their key, one of GUIDES."""
    if not guides:
        return None
    if len(guides) > 1:
        raise RequestError(f"{NAME}: {' and '.join(guides)} are one setting: send one of them")
    [(name, given)] = guides.items()
    kinds = {key: one for key, one in given.items() if one not in (None, False)}
    kinds.pop("backend", None)
    unknown = kinds.keys() - {"json", "regex", "choice", "grammar", "json_object"}
    if unknown:
        raise RequestError(f"{NAME}: {name}.{min(unknown):.80} is not supported: leave it out")
    choice = kinds.pop("choice", None)
    if choice is not None:
        if not (isinstance(choice, list) and choice and all(isinstance(one, str) and one for one in choice)):
            raise RequestError(f"{NAME}: {name}.choice must be a list of texts, none of them empty")
        if "regex" in kinds:
            raise RequestError(f"{NAME}: {name} takes one guide: choice or regex")
        kinds["regex"] = choice_pattern(choice)
    try:
        return GuidedDecodingParams(**kinds)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{NAME}: {name}: {error}") from None

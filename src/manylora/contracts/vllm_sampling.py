"""Converts vLLM's SamplingParams, as the JSON that vllm_backend accepts, to the LLM API's."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from manylora.contracts.prompts import PromptRequest
from manylora.contracts.tensors import named_mix, read_json
from manylora.errors import RequestError
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.generation.guides import choice_pattern
from manylora.generation.sampling import GuidedDecodingParams, SamplingParams, is_unicode, parameters_of
from manylora.request import MOST, MOST_FLOAT, LoraInput, LoraMix
from manylora.wire.client_errors import ADAPTER, SERVERS_OWN, adapter_hint

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


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    found = float(value)
    if isinstance(value, bool) or not abs(found) <= MOST_FLOAT:
        raise ValueError
    return found


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError
    return found


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    found = [_whole(one) for one in value]
    if not all(0 <= one <= MOST for one in found):
        raise ValueError
    return found


def _numbers(value: Any) -> list[float]:
    if not isinstance(value, list):
        raise ValueError
    return [_number(one) for one in value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError
    return {_whole(token): _number(bias) for token, bias in value.items()}


def _object(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError
    return found


WHOLE, NUMBER, FLAG = (_whole, "a whole number"), (_number, "a number"), (_flag, "true or false")
READERS = {int: WHOLE, float: NUMBER, bool: FLAG}
TEXTS, IDS = (_texts, "a text or a list of texts"), (_ids, "a list of token ids")
OBJECT = (_object, "an object, or its JSON as text")
TAKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    **{one.name: READERS[one.kind] for one in parameters_of("vllm")},
    **dict.fromkeys(("n", "best_of", "max_tokens", "logprobs", "truncate_prompt_tokens"), WHOLE),
    **dict.fromkeys(("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"), FLAG),
    **dict.fromkeys(("stop", "bad_words"), TEXTS),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), IDS),
    "logit_bias": (_bias, "an object of token ids and numbers"),
    **dict.fromkeys(("structured_outputs", "guided_decoding"), OBJECT),
    "lora_name": (_text, "a text"),
    "lora_mix_names": TEXTS,
    "lora_mix_scales": (_numbers, "a list of numbers"),
}
"""Supported keys: the function that reads a value, and what it must be."""


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
        read, wanted = TAKEN[key]
        try:
            found[key] = read(value)
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise RequestError(f"{NAME}: {key} must be {wanted}, got {value!r:.80}") from None
        if escaped and not is_unicode(found[key]):
            raise RequestError(f"{NAME}: {key} must be valid Unicode, got {value!r:.80}")
    return found


def adapters(given: Mapping[str, Any]) -> LoraInput | LoraMix | None:
    """The adapter by name, or several that act together. given: from `read_parameters`. Raises
    RequestError.
    """
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
    found = {**DEFAULTS, **_own_defaults(defaults), **given}
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


def _own_defaults(defaults: GenerationDefaults) -> dict[str, Any]:
    found = dict(defaults.fields)
    if defaults.max_tokens is not None:
        found["max_tokens"] = defaults.max_tokens
    return found | ({"top_p": 1.0, "top_k": 1} if found.get("top_p") == 0 else {})  # greedy


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

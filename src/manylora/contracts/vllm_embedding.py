"""vllm_backend's `embedding_request`, which Triton's OpenAI frontend sends for `/v1/embeddings`."""

from __future__ import annotations

from typing import Any

from manylora.config.pooling import PoolingSettings
from manylora.contracts.tensors import read_json
from manylora.errors import RequestError
from manylora.llmapi.pooled_outputs import PoolingParams, check_dimensions
from manylora.wire.utf8 import is_unicode

NAME = "embedding_request"
MAX_BYTES = 2**22  # maximum size of the JSON
MAX_ID = 2**31 - 1


def read_embedding_request(text: str, settings: PoolingSettings) -> tuple[str | list[int], PoolingParams]:
    """The prompt as text or token ids, and how to process its embedding. Raises RequestError.

    text: JSON with `input`, and `pooling_params` with `dimensions`, a number or a list with one.
    """
    given = _object(read_json(text, NAME, MAX_BYTES), NAME, ("input", "pooling_params"))
    prompt = given.get("input")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt)))):
        raise RequestError(f"{NAME}: input must be one text, or token ids, got {prompt!r:.80}")
    if isinstance(prompt, str) and not is_unicode(prompt):
        raise RequestError(f"{NAME}: input must be valid Unicode, got {prompt!r:.80}")
    params = _object(given.get("pooling_params") or {}, f"{NAME}: pooling_params", ("dimensions",))
    dimensions = params.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:
        [dimensions] = dimensions
    if dimensions is None:
        return prompt, PoolingParams()
    if type(dimensions) is not int:
        raise RequestError(f"{NAME}: dimensions must be a whole number, got {dimensions!r:.80}")
    try:
        check_dimensions(dimensions, settings)
    except ValueError as error:
        raise RequestError(f"{NAME}: {error}") from None
    return prompt, PoolingParams(dimensions)


def _object(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, got {value!r:.80}")
    unknown = next((key for key in value if key not in keys), None)
    if unknown is not None:
        raise RequestError(f"{name} has the unknown key {unknown!r:.80}: leave it out")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID

"""Which adapter a request asks for: five fields that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from manylora.openai.api.errors import ApiError
from manylora.openai.api.names import check_name, is_name
from manylora.openai.api.schema import GenerationRequest

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """name of the adapter; None: the base model. field: the one that chose. source: hf or nemo, if named."""

    field: str = "model"
    name: str | None = None
    source: str | None = None


def choose(
    body: GenerationRequest,
    bases: Sequence[str],
    known: Callable[[str], bool],
    name_of_path: Callable[[str], str],
) -> Choice:
    """bases: the base model's names, the first its own. known: whether an adapter has this name.
    name_of_path: of the adapter at a path; raises ApiError where none may be read.

    Raises ApiError, 400 and naming both fields when two of them disagree.
    """
    found = [
        *_by_names(body),
        *_by_path(body, known, name_of_path),
        *_by_lora_request(body, known, name_of_path),
    ]
    found = [*_by_model(body.model, bases, known, label=bool(found)), *found]
    for other in found[1:]:
        if other.name != found[0].name:
            raise ApiError(
                400,
                "adapter_conflict",
                f"{found[0].field} and {other.field} choose different adapters: give one of them, or the "
                "same adapter in both",
                other.field,
            )
    return max(found, key=lambda choice: choice.source is not None, default=Choice())


def _by_model(
    model: str, bases: Sequence[str], known: Callable[[str], bool], *, label: bool
) -> Iterator[Choice]:
    """label: another field chooses. A name that is no adapter's is then the client's own word for the base
    model, as servers take it that do not check the field."""
    if not model or model in bases:
        return
    if not known(model):  # a known adapter may have a name that begins like a base's
        base = next((base for base in bases if model.startswith(base + ":")), None)
        if base is None and label:
            return
        model = model if base is None else model[len(base) + 1 :]
    yield Choice("model", check_name(model, "model"))


def _by_names(body: GenerationRequest) -> Iterator[Choice]:
    for field in ("lora_model", "adapter_id"):
        name = getattr(body, field)
        if name is not None:
            yield Choice(field, check_name(name, field))


def _by_path(
    body: GenerationRequest, known: Callable[[str], bool], name_of_path: Callable[[str], str]
) -> Iterator[Choice]:
    """SGLang's field, where a name is usual."""
    path = body.lora_path
    if path is not None:
        yield Choice("lora_path", path if is_name(path) and known(path) else name_of_path(path))


def _by_lora_request(
    body: GenerationRequest, known: Callable[[str], bool], name_of_path: Callable[[str], str]
) -> Iterator[Choice]:
    """With a path the name is the client's own label, unless an adapter has it."""
    lora = body.lora_request
    if lora is None:
        return
    if lora.lora_path is None and lora.lora_name is None:
        raise ApiError(400, "missing_field", "lora_request needs a lora_name or a lora_path", "lora_request")
    if lora.lora_name is not None and (lora.lora_path is None or known(lora.lora_name)):
        field = "lora_request.lora_name"
        yield Choice(field, check_name(lora.lora_name, field), lora.lora_ckpt_source)
    if lora.lora_path is not None:
        yield Choice("lora_request.lora_path", name_of_path(lora.lora_path), lora.lora_ckpt_source)

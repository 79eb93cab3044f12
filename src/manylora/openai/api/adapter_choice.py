"""Which adapter a request asks for. Five fields can name one; those that are given must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from manylora.openai.api.errors import ApiError
from manylora.openai.api.names import check_name, is_name
from manylora.openai.api.schema import GenerationRequest


@dataclass(frozen=True)
class AdapterChoice:
    """field: that named the adapter. name: None is the base model. source: "hf" or "nemo", if given."""

    field: str = "model"
    name: str | None = None
    source: str | None = None


def choose_adapter(
    body: GenerationRequest,
    bases: Sequence[str],
    known: Callable[[str], bool],
    name_of_path: Callable[[str], str],
) -> AdapterChoice:
    """bases: the base model's names. known: whether an adapter has this name. name_of_path: the name of the
    adapter at a path; raises ApiError where none may be read.

    Raises ApiError 400, naming both fields when two of them disagree.
    """
    choices = list(_by_other_fields(body, known, name_of_path))
    choices = [*_by_model(body.model, bases, known, others=bool(choices)), *choices]
    for other in choices[1:]:
        if other.name != choices[0].name:
            reason = (
                f"{choices[0].field} and {other.field} choose different adapters: give one of them, or the "
                "same adapter in both"
            )
            raise ApiError(400, "adapter_conflict", reason, other.field)
    return max(choices, key=lambda choice: choice.source is not None, default=AdapterChoice())


def _by_model(
    model: str, bases: Sequence[str], known: Callable[[str], bool], *, others: bool
) -> Iterator[AdapterChoice]:
    """others: other fields name an adapter. An unknown `model` then stands for the base model, because many
    servers do not check that field and clients put anything into it."""
    if not model or model in bases:
        return
    if not known(model):  # an adapter's own name may begin with "BASE:"
        base = next((base for base in bases if model.startswith(base + ":")), None)
        if base is None and others:
            return
        model = model if base is None else model[len(base) + 1 :]
    yield AdapterChoice("model", check_name(model, "model"))


def _by_other_fields(
    body: GenerationRequest, known: Callable[[str], bool], name_of_path: Callable[[str], str]
) -> Iterator[AdapterChoice]:
    for field in ("lora_model", "adapter_id"):
        name = getattr(body, field)
        if name is not None:
            yield AdapterChoice(field, check_name(name, field))
    path, lora = body.lora_path, body.lora_request
    if path is not None:  # SGLang's field: a name or a path
        yield AdapterChoice("lora_path", path if is_name(path) and known(path) else name_of_path(path))
    if lora is None:
        return
    if lora.lora_path is None and lora.lora_name is None:
        raise ApiError(400, "missing_field", "lora_request needs a lora_name or a lora_path", "lora_request")
    # With a path, a name that no adapter has is only the client's label.
    if lora.lora_name is not None and (lora.lora_path is None or known(lora.lora_name)):
        field = "lora_request.lora_name"
        yield AdapterChoice(field, check_name(lora.lora_name, field), lora.lora_ckpt_source)
    if lora.lora_path is not None:
        yield AdapterChoice("lora_request.lora_path", name_of_path(lora.lora_path), lora.lora_ckpt_source)

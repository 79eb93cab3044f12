"""Which adapters a request asks for. Six fields can name one. All that are given must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from manylora.lora.catalog.names import is_name
from manylora.openai.api.errors import ApiError, check_name, invalid_value
from manylora.openai.api.schema import AdapterFields
from manylora.request import MAX_MIXED, MAX_SCALE


@dataclass(frozen=True)
class AdapterChoice:
    """field: the field that named the adapter. name: None is the base model. source: "hf" or "nemo", if
    given.

    mix: several adapters, or one with a scale, as names and scales. `name` is then all names joined by +.
    """

    field: str = "model"
    name: str | None = None
    source: str | None = None
    mix: tuple[tuple[str, float], ...] = ()

    @property
    def adapters(self) -> tuple[tuple[str, float], ...]:
        """All adapters with their scales."""
        return self.mix or (() if self.name is None else ((self.name, 1.0),))

    @property
    def alone(self) -> str | None:
        """The adapter, if exactly one acts: its own text settings then apply. None: the base model's
        apply.
        """
        acting = {name for name, scale in self.adapters if scale}
        return acting.pop() if len(acting) == 1 else None


def choose_adapter(
    body: AdapterFields,
    bases: Sequence[str],
    known: Callable[[str], bool],
    name_of_path: Callable[[str], str],
) -> AdapterChoice:
    """bases: the base model's names. known: whether an adapter has this name. name_of_path: returns the name
    of the adapter at a path, or raises ApiError if the path may not be read.

    Raises ApiError 400, naming both fields when two of them disagree, and for load_lora_weights without an
    adapter.
    """
    choices = list(_by_other_fields(body, known, name_of_path))
    choices = [*_by_model(body.model, bases, known, others=bool(choices)), *choices]
    for other in choices[1:]:
        if other.adapters != choices[0].adapters:
            reason = (
                f"{choices[0].field} and {other.field} choose different adapters: give one of them, or the "
                "same adapter in both"
            )
            raise ApiError(400, "adapter_conflict", reason, other.field)
    if not choices and body.load_lora_weights != "auto":
        raise invalid_value(
            "load_lora_weights is for an adapter, and this request names none: name one, or leave it out",
            "load_lora_weights",
        )
    return max(choices, key=lambda choice: choice.source is not None, default=AdapterChoice())


def _by_model(
    model: str, bases: Sequence[str], known: Callable[[str], bool], *, others: bool
) -> Iterator[AdapterChoice]:
    """others: whether other fields name an adapter. An unknown `model` then means the base model: many
    servers ignore that field, so clients put anything into it.
    """
    if not model or model in bases:
        return
    base = next((base for base in bases if model.startswith(base + ":")), None)
    if base is not None:
        model = model[len(base) + 1 :]
    elif others and not known(model):
        return
    if "+" in model:
        yield _mix("model", [(name, 1.0) for name in model.split("+")])
    else:
        yield AdapterChoice("model", check_name(model, "model"))


def _mix(field: str, members: Sequence[tuple[str, float]]) -> AdapterChoice:
    """Raises ApiError."""
    if len(members) > MAX_MIXED:
        raise invalid_value(f"{field}: at most {MAX_MIXED} adapters act together", field)
    names = [check_name(name, field) for name, _ in members]
    if any(abs(sum(s for other, s in members if other == name)) > MAX_SCALE for name in names):
        raise invalid_value(
            f"{field}: the scales of one adapter may add up to at most {MAX_SCALE:g} in magnitude", field
        )
    if len(members) == 1 and members[0][1] == 1:
        return AdapterChoice(field, names[0])
    return AdapterChoice(field, "+".join(names) or None, mix=tuple(members))


def _by_other_fields(
    body: AdapterFields, known: Callable[[str], bool], name_of_path: Callable[[str], str]
) -> Iterator[AdapterChoice]:
    if body.lora is not None:
        yield _mix("lora", [(one.name, one.scale) for one in body.lora])
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
    # With a path, an unknown name is only the client's label.
    if lora.lora_name is not None and (lora.lora_path is None or known(lora.lora_name)):
        field = "lora_request.lora_name"
        yield AdapterChoice(field, check_name(lora.lora_name, field), lora.lora_ckpt_source)
    if lora.lora_path is not None:
        yield AdapterChoice("lora_request.lora_path", name_of_path(lora.lora_path), lora.lora_ckpt_source)

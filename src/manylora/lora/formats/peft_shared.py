"""The table that encoder and decoder share, in a PEFT directory. Each stack looks its tokens up in a module
of its own, tied to it, so PEFT passes over most of what an adapter has for the shared one; training leaves
that as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft_config import PeftConfig
from manylora.lora.formats.peft_tables import Table, check_shape
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.request import LoraExtra

TOKENS = "token_adapter.trainable_tokens_delta"
LOW_RANK = ("lora_embedding_A", "lora_embedding_B")
FULL = ("base_layer.weight", "weight")
KNOWN = {TOKENS, *LOW_RANK, *FULL, "lora_magnitude_vector"}
CHUNK = 2**24  # bytes that are compared at one time
OWN_TABLES = ("encoder.embed.", "decoder.embed.")
WITHOUT = ("head.weight", "head.magnitude", "head.tokens")
Parts = Mapping[str, tuple[str, RawTensor]]  # as `Table` takes them


def read_shared(
    path: str, parts: Parts, stacks: Iterable[Parts], config: PeftConfig, base: BaseReader
) -> Iterator[LoraExtra]:
    """Rows of some tokens, which PEFT gives to all that is tied. stacks: parts of the stacks' own tables.

    Raises AdapterInvalidError for what would change something if PEFT did not pass over it."""
    if others := parts.keys() - KNOWN:
        raise AdapterInvalidError(f"{parts[min(others)][0]}: an embedding has no such part")
    name = base.find(f"{path}.weight")
    saved = [own["weight"][1] for own in stacks if "weight" in own]
    for part in FULL:
        if part in parts:
            key, tensor = parts[part]
            check_shape(key, tensor.shape, base)
            copied = len(saved) == 2 and all(_are_equal(one, tensor) for one in saved)
            if not copied and (name is None or not base.holds(name, tensor)):
                raise _passed_over(key)
    low = [decode(*parts[part]) for part in LOW_RANK if part in parts]
    if low and all(values.any() for values in low):
        raise _passed_over(parts[next(part for part in LOW_RANK if part in parts)][0])
    if TOKENS in parts:
        if not base.ties_embeddings:
            raise _passed_over(parts[TOKENS][0])
        yield from Table("embed", path, {TOKENS: parts[TOKENS]}, config, base).read()


def check_tokens(names: Iterable[str]) -> None:
    """names: of all extras. Raises AdapterInvalidError for what PEFT makes no sense of, beside the rows of
    some tokens of the shared table."""
    names = set(names)
    others = {name for name in names if name in WITHOUT or name.startswith(OWN_TABLES)}
    if "embed.tokens" in names and others:
        raise AdapterInvalidError(
            f"trainable_token_indices of the shared embedding beside {min(others)} mean nothing in PEFT "
            "either: it ties them to both stacks and the head, or to nothing"
        )


def _are_equal(one: RawTensor, other: RawTensor) -> bool:
    """Bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(one.part(at, CHUNK) == other.part(at, CHUNK) for at in range(0, one.num_bytes, CHUNK))


def _passed_over(key: str) -> AdapterInvalidError:
    return AdapterInvalidError(
        f"{key} would do nothing: encoder and decoder look tokens up in embed_tokens of their own, so PEFT "
        "passes over what is trained here; train embed_tokens instead"
    )

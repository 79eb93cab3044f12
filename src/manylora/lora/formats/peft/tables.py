"""Embedding and head of a PEFT directory, the table that encoder and decoder share, and what a trained bias
adds to the base's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft.module_tensors import encoder_layers, is_named_decoder
from manylora.lora.formats.peft.names import ROOT
from manylora.lora.formats.peft.settings import PeftConfig
from manylora.lora.formats.tensor_files import NUMPY_TYPES, RawTensor, decode
from manylora.lora.modules import LoraModule
from manylora.lora.tensors import check_dims
from manylora.request import LoraExtra

EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
HEADS = ("lm_head", "embed_out", "output")
SHARED = "shared"
TABLE = re.compile(
    rf"(?P<path>{ROOT}(?:(?:(?P<stack>encoder|decoder)\.)?(?P<embed>{'|'.join(EMBEDDINGS)})"
    rf"|(?P<shared>{SHARED})|(?P<head>{'|'.join(HEADS)})))\."
    r"(?P<part>weight|bias|base_layer\.weight|base_layer\.bias|lora_embedding_[AB]|lora_[AB]\.weight"
    r"|lora_B\.bias|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
"""path: the module's; embed, shared or head: its name; part: the rest. stack: of an encoder-decoder model."""
TABLES = (*EMBEDDINGS, SHARED, "encoder.embed_tokens", "decoder.embed_tokens")
"""Where the embedding of a checkpoint may be; two stacks may have but one of these."""


def table_name(match: re.Match[str], modules: Mapping[int, LoraModule] | None) -> str:
    """Of a match of TABLE, as extras call it: embed, head, encoder.embed, decoder.embed; or SHARED.

    Raises AdapterInvalidError for a table that the model does not have."""
    if match["head"]:
        return "head"
    stacks = encoder_layers(modules) > 0
    if match["stack"] == "decoder" and is_named_decoder(modules):
        return "embed"
    if modules is not None and stacks != bool(match["stack"] or match["shared"]):
        has = "an embedding for each of encoder and decoder" if stacks else "no encoder"
        raise AdapterInvalidError(f"{match['path']}: this model has {has}")
    if match["shared"]:
        return SHARED
    return f"{match['stack']}.embed" if match["stack"] else "embed"


def bias_scale(path: str, key: str, tensors: Mapping[str, RawTensor], config: PeftConfig) -> np.float32:
    """Of a bias of lora_B. key: that of lora_A, whose rank counts. Raises AdapterInvalidError."""
    if key not in tensors:
        raise AdapterInvalidError(f"{path} has a bias of lora_B, but no lora_A")
    shape = tensors[key].shape
    if len(shape) != 2 or 0 in shape:
        raise AdapterInvalidError(f"{key} must be a matrix, got {shape}")
    return np.float32(config.scale(path, shape[0]))


def is_whole_table(key: str) -> bool:
    """Whether PEFT's tensor of this name is all of an embedding or a head."""
    match = TABLE.fullmatch(key)
    return match is not None and match["part"] in ("weight", "base_layer.weight")


def check_shape(key: str, shape: tuple[int, ...], base: BaseReader) -> None:
    """key: PEFT's name of a tensor, of which the base may have one too. Raises AdapterInvalidError."""
    name = base.find(key)
    if name is not None and base.shape(name) != shape:
        raise AdapterInvalidError(
            f"{key} has shape {shape}, that of the base model {base.shape(name)}: the adapter was "
            "made for another model"
        )


def without_base(key: str, values: np.ndarray, base: BaseReader) -> np.ndarray:
    """A file's bias takes the place of the base's, where there is one. key: PEFT's name of the latter.

    Raises AdapterInvalidError for another shape.
    """
    name = base.find(key)
    if name is None:
        return values
    check_shape(key, values.shape, base)
    return values - base.read(name)


class Table:
    """The parts of an embedding or a head. name: as extras call it; path: PEFT's name of the module.

    Raises AdapterInvalidError where the base has no such matrix, or one of another shape.
    """

    def __init__(
        self,
        name: str,
        path: str,
        parts: Mapping[str, tuple[str, RawTensor]],
        config: PeftConfig,
        base: BaseReader,
    ) -> None:
        self._extra_name, self._path, self._parts = name, path, dict(parts)
        self._is_head = name == "head"
        self._config, self._base = config, base
        # A checkpoint may call them as another release of transformers did; a tied head is the embedding.
        others = (*HEADS, *TABLES) if self._is_head else TABLES
        found = next(filter(None, (base.find(f"{other}.weight") for other in (path, *others))), None)
        if found is None or len(base.shape(found)) != 2:
            raise AdapterInvalidError(f"{path}: the base model has no such matrix")
        self._name = found
        self._vocab, self._hidden = base.shape(found)

    def read(self) -> Iterator[LoraExtra]:
        yield from self._full()
        if "token_adapter.trainable_tokens_delta" in self._parts:
            yield self._tokens()
        yield from self._low_rank()
        yield from self._bias()

    def _extra(self, part: str, values: np.ndarray, token_ids: Sequence[int] = ()) -> LoraExtra:
        return LoraExtra(f"{self._extra_name}.{part}", values, tuple(token_ids))

    def _full(self) -> Iterator[LoraExtra]:
        """A whole matrix, unless it is but a copy of the base's."""
        for part in ("base_layer.weight", "weight"):
            if part not in self._parts:
                continue
            key, tensor = self._parts[part]
            if tensor.shape != (self._vocab, self._hidden):
                raise AdapterInvalidError(
                    f"{key} has shape {tensor.shape}, that of the base model {(self._vocab, self._hidden)}: "
                    "a changed vocabulary is not supported"
                )
            if self._base.holds(self._name, tensor):
                continue
            if part != "weight" or not self._config.saves(self._path):
                raise AdapterInvalidError(
                    f"{key} is not what the base model has, though modules_to_save does not name it: the "
                    "adapter was trained on another model, or saved with its embeddings"
                )
            yield self._extra("weight", _as_stored(key, tensor))

    def _tokens(self) -> LoraExtra:
        key, tensor = self._parts["token_adapter.trainable_tokens_delta"]
        ids = self._config.token_ids(self._path, self._extra_name == "embed")
        if tensor.shape != (len(ids), self._hidden) or not ids or max(ids) >= self._vocab:
            raise AdapterInvalidError(
                f"{key} has shape {tensor.shape} for {len(ids)} tokens of trainable_token_indices; the model "
                f"has {self._vocab} tokens of {self._hidden} values"
            )
        order = np.argsort(ids)
        return self._extra("tokens", decode(key, tensor)[order], [ids[i] for i in order])

    def _low_rank(self) -> Iterator[LoraExtra]:
        embed = not self._is_head
        names = ["lora_embedding_A", "lora_embedding_B"] if embed else ["lora_A.weight", "lora_B.weight"]
        present = [name for name in names if name in self._parts]
        magnitude = self._parts.get("lora_magnitude_vector")
        wrong = {"lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"} - set(names)
        if len(present) == 1 or wrong & self._parts.keys() or (magnitude and not present):
            raise AdapterInvalidError(f"{self._path} must have {names[0]} and {names[1]}")
        if not present:
            return
        stored_a, stored_b = (self._parts[name][1].shape for name in names)
        check_dims(self._path, stored_a, stored_b, None)
        given = stored_a[1], stored_b[0]
        if given != ((self._vocab, self._hidden) if embed else (self._hidden, self._vocab)):
            raise AdapterInvalidError(
                f"{self._path} goes from {given[0]} to {given[1]} dimensions, the model has {self._vocab} "
                f"tokens of {self._hidden} values: the adapter was made for another model"
            )
        a, b = (decode(*self._parts[name]) for name in names)
        b = b * np.float32(self._config.scale(self._path, a.shape[0]))
        yield self._extra("lora_A", np.ascontiguousarray(a.T) if embed else a)
        yield self._extra("lora_B", b)
        if magnitude is not None:
            yield self._magnitude(*magnitude, a, b)
        elif self._config.use_dora:
            raise AdapterInvalidError(f"{self._path} is missing its DoRA magnitude")

    def _magnitude(self, key: str, tensor: RawTensor, a: np.ndarray, b: np.ndarray) -> LoraExtra:
        if math.prod(tensor.shape) != len(b):
            raise AdapterInvalidError(f"{key} has {math.prod(tensor.shape)} values, the module {len(b)} rows")
        values = decode(key, tensor).reshape(-1)
        if not self._config.dora_normalized:
            stem = self._name.removesuffix(".weight")
            values = values / self._base.row_norms(stem, a, b, transposed=not self._is_head)
        return self._extra("magnitude", values)

    def _bias(self) -> Iterator[LoraExtra]:
        shift = None
        if {"bias", "base_layer.bias"} <= self._parts.keys():
            raise AdapterInvalidError(f"{self._path} has two tensors for the same bias")
        for part in ("bias", "base_layer.bias"):
            if part in self._parts:
                key, tensor = self._parts[part]
                shift = without_base(f"{self._path}.bias", self._sized(key, tensor), self._base)
        if "lora_B.bias" in self._parts:
            key, tensor = self._parts["lora_B.bias"]
            raw = dict(self._parts.values())
            added = self._sized(key, tensor) * bias_scale(
                self._path, f"{self._path}.lora_A.weight", raw, self._config
            )
            shift = added if shift is None else shift + added
        if shift is not None:
            yield self._extra("bias", shift)

    def _sized(self, key: str, tensor: RawTensor) -> np.ndarray:
        if not self._is_head or tensor.shape != (self._vocab,):
            raise AdapterInvalidError(
                f"{key} has shape {tensor.shape}: a bias is supported on the head, of {self._vocab} values"
            )
        return decode(key, tensor)


def _as_stored(key: str, tensor: RawTensor) -> np.ndarray:
    """Not widened where that would double a large matrix."""
    if tensor.dtype in ("F16", "BF16"):
        return np.frombuffer(tensor.data, NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    return decode(key, tensor)


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
    """Rows of some tokens of the table that encoder and decoder share. stacks: parts of the stacks' own
    tables.

    Each stack looks its tokens up in a module of its own, tied to the shared one, so PEFT passes over most
    of what an adapter has for that. Raises AdapterInvalidError for what would change something if PEFT did
    not pass over it.
    """
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

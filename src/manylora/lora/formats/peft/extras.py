"""What a PEFT directory may hold besides the low-rank matrices of linear layers: trained biases, embedding,
head, norms, and the classification head that PEFT saves with task_type SEQ_CLS and TOKEN_CLS.

The names of these extras are listed in `manylora.lora.extras`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.extras import HEAD
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.peft.names import (
    BIAS_NAMES,
    CLASSIFIER,
    EMBEDDINGS,
    HEADS,
    NORM,
    POOLER,
    SHARED,
    STACK_NORM,
    TABLE,
    ModuleName,
    Modules,
    check_stacks,
    encoder_layers,
    in_our_order,
    in_peft_order,
    is_named_decoder,
    is_whole_table,
    stack_layer,
)
from manylora.lora.formats.peft.settings import PeftConfig
from manylora.lora.formats.tensor_files import NUMPY_TYPES, RawTensor, decode
from manylora.lora.modules import MODULE_NAMES
from manylora.lora.tensors import check_dims, check_layer
from manylora.request import LoraExtra

TABLES = (*EMBEDDINGS, SHARED, "encoder.embed_tokens", "decoder.embed_tokens")
"""Where the embedding of a checkpoint may be; two stacks may have but one of these."""
MORE_TABLES = ("embeddings.word_embeddings", "embeddings.tok_embeddings")
TOKENS = "token_adapter.trainable_tokens_delta"
EMBEDDING_PAIR = ("lora_embedding_A", "lora_embedding_B")
HEAD_PAIR = ("lora_A.weight", "lora_B.weight")
WHOLE_PARTS = ("base_layer.weight", "weight")
SHARED_PARTS = {TOKENS, *EMBEDDING_PAIR, *WHOLE_PARTS, "lora_magnitude_vector"}
CHUNK = 2**24  # bytes that are compared at one time
Tensors = Mapping[str, RawTensor]
Parts = Mapping[str, tuple[str, RawTensor]]
"""Tensors of one module by what follows its path: key, tensor."""


def check_extra_shapes(found: Tensors, bounds: Bounds) -> None:
    """Check the number of elements. found: the tensors that are extras. Whole tables are not counted: they
    may be copies of the base's, which are left out, and must have the base's shape. Raises
    AdapterInvalidError."""
    bounds.check_elements(sum(math.prod(t.shape) for key, t in found.items() if not is_whole_table(key)))


def read_extras(
    found: Tensors,
    tensors: Tensors,
    config: PeftConfig,
    modules: Modules,
    base: BaseReader | None,
    tell: Callable[[str], None],
) -> list[LoraExtra]:
    """found: the adapter's tensors that are extras; tensors: the others. base: None refuses all extras but
    biases of lora_B. tell: as in `ReadOptions`. Raises AdapterInvalidError."""
    biases: dict[str, dict[bool, np.ndarray]] = {}  # by whether they belong to lora_B
    extras: list[LoraExtra] = []
    tables: dict[tuple[str, str], dict[str, tuple[str, RawTensor]]] = {}
    heads = {key: tensor for key, tensor in found.items() if CLASSIFIER.fullmatch(key)}
    poolers = {key: tensor for key, tensor in found.items() if POOLER.fullmatch(key)}
    for key, tensor in sorted(found.items()):
        if key in heads or key in poolers:
            continue
        bias = BIAS_NAMES.find(key, modules)
        if bias is not None and bias.module_id is not None:
            name, shift = _module_bias(bias, tensor, tensors, config, modules, base)
            parts = biases.setdefault(name, {})
            if (of_b := bias.part == "lora_B.bias") in parts:
                raise AdapterInvalidError(f"{key} and another tensor mean the same bias")
            parts[of_b] = shift
        elif match := STACK_NORM.fullmatch(key) or NORM.fullmatch(key):
            extras.append(_norm(match, key, tensor, modules, _known(key, base)))
        elif match := TABLE.fullmatch(key):
            part = match["part"].removesuffix(".weight") if "magnitude" in key else match["part"]
            where = _table_name(match, modules), match["path"]
            tables.setdefault(where, {})[part] = (key, tensor)
    if len({name for name, _ in tables}) < len(tables):
        raise AdapterInvalidError(f"{' and '.join(path for _, path in tables)} belong to two models")
    for (name, path), own in tables.items():
        if name == SHARED:
            stacks = [parts for (other, _), parts in tables.items() if other.endswith(".embed")]
            extras += _read_shared(path, own, stacks, config, _known(path, base))
        else:
            extras += Table(name, path, own, config, _known(path, base)).read()
    extras += [LoraExtra(name, np.sum(list(parts.values()), axis=0)) for name, parts in biases.items()]
    head = _read_classifier(heads, base)
    extras += head + _read_pooler(poolers, head, config, base, tell)
    _check_names(extras, modules, base)
    return extras


def _known(key: str, base: BaseReader | None) -> BaseReader:
    if base is None:
        raise AdapterInvalidError(
            f"{key} is relative to the base model, which is not known here: name it with --base, or serve "
            "the directory"
        )
    return base


def _check_names(extras: list[LoraExtra], modules: Modules, base: BaseReader | None) -> None:
    """Refuse combinations that are ambiguous or that PEFT would ignore."""
    names = {extra.name for extra in extras}
    if len(names) < len(extras):
        raise AdapterInvalidError("the adapter has two tensors for the same norm or matrix")
    if "embed.tokens" not in names:
        return
    if encoder_layers(modules):
        others = names & {"head.weight", "head.magnitude", "head.tokens"}
        others |= {name for name in names if name.startswith(("encoder.embed.", "decoder.embed."))}
        if others:
            raise AdapterInvalidError(
                f"trainable_token_indices of the shared embedding beside {min(others)} mean nothing in PEFT "
                "either: it ties them to both stacks and the head, or to nothing"
            )
        return
    tied = base is not None and not any(base.find(f"{head}.weight") for head in HEADS)
    if tied and names & {"head.weight", "head.magnitude"}:
        raise AdapterInvalidError(
            "the base model's head is its embedding: trainable_token_indices beside a head that is saved or "
            "has DoRA mean nothing in PEFT either"
        )


def _module_bias(
    name: ModuleName,
    tensor: RawTensor,
    tensors: Tensors,
    config: PeftConfig,
    modules: Modules,
    base: BaseReader | None,
) -> tuple[str, np.ndarray]:
    """The name of an extra, and what it adds to the module's output: [out], in our order."""
    key, path, module_id = name.key, name.path, name.module_id
    assert module_id is not None
    layer, module = name.layer(modules), None
    if modules and module_id in modules:
        check_layer(key, modules[module_id], layer)
        module = modules[module_id].at(layer)
    if len(tensor.shape) != 1 or (module is not None and tensor.shape[0] != module.out_dim):
        raise AdapterInvalidError(
            f"{key} has shape {tensor.shape}"
            + (f", {module.name} of this model gives {module.out_dim} values" if module else "")
        )
    values = in_peft_order(path, module_id, decode(key, tensor), module)
    if name.part == "lora_B.bias":
        shift = values * _bias_scale(path, tensors, config)
    else:
        shift = _without_base(f"{path}.bias", values, _known(key, base))
    return f"layers.{layer}.{MODULE_NAMES[module_id]}.bias", in_our_order(path, module_id, shift, module)


def _bias_scale(path: str, tensors: Tensors, config: PeftConfig) -> np.float32:
    """The factor of a bias of lora_B, by the rank of the module's lora_A. Raises AdapterInvalidError."""
    key = f"{path}.lora_A.weight"
    if key not in tensors:
        raise AdapterInvalidError(f"{path} has a bias of lora_B, but no lora_A")
    shape = tensors[key].shape
    if len(shape) != 2 or 0 in shape:
        raise AdapterInvalidError(f"{key} must be a matrix, got {shape}")
    return np.float32(config.scale(path, shape[0]))


def _check_shape(key: str, shape: tuple[int, ...], base: BaseReader) -> None:
    """Raises AdapterInvalidError if the base has the tensor that PEFT calls `key`, but with another shape."""
    name = base.find(key)
    if name is not None and base.shape(name) != shape:
        raise AdapterInvalidError(
            f"{key} has shape {shape}, that of the base model {base.shape(name)}: the adapter was "
            "made for another model"
        )


def _without_base(key: str, values: np.ndarray, base: BaseReader) -> np.ndarray:
    """What a bias in the file changes: it replaces the base's bias, if there is one, which PEFT calls `key`.
    Raises AdapterInvalidError for another shape."""
    name = base.find(key)
    if name is None:
        return values
    _check_shape(key, values.shape, base)
    return values - base.read(name)


def _norm(match: re.Match[str], key: str, tensor: RawTensor, modules: Modules, base: BaseReader) -> LoraExtra:
    """match: of NORM or STACK_NORM. Raises AdapterInvalidError."""
    if base.find(key) is None:
        raise AdapterInvalidError(f"{key}: the base model has no such norm")
    _check_shape(key, tensor.shape, base)
    values = decode(key, tensor)
    shift = _without_base(key, values, base)
    number = int(match["layer"]) if match["layer"] else None
    if match.re is STACK_NORM:
        stack = f"{match['stack']}." if encoder_layers(modules) else ""
        own = f"{stack}{'norm' if match['final'] else 'embedding_norm'}"
        number = None if number is None else stack_layer(key, match["stack"], number, modules)
    else:
        own = match["inputs"] or "norm"
        check_stacks([key], modules)
    where = own if number is None else f"layers.{number}.{match['name']}"
    return LoraExtra(f"{where}.{match['part']}", shift if match["part"] == "bias" else values)


def _table_name(match: re.Match[str], modules: Modules) -> str:
    """The name for extras of what TABLE matched: embed, head, encoder.embed or decoder.embed; or SHARED.

    Raises AdapterInvalidError for a table that the model does not have.
    """
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


class Table:
    """The parts of an embedding or a head. name: for extras; path: PEFT's name of the module.

    Raises AdapterInvalidError if the base has no such matrix, or one of another shape.
    """

    def __init__(self, name: str, path: str, parts: Parts, config: PeftConfig, base: BaseReader) -> None:
        self._extra_name, self._path, self._parts = name, path, parts
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
        if TOKENS in self._parts:
            yield self._tokens()
        yield from self._low_rank()
        yield from self._bias()

    def _extra(self, part: str, values: np.ndarray, token_ids: Sequence[int] = ()) -> LoraExtra:
        return LoraExtra(f"{self._extra_name}.{part}", values, tuple(token_ids))

    def _full(self) -> Iterator[LoraExtra]:
        """The whole matrix, unless it is only a copy of the base's."""
        for part in WHOLE_PARTS:
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
            if tensor.dtype in ("F16", "BF16"):  # not widened, which would double a large matrix
                values = np.frombuffer(tensor.data, NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
            else:
                values = decode(key, tensor)
            yield self._extra("weight", values)

    def _tokens(self) -> LoraExtra:
        key, tensor = self._parts[TOKENS]
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
        names, wrong = (EMBEDDING_PAIR, HEAD_PAIR) if embed else (HEAD_PAIR, EMBEDDING_PAIR)
        present = [name for name in names if name in self._parts]
        magnitude = self._parts.get("lora_magnitude_vector")
        if len(present) == 1 or set(wrong) & self._parts.keys() or (magnitude and not present):
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
        shifts = []
        if {"bias", "base_layer.bias"} <= self._parts.keys():
            raise AdapterInvalidError(f"{self._path} has two tensors for the same bias")
        for part in ("bias", "base_layer.bias"):
            if part in self._parts:
                values = self._vocab_sized(*self._parts[part])
                shifts.append(_without_base(f"{self._path}.bias", values, self._base))
        if "lora_B.bias" in self._parts:
            values = self._vocab_sized(*self._parts["lora_B.bias"])
            shifts.append(values * _bias_scale(self._path, dict(self._parts.values()), self._config))
        if shifts:
            yield self._extra("bias", sum(shifts[1:], start=shifts[0]))

    def _vocab_sized(self, key: str, tensor: RawTensor) -> np.ndarray:
        if not self._is_head or tensor.shape != (self._vocab,):
            raise AdapterInvalidError(
                f"{key} has shape {tensor.shape}: a bias is supported on the head, of {self._vocab} values"
            )
        return decode(key, tensor)


def _read_shared(
    path: str, parts: Parts, stacks: Iterable[Parts], config: PeftConfig, base: BaseReader
) -> Iterator[LoraExtra]:
    """Rows for some tokens of the table that encoder and decoder share. stacks: parts of the stacks' own
    tables.

    Each stack looks its tokens up in a module of its own that is tied to the shared one, so PEFT ignores most
    of what an adapter has for the shared one. Raises AdapterInvalidError for parts that PEFT ignores although
    they were trained.
    """
    if others := parts.keys() - SHARED_PARTS:
        raise AdapterInvalidError(f"{parts[min(others)][0]}: an embedding has no such part")
    name = base.find(f"{path}.weight")
    saved = [own["weight"][1] for own in stacks if "weight" in own]
    for part in WHOLE_PARTS:
        if part in parts:
            key, tensor = parts[part]
            _check_shape(key, tensor.shape, base)
            copied = len(saved) == 2 and all(_are_equal(one, tensor) for one in saved)
            if not copied and (name is None or not base.holds(name, tensor)):
                raise _passed_over(key)
    low = [decode(*parts[part]) for part in EMBEDDING_PAIR if part in parts]
    if low and all(values.any() for values in low):
        raise _passed_over(parts[next(part for part in EMBEDDING_PAIR if part in parts)][0])
    if TOKENS in parts:
        if not base.ties_embeddings:
            raise _passed_over(parts[TOKENS][0])
        yield from Table("embed", path, {TOKENS: parts[TOKENS]}, config, base).read()


def _are_equal(one: RawTensor, other: RawTensor) -> bool:
    """Whether they are equal bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(one.part(at, CHUNK) == other.part(at, CHUNK) for at in range(0, one.num_bytes, CHUNK))


def _passed_over(key: str) -> AdapterInvalidError:
    return AdapterInvalidError(
        f"{key} would do nothing: encoder and decoder look tokens up in embed_tokens of their own, so PEFT "
        "passes over what is trained here; train embed_tokens instead"
    )


def _read_classifier(found: Tensors, base: BaseReader | None) -> list[LoraExtra]:
    """found: tensors whose names match CLASSIFIER, for any number of labels. Raises AdapterInvalidError."""
    parts: dict[str, tuple[str, RawTensor]] = {}
    for key, tensor in found.items():
        match = CLASSIFIER.fullmatch(key)
        assert match is not None
        first = match["layer"] == "dense." or match["pre"]
        name = f"{HEAD}.{'dense.' if first else ''}{match['part']}"
        if name in parts:
            raise AdapterInvalidError(f"{key} and {parts[name][0]} mean the same part of a head")
        parts[name] = key, tensor
    if not parts:
        return []
    hidden = None if base is None else _hidden_size(base)
    for stem in (f"{HEAD}.", f"{HEAD}.dense."):
        _check_head_layer(stem, parts, hidden)
    return [LoraExtra(name, decode(*part)) for name, part in sorted(parts.items())]


def _check_head_layer(stem: str, parts: Parts, hidden: int | None) -> None:
    weight, bias = parts.get(f"{stem}weight"), parts.get(f"{stem}bias")
    if weight is None:
        if bias is not None or stem == f"{HEAD}.":
            raise AdapterInvalidError(f"{next(iter(parts.values()))[0]}: the head lacks {stem}weight")
        return
    key, tensor = weight
    if len(tensor.shape) != 2 or 0 in tensor.shape or (hidden is not None and tensor.shape[1] != hidden):
        raise AdapterInvalidError(
            f"{key} has shape {tensor.shape}: a head must have a row of {hidden or 'hidden_size'} values for "
            "each label; the adapter was made for another model"
        )
    if stem != f"{HEAD}." and tensor.shape[0] != tensor.shape[1]:
        raise AdapterInvalidError(f"{key} has shape {tensor.shape}: it must be square")
    if bias is not None and bias[1].shape != tensor.shape[:1]:
        raise AdapterInvalidError(f"{bias[0]} has shape {bias[1].shape}, {key} {tensor.shape}")


def _hidden_size(base: BaseReader) -> int | None:
    if project := base.find("embeddings_project.weight"):  # Electra's embedding is narrower
        return base.shape(project)[0]
    names = (base.find(f"{table}.weight") for table in (*TABLES, *MORE_TABLES))
    found = next(filter(None, names), None)
    return None if found is None else base.shape(found)[1]


def _read_pooler(
    found: Tensors,
    head: list[LoraExtra],
    config: PeftConfig,
    base: BaseReader | None,
    tell: Callable[[str], None],
) -> list[LoraExtra]:
    """A LoRA on the pooler, as the first of the head's two layers. found: tensors whose names match POOLER.
    head: the adapter's own head, if it has one. Raises AdapterInvalidError."""
    matches = [match for match in map(POOLER.fullmatch, found) if match]
    if not matches:
        return []
    path, parts = matches[0]["path"], {match["part"]: found[match.string] for match in matches}
    if set(parts) != {"A.weight", "B.weight"}:
        raise AdapterInvalidError(f"{path}: a LoRA without DoRA is supported on this layer, with A and B")
    if base is None:
        raise AdapterInvalidError(f"{path} needs the base model: name it with --base")
    own = {one.name for one in head}
    theirs = {f"{HEAD}.{part}": base.find(f"classifier.{part}") for part in ("weight", "bias")}
    if f"{HEAD}.dense.weight" in own or not (own or theirs[f"{HEAD}.weight"]):
        tell(f"{path} is left out: nothing reads it in this model, neither embeddings nor its head")
        return []
    a, b = (decode(f"{path}.lora_{name}", parts[name]) for name in ("A.weight", "B.weight"))
    check_dims(path, a.shape, b.shape, None)
    weight = base.weight(path, a.shape[1], len(b)).numpy() + (b * np.float32(config.scale(path, len(a)))) @ a
    bias = base.find(f"{path}.bias")
    extras = [LoraExtra(f"{HEAD}.dense.weight", weight)]
    extras += [LoraExtra(f"{HEAD}.dense.bias", base.read(bias))] if bias else []
    if not own:
        extras += [LoraExtra(name, base.read(one)) for name, one in theirs.items() if one]
    return extras

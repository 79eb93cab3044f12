"""What a PEFT directory may hold besides the low-rank matrices of linear layers: trained biases, embedding,
head, norms, and the classification head that PEFT saves with task_type SEQ_CLS and TOKEN_CLS. Names of these
extras: `manylora.adapters.extras`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from manylora.adapters.extras import HEAD
from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.peft import names
from manylora.adapters.formats.peft.experts import normalised_magnitude
from manylora.adapters.formats.peft.settings import PeftConfig
from manylora.adapters.formats.tensor_files import BITS, NUMPY_TYPES, RawTensor, decode
from manylora.adapters.modules import MODULE_NAMES
from manylora.adapters.tensors import check_dims, check_layer
from manylora.errors import AdapterInvalidError
from manylora.request import LoraExtra

TABLES = (*names.EMBEDDINGS, names.SHARED, "encoder.embed_tokens", "decoder.embed_tokens")
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


@dataclass(frozen=True)
class ExtraReader:
    """tensors: the adapter's that are no extras. base: None refuses all extras but biases of lora_B. tell: as
    in `ReadOptions`. All methods raise AdapterInvalidError."""

    tensors: Tensors
    config: PeftConfig
    modules: names.Modules
    base: BaseReader | None
    tell: Callable[[str], None]

    def read(self, found: Tensors) -> list[LoraExtra]:
        """found: the adapter's tensors that are extras."""
        biases: dict[str, dict[bool, np.ndarray]] = {}  # by whether they belong to lora_B
        extras: list[LoraExtra] = []
        tables: dict[tuple[str, str], dict[str, tuple[str, RawTensor]]] = {}
        heads: dict[str, RawTensor] = {}
        poolers: dict[str, RawTensor] = {}
        for key, tensor in sorted(found.items()):
            bias = names.BIAS_NAMES.find(key, self.modules)
            if names.CLASSIFIER.fullmatch(key):
                heads[key] = tensor
            elif names.POOLER.fullmatch(key):
                poolers[key] = tensor
            elif bias is not None and bias.module_id is not None:
                name, shift = self._bias(bias, bias.module_id, tensor)
                parts = biases.setdefault(name, {})
                if (of_b := bias.part == "lora_B.bias") in parts:
                    raise AdapterInvalidError(f"{key} and another tensor mean the same bias")
                parts[of_b] = shift
            elif match := names.STACK_NORM.fullmatch(key) or names.NORM.fullmatch(key):
                extras.append(self._norm(match, key, tensor))
            elif match := names.TABLE.fullmatch(key):
                part = match["part"].removesuffix(".weight") if "magnitude" in key else match["part"]
                where = self._table_name(match), match["path"]
                tables.setdefault(where, {})[part] = (key, tensor)
        if len({name for name, _ in tables}) < len(tables):
            raise AdapterInvalidError(f"{' and '.join(path for _, path in tables)} belong to two models")
        for (name, path), own in tables.items():
            if name == names.SHARED:
                stacks = [parts for (other, _), parts in tables.items() if other.endswith(".embed")]
                extras += self._shared(path, own, stacks)
            else:
                extras += Table(name, path, own, self.config, self._known(path)).read()
        extras += [LoraExtra(name, np.sum(list(parts.values()), axis=0)) for name, parts in biases.items()]
        head = self._classifier(heads)
        extras += head + self._pooler(poolers, head)
        self._check_names(extras)
        return extras

    def _known(self, key: str) -> BaseReader:
        if self.base is None:
            raise AdapterInvalidError(
                f"{key} is relative to the base model, which is not known here: name it with --base, or "
                "serve the directory"
            )
        return self.base

    def _check_names(self, extras: list[LoraExtra]) -> None:
        """Refuse combinations that are ambiguous or that PEFT would ignore."""
        given = {extra.name for extra in extras}
        if len(given) < len(extras):
            raise AdapterInvalidError("the adapter has two tensors for the same norm or matrix")
        if "embed.tokens" not in given:
            return
        if names.encoder_layers(self.modules):
            others = given & {"head.weight", "head.magnitude", "head.tokens"}
            others |= {name for name in given if name.startswith(("encoder.embed.", "decoder.embed."))}
            if others:
                raise AdapterInvalidError(
                    f"trainable_token_indices of the shared embedding beside {min(others)} mean nothing in "
                    "PEFT either: it ties them to both stacks and the head, or to nothing"
                )
            return
        tied = self.base is not None and not any(self.base.find(f"{head}.weight") for head in names.HEADS)
        if tied and given & {"head.weight", "head.magnitude"}:
            raise AdapterInvalidError(
                "the base model's head is its embedding: trainable_token_indices beside a head that is saved "
                "or has DoRA mean nothing in PEFT either"
            )

    def _bias(self, name: names.ModuleName, module_id: int, tensor: RawTensor) -> tuple[str, np.ndarray]:
        """The name of an extra, and what it adds to a module's output: [out], in our order."""
        key, path, layer, module = name.key, name.path, name.layer(self.modules), None
        if self.modules and module_id in self.modules:
            check_layer(key, self.modules[module_id], layer)
            module = self.modules[module_id].at(layer)
        if len(tensor.shape) != 1 or (module is not None and tensor.shape[0] != module.out_dim):
            raise AdapterInvalidError(
                f"{key} has shape {tensor.shape}"
                + (f", {module.name} of this model gives {module.out_dim} values" if module else "")
            )
        values = names.in_peft_order(path, module_id, decode(key, tensor), module)
        if name.part == "lora_B.bias":
            shift = values * _bias_scale(path, self.tensors, self.config)
        else:
            shift = _without_base(f"{path}.bias", values, self._known(key))
        shift = names.in_our_order(path, module_id, shift, module)
        return f"layers.{layer}.{MODULE_NAMES[module_id]}.bias", shift

    def _norm(self, match: re.Match[str], key: str, tensor: RawTensor) -> LoraExtra:
        """match: of NORM or STACK_NORM."""
        base = self._known(key)
        if base.find(key) is None:
            raise AdapterInvalidError(f"{key}: the base model has no such norm")
        _check_shape(key, tensor.shape, base)
        number = int(match["layer"]) if match["layer"] else None
        if match.re is names.STACK_NORM:
            stack = f"{match['stack']}." if names.encoder_layers(self.modules) else ""
            own = f"{stack}{'norm' if match['final'] else 'embedding_norm'}"
            number = None if number is None else names.stack_layer(key, match["stack"], number, self.modules)
        else:
            own = match["inputs"] or "norm"
            names.check_stacks([key], self.modules)
        where = own if number is None else f"layers.{number}.{match['name']}"
        values = decode(key, tensor)
        shift = _without_base(key, values, base) if match["part"] == "bias" else values
        return LoraExtra(f"{where}.{match['part']}", shift)

    def _table_name(self, match: re.Match[str]) -> str:
        """The name for extras of what TABLE matched: embed, head, encoder.embed or decoder.embed; or SHARED.
        Refuses a table that the model does not have."""
        if match["head"]:
            return "head"
        stacks = names.encoder_layers(self.modules) > 0
        if match["stack"] == "decoder" and names.is_named_decoder(self.modules):
            return "embed"
        if self.modules is not None and stacks != bool(match["stack"] or match["shared"]):
            has = "an embedding for each of encoder and decoder" if stacks else "no encoder"
            raise AdapterInvalidError(f"{match['path']}: this model has {has}")
        if match["shared"]:
            return names.SHARED
        return f"{match['stack']}.embed" if match["stack"] else "embed"

    def _shared(self, path: str, parts: Parts, stacks: Iterable[Parts]) -> Iterator[LoraExtra]:
        """Rows for some tokens of the table that encoder and decoder share. stacks: of their own tables.

        Each stack looks its tokens up in a module of its own that is tied to the shared one, so PEFT ignores
        most of what an adapter has for the shared one. Such parts are refused if they were trained."""
        base = self._known(path)
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
                    raise _without_effect(key)
        low = [parts[part] for part in EMBEDDING_PAIR if part in parts]
        if low and all(decode(*one).any() for one in low):
            raise _without_effect(low[0][0])
        if TOKENS in parts:
            # transformers always ties T5's embeddings.
            t5 = base.settings.get("model_type") in ("t5", "mt5")
            if not t5 and base.settings.get("tie_word_embeddings") is False:
                raise _without_effect(parts[TOKENS][0])
            yield from Table("embed", path, {TOKENS: parts[TOKENS]}, self.config, base).read()

    def _classifier(self, found: Tensors) -> list[LoraExtra]:
        """found: tensors whose names match CLASSIFIER, for any number of labels."""
        parts: dict[str, tuple[str, RawTensor]] = {}
        for key, tensor in found.items():
            match = names.CLASSIFIER.fullmatch(key)
            assert match is not None
            first = match["layer"] == "dense." or match["pre"]
            name = f"{HEAD}.{'dense.' if first else ''}{match['part']}"
            if name in parts:
                raise AdapterInvalidError(f"{key} and {parts[name][0]} mean the same part of a head")
            parts[name] = key, tensor
        if not parts:
            return []
        hidden = None if self.base is None else _hidden_size(self.base)
        for stem in (f"{HEAD}.", f"{HEAD}.dense."):
            bias = parts.get(f"{stem}bias")
            if f"{stem}weight" not in parts:
                if bias is not None or stem == f"{HEAD}.":
                    raise AdapterInvalidError(f"{next(iter(parts.values()))[0]}: the head lacks {stem}weight")
                continue
            key, tensor = parts[f"{stem}weight"]
            shape = tensor.shape
            if len(shape) != 2 or 0 in shape or (hidden is not None and shape[1] != hidden):
                raise AdapterInvalidError(
                    f"{key} has shape {shape}: a head must have a row of {hidden or 'hidden_size'} values "
                    "for each label; the adapter was made for another model"
                )
            if stem != f"{HEAD}." and shape[0] != shape[1]:
                raise AdapterInvalidError(f"{key} has shape {shape}: it must be square")
            if bias is not None and bias[1].shape != shape[:1]:
                raise AdapterInvalidError(f"{bias[0]} has shape {bias[1].shape}, {key} {shape}")
        return [LoraExtra(name, decode(*part)) for name, part in sorted(parts.items())]

    def _pooler(self, found: Tensors, head: list[LoraExtra]) -> list[LoraExtra]:
        """A LoRA on the pooler, as the first of the head's two layers. found: tensors whose names match
        POOLER. head: the adapter's own head, if it has one."""
        matches = [match for match in map(names.POOLER.fullmatch, found) if match]
        if not matches:
            return []
        path, parts = matches[0]["path"], {match["part"]: found[match.string] for match in matches}
        if set(parts) != {"A.weight", "B.weight"}:
            raise AdapterInvalidError(f"{path}: a LoRA without DoRA is supported on this layer, with A and B")
        if (base := self.base) is None:
            raise AdapterInvalidError(f"{path} needs the base model: name it with --base")
        own = {one.name for one in head}
        theirs = {f"{HEAD}.{part}": base.find(f"classifier.{part}") for part in ("weight", "bias")}
        if f"{HEAD}.dense.weight" in own or not (own or theirs[f"{HEAD}.weight"]):
            self.tell(f"{path} is left out: nothing reads it in this model, neither embeddings nor its head")
            return []
        a, b = (decode(f"{path}.lora_{name}", parts[name]) for name in ("A.weight", "B.weight"))
        check_dims(path, a.shape, b.shape, None)
        scaled = b * np.float32(self.config.scale(path, len(a)))
        weight = base.weight(path, a.shape[1], len(b)).numpy() + scaled @ a
        extras = [LoraExtra(f"{HEAD}.dense.weight", weight)]
        if bias := base.find(f"{path}.bias"):
            extras.append(LoraExtra(f"{HEAD}.dense.bias", base.read(bias)))
        if not own:
            extras += [LoraExtra(name, base.read(one)) for name, one in theirs.items() if one]
        return extras


def _hidden_size(base: BaseReader) -> int | None:
    if project := base.find("embeddings_project.weight"):  # Electra's embedding is narrower
        return base.shape(project)[0]
    tables = (base.find(f"{table}.weight") for table in (*TABLES, *MORE_TABLES))
    found = next(filter(None, tables), None)
    return None if found is None else base.shape(found)[1]


def _are_equal(one: RawTensor, other: RawTensor) -> bool:
    """Whether they are equal bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    most = math.prod(one.shape) * BITS.get(one.dtype, 0) // 8
    return all(one.part(at, CHUNK) == other.part(at, CHUNK) for at in range(0, most, CHUNK))


def _without_effect(key: str) -> AdapterInvalidError:
    return AdapterInvalidError(
        f"{key} would do nothing: encoder and decoder look tokens up in embed_tokens of their own, so PEFT "
        "passes over what is trained here; train embed_tokens instead"
    )


def _bias_scale(path: str, tensors: Tensors, config: PeftConfig) -> np.float32:
    """The factor of a bias of lora_B, by the rank of the module's lora_A."""
    key = f"{path}.lora_A.weight"
    if key not in tensors:
        raise AdapterInvalidError(f"{path} has a bias of lora_B, but no lora_A")
    shape = tensors[key].shape
    if len(shape) != 2 or 0 in shape:
        raise AdapterInvalidError(f"{key} must be a matrix, got {shape}")
    return np.float32(config.scale(path, shape[0]))


def _check_shape(key: str, shape: tuple[int, ...], base: BaseReader) -> None:
    """Refuses another shape than that of the base's tensor that PEFT calls `key`, if there is one."""
    name = base.find(key)
    if name is not None and base.shape(name) != shape:
        raise AdapterInvalidError(
            f"{key} has shape {shape}, that of the base model {base.shape(name)}: the adapter was "
            "made for another model"
        )


def _without_base(key: str, values: np.ndarray, base: BaseReader) -> np.ndarray:
    """What a bias in the file changes: it replaces the base's, which PEFT calls `key`, if there is one."""
    _check_shape(key, values.shape, base)
    name = base.find(key)
    return values if name is None else values - base.read(name)


class Table:
    """The parts of an embedding or a head. name: for extras; path: PEFT's name of the module.

    Raises AdapterInvalidError if the base has no such matrix, or one of another shape.
    """

    def __init__(self, name: str, path: str, parts: Parts, config: PeftConfig, base: BaseReader) -> None:
        self._extra_name, self._path, self._parts = name, path, parts
        self._is_head = name == "head"
        self._config, self._base = config, base
        # A checkpoint may call them as another release of transformers did; a tied head is the embedding.
        others = (*names.HEADS, *TABLES) if self._is_head else TABLES
        found = next(filter(None, (base.find(f"{other}.weight") for other in (path, *others))), None)
        if found is None or len(base.shape(found)) != 2:
            raise AdapterInvalidError(f"{path}: the base model has no such matrix")
        self._name = found
        self._vocab, self._hidden = base.shape(found)

    def read(self) -> Iterator[LoraExtra]:
        yield from self._full()
        if TOKENS in self._parts:
            key, tensor = self._parts[TOKENS]
            ids = self._config.token_ids(self._path, self._extra_name == "embed")
            if tensor.shape != (len(ids), self._hidden) or not ids or max(ids) >= self._vocab:
                raise AdapterInvalidError(
                    f"{key} has shape {tensor.shape} for {len(ids)} tokens of trainable_token_indices; the "
                    f"model has {self._vocab} tokens of {self._hidden} values"
                )
            order = np.argsort(ids)
            token_ids = tuple(ids[i] for i in order)
            yield LoraExtra(f"{self._extra_name}.tokens", decode(key, tensor)[order], token_ids)
        yield from self._low_rank()
        if {"bias", "base_layer.bias"} <= self._parts.keys():
            raise AdapterInvalidError(f"{self._path} has two tensors for the same bias")
        shifts = []
        for part in ("bias", "base_layer.bias", "lora_B.bias"):
            if part not in self._parts:
                continue
            key, tensor = self._parts[part]
            if not self._is_head or tensor.shape != (self._vocab,):
                where = f"on the head, of {self._vocab} values"
                raise AdapterInvalidError(f"{key} has shape {tensor.shape}: a bias is supported {where}")
            values = decode(key, tensor)
            if part == "lora_B.bias":
                shifts.append(values * _bias_scale(self._path, dict(self._parts.values()), self._config))
            else:
                shifts.append(_without_base(f"{self._path}.bias", values, self._base))
        if shifts:
            yield LoraExtra(f"{self._extra_name}.bias", sum(shifts[1:], start=shifts[0]))

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
            yield LoraExtra(f"{self._extra_name}.weight", values)

    def _low_rank(self) -> Iterator[LoraExtra]:
        embed, own = not self._is_head, self._extra_name
        pair, wrong = (EMBEDDING_PAIR, HEAD_PAIR) if embed else (HEAD_PAIR, EMBEDDING_PAIR)
        present = [name for name in pair if name in self._parts]
        magnitude = self._parts.get("lora_magnitude_vector")
        if len(present) == 1 or set(wrong) & self._parts.keys() or (magnitude and not present):
            raise AdapterInvalidError(f"{self._path} must have {pair[0]} and {pair[1]}")
        if not present:
            return
        stored_a, stored_b = (self._parts[name][1].shape for name in pair)
        check_dims(self._path, stored_a, stored_b, None)
        given = stored_a[1], stored_b[0]
        if given != ((self._vocab, self._hidden) if embed else (self._hidden, self._vocab)):
            raise AdapterInvalidError(
                f"{self._path} goes from {given[0]} to {given[1]} dimensions, the model has {self._vocab} "
                f"tokens of {self._hidden} values: the adapter was made for another model"
            )
        a, b = (decode(*self._parts[name]) for name in pair)
        b = b * np.float32(self._config.scale(self._path, a.shape[0]))
        yield LoraExtra(f"{own}.lora_A", np.ascontiguousarray(a.T) if embed else a)
        yield LoraExtra(f"{own}.lora_B", b)
        stored = None if magnitude is None else decode(*magnitude)
        name = self._name.removesuffix(".weight")
        normal = normalised_magnitude(name, stored, a, b, self._config, self._base, transposed=embed)
        if normal is not None:
            yield LoraExtra(f"{own}.magnitude", normal)

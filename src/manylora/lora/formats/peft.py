"""PEFT directories: adapter_config.json and adapter_model.safetensors (or, for tools, .bin).

Strict: an adapter of which a part would be lost, or that means more than B A x, is refused with the reason.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import narrow
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.lora import staging
from manylora.lora.file_adapter import FileRows
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.headers import header_of
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.kinds.table import check_kind, read_form
from manylora.lora.formats.opened import OpenFile
from manylora.lora.formats.peft_config import (
    ALORA,
    CONFIG,
    PeftConfig,
    config_of,
    is_plain_lora,
    read_settings,
)
from manylora.lora.formats.peft_experts import (
    EXPERT_KEY,
    check_expert_shapes,
    check_scale,
    expert_rows,
)
from manylora.lora.formats.peft_extras import check_extra_shapes, is_extra, read_extras
from manylora.lora.formats.peft_files import peft_tensors, weights_file
from manylora.lora.formats.peft_names import (
    PEFT_KEY,
    VISION,
    in_our_order,
    in_peft_order,
    layer_of,
    module_id_of,
)
from manylora.lora.formats.peft_plain import find_plain
from manylora.lora.formats.peft_stacks import STACK_KEY, Parts, check_stacks, stack_parts
from manylora.lora.formats.peft_strict import check_keys, check_pairs, tell_left_out, tell_missing
from manylora.lora.formats.peft_tables import is_whole_table
from manylora.lora.formats.peft_unused import without_unused
from manylora.lora.formats.plain_rows import THREADS, PlainRows
from manylora.lora.formats.read_options import DEFAULT, ReadOptions
from manylora.lora.formats.tensor_files import (
    RawTensor,
    check_type,
    decode,
    read_encoded,
)
from manylora.lora.modules import LoraModule, LoraModuleId
from manylora.lora.number_types import BFLOAT16, BY_SAFETENSORS, NumberType
from manylora.lora.shared import SharedMatrices, share
from manylora.lora.tensors import AdapterRow, check_dims, check_layer, digest_values
from manylora.request import LoraExtra

# Elements of an adapter that several threads read, and of its rows: with smaller ones they wait for Python.
PARALLEL, PARALLEL_ROWS = 2**21, 2**16
NARROWED = 2**22  # elements of an adapter whose memory is worth the narrowing of each row
LOW_RANK = re.compile(r"\.lora_[AB]\.")  # in the names of what PEFT applies to some tokens only
DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")
DORA_REASON = "DoRA magnitudes are divided by the row norms of the base model: name it with --base"
NO_ROW = (
    "only low-rank matrices have a place in the tensors of an adapter: of biases, norms, embedding, head, "
    "scales and prompts serve the PEFT directory itself, or train without them"
)
VISION_REASON = (
    "of the model's vision or audio part, which is not served: set lora_text_only (--lora-text-only) to "
    "leave that out and serve the text part alone"
)
REFUSED = (
    (VISION, VISION_REASON),
    (re.compile(r"wpe.*\.lora_"), "adapters on the position embedding are not supported"),
    (
        re.compile(r"embed_tokens_per_layer\."),
        "adapters on the table of per-layer embeddings are not supported: train without it",
    ),
    (
        re.compile(r"\.(?:linear_attn|conv|mamba|mixer(?=\.(?:conv1d|norm|A_log|D|dt_bias)))\.(?!.*\.lora_)"),
        "of a recurrent layer only the linear layers can be adapted: train without this",
    ),
    (DORA, "this DoRA magnitude belongs to no known LoRA module"),
    (
        re.compile(r"^(?!.*\.lora_)"),
        "full weights and biases of this module are not supported: of modules_to_save the embedding, the "
        "head and norms are",
    ),
)


def read_peft(
    folder: Path, partial: list[str] | None = None, options: ReadOptions = DEFAULT
) -> list[AdapterRow]:
    """Rows in float32, the scaling folded into B; ascending by layer and module.

    The scaling is `PeftConfig.scale` of the matrix's own rank. partial: a list that takes a line for each
    part left out; None refuses such adapters. Raises AdapterInvalidError, for extras too.
    """
    settings = read_settings(folder, options.bounds)
    with options.open_base() as base:
        form, extras = _open(folder, settings, options, base)
        for key in sorted([*extras, *(extra.name for extra in form.extras)]):
            if partial is None or DORA.search(key):
                raise AdapterInvalidError(f"{key}: {NO_ROW}")
            partial.append(f"no match {key}: {NO_ROW}")
        rows = _Reading(form.config, options, base, vectors=form.vectors).rows(form.tensors, partial)
    if not rows:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    return rows


def read_peft_whole(folder: Path, options: ReadOptions = DEFAULT) -> tuple[list[AdapterRow], list[LoraExtra]]:
    """As `read_peft`, with what has no row, in float32.

    Of an adapter whose matrices all are F8_E4M3, `float8` means that rows keep them so, with the scaling
    beside each; with DoRA they do not.
    """
    settings = read_settings(folder, options.bounds)
    if options.digest and (alike := _find_alike(folder, settings, options)) is not None:
        plain, file = alike
        if (made := plain.read(file, options.bfloat16)) is not None:
            return made, []
    told: list[str] = []
    options = replace(options, tell=_both(told.append, options.tell))
    with options.open_base() as base:
        form, found = _open(folder, settings, options, base)
        config, tensors = form.config, form.tensors
        check_extra_shapes(found, options.bounds)
        kind = _find_encoding(tensors, config) if options.float8 else None
        reading = _Reading(config, options, base, kind, form.vectors)
        rows = reading.rows(tensors)
        extras = read_extras(found, tensors, config, options.modules, base) + form.extras
    tell_left_out(settings, tensors, options)
    tell_missing(settings, {(row.layer, row.module_id) for row in rows}, options)
    if config.invocation:
        # Whole tables that are copies of the base's were left out.
        _check_activated(one.name for one in extras if one.name.endswith(".weight"))
        extras.append(LoraExtra.invocation(config.invocation))
    if not rows and not extras:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    if options.alike is not None and reading.plain and not (extras or told):
        options.alike.keep(settings, *reading.plain[0])
    return rows, extras


def _both(one: Callable[[str], None], other: Callable[[str], None]) -> Callable[[str], None]:
    def tell(line: str) -> None:
        one(line)
        other(line)

    return tell


def stored_rows(folder: Path, options: ReadOptions = DEFAULT) -> FileRows | None:
    """Where the values are that `read_peft_whole` gives of an adapter that it has read before. None: there is
    more to them than two matrices for each row, and the scaling. Raises AdapterInvalidError."""
    settings = read_settings(folder, options.bounds)
    if not is_plain_lora(settings):
        return None
    if (alike := _find_alike(folder, settings, options)) is not None:
        return alike[0].table
    config, tensors = config_of(settings), without_unused(peft_tensors(folder, options), options)
    special = any(is_extra(key) or EXPERT_KEY.fullmatch(key) or STACK_KEY.fullmatch(key) for key in tensors)
    if special or config.invocation or config.use_dora:
        return None
    plain = find_plain(_gather(tensors, None, options.modules), options, partial(_scale, config))
    return plain.table if plain is not None else None


def _find_alike(
    folder: Path, settings: Mapping[str, Any], options: ReadOptions
) -> tuple[PlainRows, OpenFile] | None:
    """Of an adapter like one that was read in full: its rows, in this file. None: there was none, or there is
    something to tell."""
    if options.alike is None:
        return None
    try:
        file = OpenFile(weights_file(folder), options.bounds)
        header_of(file, options.bounds)
    except (AdapterInvalidError, OSError, ValueError):
        return None
    known = options.alike.find(settings, file)
    return None if known is None else (known, file)


def _open(
    folder: Path, settings: Mapping[str, Any], options: ReadOptions, base: BaseReader | None
) -> tuple[LoraForm, dict[str, RawTensor]]:
    """The adapter in the form of a LoRA, and those of its tensors that are extras, which it is then without.
    base: open."""
    check_kind(settings)  # before files are looked for that this kind may not have
    check_keys(settings, options)
    form = read_form(PeftFiles(settings, peft_tensors(folder, options), options, base))
    config, found = form.config, without_unused(form.tensors, options)
    if config.use_dora and options.base is None and not config.dora_normalized:
        raise AdapterInvalidError(f"{CONFIG} sets use_dora: {DORA_REASON}")
    extras = {key: tensor for key, tensor in found.items() if is_extra(key)}
    rest = {key: tensor for key, tensor in found.items() if key not in extras}
    if config.invocation:
        _check_activated([*rest, *extras])
    return replace(form, tensors=rest), extras


def _check_activated(keys: Iterable[str]) -> None:
    """Raises AdapterInvalidError for what acts on every token, of an adapter that must leave those before its
    invocation sequence to the base model."""
    for key in keys:
        if not (LOW_RANK.search(key) or is_whole_table(key)) or EXPERT_KEY.fullmatch(key):
            raise AdapterInvalidError(
                f"{CONFIG} sets {ALORA}, and {key} would act before these tokens too: of an activated LoRA "
                "only low-rank matrices of linear layers are supported"
            )


def _find_encoding(tensors: Mapping[str, RawTensor], config: PeftConfig) -> NumberType | None:
    """The type with an encoding that all tensors have. None, too, with DoRA, and where a row may have more
    than one scaling: those of its experts may differ."""
    if config.use_dora or (config.alpha_pattern and any(EXPERT_KEY.fullmatch(key) for key in tensors)):
        return None
    kinds = {tensor.dtype for tensor in tensors.values()}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None or kind.encoding is Encoding.PLAIN or any(DORA.search(key) for key in tensors):
        return None
    return kind


def _gather(
    tensors: Mapping[str, RawTensor], partial: list[str] | None, modules: Mapping[int, LoraModule] | None
) -> dict[tuple[int, int], Parts]:
    seen = sorted(key for key in tensors if VISION.search(key))
    if seen and partial is None:
        rest = f" and {len(seen) - 1} other tensors are " if len(seen) > 1 else " is "
        raise AdapterInvalidError(f"{seen[0]}{rest}{VISION_REASON}")
    found: dict[tuple[int, int], Parts] = {}
    roots: dict[str, str] = {}
    for key, tensor in sorted(tensors.items()):
        match = PEFT_KEY.fullmatch(key)
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None:
            _leave_out(key, partial)
            continue
        roots.setdefault(match["root"], key)
        parts = found.setdefault((layer_of(match), module_id), {})
        part = match["side"] or "magnitude"
        if part in parts:
            raise AdapterInvalidError(f"{key} and {parts[part][0]} mean the same module")
        parts[part] = (match["path"], key, tensor)
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return found


def _leave_out(key: str, partial: list[str] | None) -> None:
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    # A module without its magnitude would be another adapter, so this may not be left out.
    if partial is None or (DORA.search(key) and not VISION.search(key)):
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")


def _scale(config: PeftConfig, path: str, module_id: int, rank: int) -> float:
    return config.scale(_pattern_name(config, path, module_id), rank)


def _pattern_name(config: PeftConfig, path: str, module_id: int) -> str:
    """What patterns call the module at `path`: a router is a parameter to newer PEFT."""
    is_parameter = module_id == LoraModuleId.MOE_ROUTER and config.target_parameters
    return f"{path}.weight" if is_parameter else path


@dataclass(frozen=True)
class _Reading:
    """One adapter that is read. base: open. kind: the type with an encoding that all tensors have, and rows
    keep. vectors: as of `LoraForm`. plain: the file and what all rows are in it, if `rows` found
    them to be plain."""

    config: PeftConfig
    options: ReadOptions
    base: BaseReader | None
    kind: NumberType | None = None
    vectors: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    common: dict[object, SharedMatrices] = field(default_factory=dict)  # found so far
    plain: list[tuple[OpenFile, PlainRows]] = field(default_factory=list)

    def rows(self, tensors: Mapping[str, RawTensor], partial: list[str] | None = None) -> list[AdapterRow]:
        modules, bounds, kind = self.options.modules, self.options.bounds, self.kind
        experts = {key: tensor for key, tensor in tensors.items() if EXPERT_KEY.fullmatch(key)}
        stacks = {key: tensor for key, tensor in tensors.items() if STACK_KEY.fullmatch(key)}
        plain = {key: tensor for key, tensor in tensors.items() if key not in experts and key not in stacks}
        check_stacks((key for key in plain if PEFT_KEY.fullmatch(key)), modules)
        found = _gather(plain, partial, modules) | stack_parts(stacks, modules)
        check_pairs(tensors)
        elements = check_expert_shapes(experts, modules, bounds)
        for place, parts in found.items():
            elements += self._check_shapes(*place, parts)
        apart = {
            parts["A"][2].shape + parts["B"][2].shape for parts in found.values() if self._vectors_of(parts)
        }
        elements += sum(a * b + c * d for a, b, c, d in apart)
        bounds.check_rows(len(found))
        bounds.check_elements(elements, float8=kind is not None)
        read = decode if kind is None else read_encoded
        if not experts and kind is None and (made := self._read_plain(found)) is not None:
            return made
        decoded = {key: read(key, tensor) for key, tensor in experts.items()}
        rows = expert_rows(decoded, self.config, modules, kind) + self._read_rows(found)
        return sorted(rows, key=lambda row: (row.layer, row.module_id))

    def _read_plain(self, found: Mapping[tuple[int, int], Parts]) -> list[AdapterRow] | None:
        """None: they are not, or one of them is wrong, as will be told."""
        if self.vectors or not self.options.digest:
            return None
        plain = find_plain(found, self.options, partial(_scale, self.config))
        if plain is None or not plain.can_be_read:
            return None
        file = next(iter(found.values()))["A"][2].file
        assert file is not None
        rows = plain.read(file, self.options.bfloat16)
        if rows is not None:
            self.plain.append((file, plain))
        return rows

    def _read_rows(self, found: Mapping[tuple[int, int], Parts]) -> list[AdapterRow]:
        """All payloads in one piece of memory; a large adapter's are read by several threads."""
        sizes = {place: self._size(parts) for place, parts in found.items()}
        total = sum(sizes.values())
        bfloat16 = self.options.bfloat16 and self.kind is None and total >= NARROWED
        dtype = BFLOAT16 if bfloat16 else staging.FLOAT32
        whole = staging.take(total, dtype if self.kind is None else np.dtype(np.uint8))
        pieces = np.split(whole, np.cumsum(list(sizes.values()))[:-1])
        places = dict(zip(found, pieces, strict=False))  # without rows there is one empty piece

        def read(part: list[tuple[int, int]]) -> list[AdapterRow]:
            made = []
            widest = max((sizes[place] for place in part), default=0)
            wide = np.empty(widest if bfloat16 else 0, np.float32)  # one row at a time
            for place in part:
                target = places[place]
                one = self._row(*place, found[place], wide[: target.size] if bfloat16 else target)
                if bfloat16:
                    narrow(target.view(np.uint16), one.payload)
                    one = replace(one, payload=target)
                made.append(one)
            return made

        order = sorted(found)
        few = total < max(PARALLEL, PARALLEL_ROWS * len(order))
        if few or any("magnitude" in parts or self._is_shared(parts) for parts in found.values()):
            return read(order)
        threads = min(THREADS, os.cpu_count() or 1)
        # A task costs more than some rows.
        shares = [order[first :: 4 * threads] for first in range(4 * threads)]
        with ThreadPoolExecutor(threads) as pool:
            return [one for rows in pool.map(read, shares) for one in rows]

    def _check_shapes(self, layer: int, module_id: int, parts: Parts) -> int:
        """The numbers of a row. Raises AdapterInvalidError for one that is not to be read."""
        (path, _, a), (_, _, b) = parts["A"], parts["B"]
        if self.options.modules and module_id in self.options.modules:
            check_layer(path, self.options.modules[module_id], layer)
        check_dims(path, a.shape, b.shape, self.options.module(module_id, layer))
        for _, key, tensor in parts.values():
            check_type(key, tensor)
        rank, dora = a.shape[0], "magnitude" in parts
        self.config.check_rank(_pattern_name(self.config, path, module_id), rank)
        self.options.bounds.check_rank(rank)
        if dora:
            size = math.prod(parts["magnitude"][2].shape)
            if size != b.shape[0]:
                raise AdapterInvalidError(f"{path} has {b.shape[0]} rows and a DoRA magnitude of {size}")
        elif self.config.use_dora:
            raise AdapterInvalidError(f"{path} is missing its DoRA magnitude")
        elements = self._size(parts)
        self.options.check_row(
            module_id, layer, RowFormat(rank, dora, shared=self._is_shared(parts)), elements
        )
        return elements

    def _vectors_of(self, parts: Parts) -> tuple[np.ndarray, np.ndarray] | None:
        return self.vectors.get(parts["A"][1]) if "A" in parts else None

    def _is_shared(self, parts: Parts) -> bool:
        return self._vectors_of(parts) is not None

    def _size(self, parts: Parts) -> int:
        """The numbers of a row's own."""
        if (vectors := self._vectors_of(parts)) is not None:
            return sum(one.size for one in vectors)
        return sum(math.prod(tensor.shape) for *_, tensor in parts.values())

    def _shared_row(self, layer: int, module_id: int, parts: Parts, payload: np.ndarray) -> AdapterRow:
        """As `_row`, of one that shares its matrices."""
        (path, key_a, a), (_, key_b, b) = parts["A"], parts["B"]
        module, vectors = self.options.module(module_id, layer), self._vectors_of(parts)
        assert vectors is not None
        order = np.arange(len(vectors[0]))
        for turned in (in_peft_order, in_our_order):
            order = turned(path, module_id, order, module)
        known = a.shape, b.shape, order.tobytes()
        if known not in self.common:
            self.common[known] = share(decode(key_a, a), decode(key_b, b)[order])
        np.concatenate((vectors[0][order], vectors[1]), out=payload)
        content = digest_values(payload) if self.options.digest else b""
        row = RowFormat(a.shape[0], shared=True)
        return AdapterRow(module_id, layer, row, payload, content, self.common[known])

    def _row(self, layer: int, module_id: int, parts: Parts, payload: np.ndarray) -> AdapterRow:
        """payload: to be filled; float32, or bytes of `kind`. parts: as `_check_shapes` wants them."""
        if self._is_shared(parts):
            return self._shared_row(layer, module_id, parts, payload)
        (path, key_a, stored_a), (_, key_b, stored_b) = parts["A"], parts["B"]
        module, kind = self.options.module(module_id, layer), self.kind
        end = math.prod(stored_a.shape)
        a = payload[:end].reshape(stored_a.shape)
        b = payload[end : end + math.prod(stored_b.shape)].reshape(stored_b.shape)
        scale = self.config.scale(_pattern_name(self.config, path, module_id), len(a))
        row = RowFormat(len(a), "magnitude" in parts)
        if kind is not None:
            a[...], b[...] = read_encoded(key_a, stored_a), read_encoded(key_b, stored_b)
            check_scale(path, scale)
            row = replace(row, encoding=kind.encoding, scale=float(np.float32(scale)))
        else:
            stored_a.fill(key_a, a)
            stored_b.fill(f"{key_b} (with its scaling)", b, scale)
        if (turned := in_peft_order(path, module_id, b, module)) is not b:
            b[...] = turned
        columns: list[np.ndarray] = [b]
        if row.dora:
            transposed = self.config.fan_in_fan_out if module is None else module.transposed
            magnitude = decode(*parts["magnitude"][1:]).reshape(-1)
            magnitude = in_peft_order(path, module_id, magnitude, module)
            if not self.config.dora_normalized:
                if self.base is None:
                    raise AdapterInvalidError(f"{path}: {DORA_REASON}")
                magnitude = magnitude / self.base.row_norms(path, a, b, transposed)
            columns.append(magnitude)
        columns = [in_our_order(path, module_id, column, module) for column in columns]
        if columns[0] is not b or len(columns) > 1:
            np.concatenate([column.ravel() for column in columns], out=payload[end:])
        payload = payload if kind is None else payload.view(kind.dtype)
        content = digest_values(payload) if self.options.digest else b""  # now, while it is in the cache
        return AdapterRow(module_id, layer, row, payload, content)

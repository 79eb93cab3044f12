"""PEFT directories: adapter_config.json and adapter_model.safetensors (or, for tools, .bin).

Strict: an adapter of which a part would be lost, or that means more than B A x, is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.lora.formats.base_weights import BaseReader
from manylora.lora.formats.layouts import PlainRows
from manylora.lora.formats.peft.experts import EXPERT_KEY
from manylora.lora.formats.peft.extras import check_extra_shapes, is_extra, read_extras
from manylora.lora.formats.peft.files import peft_tensors, weights_file
from manylora.lora.formats.peft.module_tensors import DORA, STACK_KEY, module_parts
from manylora.lora.formats.peft.names import MODULE, layer_of, module_id_of
from manylora.lora.formats.peft.rows import DORA_REASON, RowReader, find_plain, row_scale
from manylora.lora.formats.peft.settings import (
    ALORA,
    CONFIG,
    PeftConfig,
    config_of,
    is_plain_lora,
    peft_type,
    read_settings,
)
from manylora.lora.formats.peft.tables import is_whole_table
from manylora.lora.formats.peft.targets import check_default_targets, check_keys, tell_left_out, tell_missing
from manylora.lora.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.lora.formats.peft_types.table import check_kind, read_form
from manylora.lora.formats.read_options import DEFAULT, ReadOptions
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.formats.tensor_files import RawTensor, header_of
from manylora.lora.number_types import BY_SAFETENSORS, NumberType
from manylora.lora.tensors import AdapterRow, FileRows
from manylora.request import LoraExtra

OF_MODULE = re.compile(MODULE)


def without_unused(tensors: Mapping[str, RawTensor], options: ReadOptions) -> Mapping[str, RawTensor]:
    """The tensors without those of keys and values in layers that read another layer's. Tells of those left
    out. tensors: by PEFT's names.

    Older releases of transformers have such matrices there, and train with them where there is no cache;
    newer ones have none, and load these adapters without them.
    """
    modules = options.modules or {}
    if not any(module.unused for module in modules.values()):
        return tensors
    unused = []
    for key in tensors:
        match = OF_MODULE.match(key)
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None or module_id not in modules:
            continue
        if layer_of(match) in modules[module_id].unused:
            unused.append(key)
    if unused:
        more = f" and {len(unused) - 1} other tensors are" if len(unused) > 1 else " is"
        options.tell(
            f"{min(unused)}{more} of layers that read the keys and values of another layer: without effect"
        )
    return {key: tensor for key, tensor in tensors.items() if key not in unused}


LOW_RANK = re.compile(r"\.lora_[AB]\.")  # in the names of what PEFT applies to some tokens only
NO_ROW = (
    "only low-rank matrices have a place in the tensors of an adapter: of biases, norms, embedding, head, "
    "scales and prompts serve the PEFT directory itself, or train without them"
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
        rows = RowReader(form.config, options, base, vectors=form.vectors).rows(form.tensors, partial)
    if not rows:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    return rows


def read_peft_whole(folder: Path, options: ReadOptions = DEFAULT) -> tuple[list[AdapterRow], list[LoraExtra]]:
    """As `read_peft`, and the extras: what is not a low-rank row, in float32.

    With `options.float8` the rows of an adapter keep F8_E4M3 where all of its matrices have that type, with
    the scaling of each row beside it. With DoRA they do not.
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
        if base is not None and peft_type(settings) == "LORA":
            check_default_targets(settings, tensors, str(base.settings.get("model_type")))
        encoded = _encoded_type(tensors, config) if options.float8 else None
        reader = RowReader(config, options, base, encoded, form.vectors)
        rows = reader.rows(tensors)
        extras = read_extras(found, tensors, config, options.modules, base, options.tell) + form.extras
    tell_left_out(settings, tensors, options)
    tell_missing(settings, {(row.layer, row.module_id) for row in rows}, options)
    if config.invocation:
        # Whole tables that are copies of the base's were left out.
        _check_activated(one.name for one in extras if one.name.endswith(".weight"))
        extras.append(LoraExtra.invocation(config.invocation))
    if not rows and not extras:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    if options.alike is not None and reader.plain is not None and not (extras or told):
        options.alike.keep(settings, *reader.plain)
    return rows, extras


def _both(one: Callable[[str], None], other: Callable[[str], None]) -> Callable[[str], None]:
    def tell(line: str) -> None:
        one(line)
        other(line)

    return tell


def stored_rows(folder: Path, options: ReadOptions = DEFAULT) -> FileRows | None:
    """Where the rows are in the file of an adapter that `read_peft_whole` has accepted. None: not all of them
    are two matrices, which the file has as they are served, and a scaling. Raises AdapterInvalidError."""
    settings = read_settings(folder, options.bounds)
    if not is_plain_lora(settings):
        return None
    if (alike := _find_alike(folder, settings, options)) is not None:
        return alike[0].table
    config, tensors = config_of(settings), without_unused(peft_tensors(folder, options), options)
    special = any(is_extra(key) or EXPERT_KEY.fullmatch(key) or STACK_KEY.fullmatch(key) for key in tensors)
    if special or config.invocation or config.use_dora:
        return None
    plain = find_plain(module_parts(tensors, None, options.modules), options, partial(row_scale, config))
    return plain.table if plain is not None else None


def _find_alike(
    folder: Path, settings: Mapping[str, Any], options: ReadOptions
) -> tuple[PlainRows, OpenFile] | None:
    """Where the rows of this adapter are, known from one like it that was read in full, and its open file.
    None: no adapter like it was read, or its file cannot be read, which the full reading will tell."""
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
    """The adapter in the form of a LoRA, and its extras, which are no longer among its tensors. base:
    open."""
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
    """Raises AdapterInvalidError for a tensor of an activated LoRA that would act on every token: those
    before its invocation sequence belong to the base model."""
    for key in keys:
        if not (LOW_RANK.search(key) or is_whole_table(key)) or EXPERT_KEY.fullmatch(key):
            raise AdapterInvalidError(
                f"{CONFIG} sets {ALORA}, and {key} would act before these tokens too: of an activated LoRA "
                "only low-rank matrices of linear layers are supported"
            )


def _encoded_type(tensors: Mapping[str, RawTensor], config: PeftConfig) -> NumberType | None:
    """The 8-bit type that all tensors have. None: they have no such type in common, there is DoRA, or one row
    may need several scalings, as those of its experts may differ."""
    if config.use_dora or (config.alpha_pattern and any(EXPERT_KEY.fullmatch(key) for key in tensors)):
        return None
    kinds = {tensor.dtype for tensor in tensors.values()}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None or kind.encoding is Encoding.PLAIN or any(DORA.search(key) for key in tensors):
        return None
    return kind

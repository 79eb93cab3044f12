"""PEFT directories: adapter_config.json and adapter_model.safetensors (or, for tools, .bin).

Reading is strict: an adapter is refused with the reason if a part of it would be lost, or if it means more
than B A x. What PEFT itself would ignore is reported as a note. All functions raise AdapterInvalidError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.adapters.extras import take_invocation
from manylora.adapters.formats import gguf, mlx, one_line
from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.peft import names
from manylora.adapters.formats.peft.experts import DORA_REASON
from manylora.adapters.formats.peft.extras import ExtraReader
from manylora.adapters.formats.peft.rows import plan_rows, read_layout
from manylora.adapters.formats.peft.settings import (
    ALORA,
    CONFIG,
    PeftConfig,
    check_keys,
    config_of,
    is_plain_lora,
    peft_type,
    read_settings,
    some,
)
from manylora.adapters.formats.peft_types import check_peft_type, convert
from manylora.adapters.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.adapters.formats.pickled import read_torch
from manylora.adapters.formats.read_options import DEFAULT, ReadOptions
from manylora.adapters.formats.safe_files import OpenFile, is_gguf, is_plain, read_small
from manylora.adapters.formats.tensor_files import RawTensor, header_of, read_safetensors, tensors_of
from manylora.adapters.formats.trainers import in_peft_form, is_foreign
from manylora.adapters.number_types import BY_SAFETENSORS, NumberType
from manylora.adapters.tensors import AdapterContent, pack_rows
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.request import LoraExtra

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
INDEX = f"{WEIGHTS}.index.json"
# PEFT's own name of an adapter, which is in the names of a model's tensors and not in those of its files.
OWN_NAME = re.compile(r"(?:\.modules_to_save)?\.default(?=(?:\.weight|\.bias)?$)")
# Of a module that is saved whole: with bias "all" PEFT also saves its own copy and the base's, and passes
# over both when it loads the adapter.
COPY = re.compile(r"\.(?:modules_to_save|original_module)(?=\.(?:weight|bias)$)")
UNEMBED = re.compile(r"(?:model\.)?unembed_tokens(?=\.lora_)")  # what Tinker calls the head
LOW_RANK = re.compile(r"\.lora_[AB]\.")  # in the names of what PEFT applies to some tokens only
IN_LAYER = re.compile(r".*?\.(\d{1,6})\.")
NO_ROW = (
    "only low-rank matrices have a place in the tensors of an adapter: of biases, norms, embedding, head, "
    "scales and prompts serve the PEFT directory itself, or train without them"
)
# The modules that PEFT takes where target_modules is null, and the model types for which it has some.
DEFAULT_TARGETS = {
    "q v": "t5 mt5",
    "q_proj v_proj": "bart opt llama llama4 mistral mixtral stablelm gemma gemma2 gemma3_text qwen2 qwen3",
    "q_proj v_proj fc1 fc2": "phi",
    "q_proj k_proj v_proj o_proj": "nemotron_h",
    "c_attn": "gpt2",
    "query_key_value": "gpt_neox falcon RefinedWebModel RefinedWeb",
    "query value": "bert roberta xlm-roberta electra",
}


def read_peft(
    folder: Path, options: ReadOptions = DEFAULT, invocation: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in float32 and config [1, rows, 4] int32. invocation: as in `take_invocation`.
    Other extras are refused, or left out with `options.partial`."""
    content = read_peft_whole(folder, replace(options, rows_only=True, float8=False))
    take_invocation((token for extra in content.extras for token in extra.token_ids), invocation)
    return pack_rows(content.rows)


def read_peft_whole(folder: Path, options: ReadOptions = DEFAULT) -> AdapterContent:
    """Rows in float32, with the scaling by each matrix's own rank folded into B, sorted by layer and module;
    and the extras, which are everything else, in float32.

    With `options.float8`, rows keep F8_E4M3 if all matrices have that type and there is no DoRA; each has its
    scaling beside it. If the layout is known, only the values are read.
    """
    settings, file, bounds = read_settings(folder, options.bounds), None, options.bounds
    with suppress(AdapterInvalidError, OSError, ValueError):  # `peft_tensors` will raise the error
        opened = OpenFile(folder if is_plain(folder) else folder / WEIGHTS, bounds)
        header_of(opened, bounds)
        file = opened
    if options.layouts is not None and options.digest and file is not None:
        layout = options.layouts.find(settings, file)
        rows = None if layout is None else read_layout(layout, file, options.bfloat16)
        if layout is not None and rows is not None:
            return AdapterContent(rows, [], layout.rows)
    notes: list[str] = []
    forward = options.tell

    def tell(line: str) -> None:
        notes.append(line)
        forward(line)

    options = replace(options, tell=tell)
    with options.open_base() as base:
        form, found = _read_form(folder, file, settings, options, base)
        config, tensors = form.config, form.tensors
        if options.rows_only:
            _leave_out([*found, *(extra.name for extra in form.extras)], options.partial)
            form, found = replace(form, extras=[]), {}
        # A whole table may be a copy of the base's, which is left out, and must have the base's shape.
        parts = [tensor for key, tensor in found.items() if not names.is_whole_table(key)]
        bounds.check_elements(sum(math.prod(tensor.shape) for tensor in parts))
        is_lora = peft_type(settings) == "LORA"
        kind = base.settings.get("model_type") if base is not None and is_lora else None
        _check_targets(settings, tensors, options, kind)
        encoded = _encoded_type(tensors, config) if options.float8 else None
        plan = plan_rows(tensors, config, options, encoded, form.vectors)
        rows = plan.read(base)
        extras = [*form.extras]
        if found:
            extras = ExtraReader(tensors, config, options.modules, base, tell).read(found) + extras
    _tell_missing(settings, {(row.layer, row.module_id) for row in rows}, options)
    if not rows and not extras:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    if config.invocation:
        # Whole tables that are copies of the base's were left out.
        _check_activated(one.name for one in extras if one.name.endswith(".weight"))
        extras.append(LoraExtra.invocation(config.invocation))
    if extras or plan.layout is None or plan.file is None:
        return AdapterContent(rows, extras)
    if options.layouts is not None and not notes:
        options.layouts.keep(settings, plan.file, plan.layout)
    return AdapterContent(rows, extras, plan.layout.rows)


def peft_tensors(
    folder: Path, options: ReadOptions = DEFAULT, file: OpenFile | None = None
) -> dict[str, RawTensor]:
    """The tensors by the names under which PEFT saves them, as stored, without those that `options` leaves
    out. folder: or a single file that is an adapter. file: the open file of the weights, if there is one."""
    path = folder if is_plain(folder) else folder / WEIGHTS
    if path == folder and is_gguf(folder, options.bounds):
        return gguf.read_tensors(folder, options.bounds)
    if file is not None:
        tensors = tensors_of(file, options.bounds)
    elif is_plain(path):
        tensors = read_safetensors(path, options.bounds)
    elif is_plain(folder / mlx.WEIGHTS):
        tensors = read_safetensors(folder / mlx.WEIGHTS, options.bounds)
    else:
        tensors = _pickled_tensors(folder, options)
    found: dict[str, RawTensor] = {}
    for key, tensor in tensors.items():
        if COPY.search(key) and COPY.sub("", key) in tensors:
            continue
        name = UNEMBED.sub(names.HEADS[0], OWN_NAME.sub("", key))
        if name in found or (name != key and name in tensors):
            raise AdapterInvalidError(f"{key} and {name} mean the same tensor")
        found[name] = tensor
    if options.text_only:
        return {key: tensor for key, tensor in found.items() if not names.VISION.search(key)}
    return found


def _pickled_tensors(folder: Path, options: ReadOptions) -> dict[str, RawTensor]:
    pickled = folder / PICKLED
    if is_plain(folder / INDEX) and not is_plain(pickled):
        raise AdapterInvalidError(
            f"{INDEX}: an adapter in several files is not read, by PEFT neither: save their tensors in one "
            f"{WEIGHTS} (safetensors.torch.load_file of each, and save_file)"
        )
    if not is_plain(pickled):
        raise AdapterInvalidError(f"{WEIGHTS} is missing")
    if not options.allow_bin:
        raise AdapterInvalidError(
            f"{WEIGHTS} is missing, and {PICKLED} is a pickle, which servers never read: convert the adapter "
            "with manylora convert -i ADAPTER -o CONVERTED"
        )
    try:
        data = read_small(pickled, options.bounds, options.bounds.checkpoint_bytes)
    except OSError as error:
        raise AdapterInvalidError(f"{PICKLED} is not readable: {one_line(error)}") from error
    return read_torch(data, PICKLED, options.bounds)


def _read_form(
    folder: Path,
    file: OpenFile | None,
    settings: Mapping[str, Any],
    options: ReadOptions,
    base: BaseReader | None,
) -> tuple[LoraForm, dict[str, RawTensor]]:
    """The adapter in the form of a LoRA, and its extras, which are no longer among its tensors. base: an open
    base model."""
    plain = is_plain_lora(settings)
    if not plain:
        check_peft_type(settings)  # before files are looked for that this type may not have
    check_keys(settings, options.tell)
    tensors = peft_tensors(folder, options, file)
    is_gguf = gguf.ARCHITECTURE in settings
    if is_gguf or mlx.KIND in settings or is_foreign(tensors):
        options.bounds.check_elements(sum(math.prod(tensor.shape) for tensor in tensors.values()))
        if is_gguf:
            settings, tensors = gguf.in_peft_form(settings, tensors, base, options.tell)
        tensors = mlx.tensors_in_peft(tensors, base) if mlx.KIND in settings else tensors
        settings, tensors = in_peft_form(settings, tensors, options)
    files = PeftFiles(settings, tensors, options, base)
    form = LoraForm(config_of(settings), tensors) if plain else convert(files)
    config, found = form.config, _without_unused(form.tensors, options)
    if config.use_dora and options.base is None and not config.dora_normalized:
        raise AdapterInvalidError(f"{CONFIG} sets use_dora: {DORA_REASON}")
    extras = {key: tensor for key, tensor in found.items() if names.is_extra(key)}
    rest = {key: tensor for key, tensor in found.items() if key not in extras}
    if config.invocation:
        _check_activated([*rest, *extras])
    return replace(form, tensors=rest), extras


def _leave_out(names_of_extras: Iterable[str], partial: list[str] | None) -> None:
    for key in sorted(names_of_extras):
        if partial is None or names.DORA.search(key):
            raise AdapterInvalidError(f"{key}: {NO_ROW}")
        partial.append(f"no match {key}: {NO_ROW}")


def _without_unused(tensors: Mapping[str, RawTensor], options: ReadOptions) -> Mapping[str, RawTensor]:
    """The tensors without keys and values of layers that use another layer's. A note names them.

    Older releases of transformers have such matrices, and train with them if there is no cache. Newer ones
    have none, and load these adapters without them.
    """
    modules = options.modules or {}
    if not any(module.unused for module in modules.values()):
        return tensors
    unused = []
    for key in tensors:
        name = names.LORA_NAMES.find(key, modules)
        module = None if name is None or name.module_id is None else modules.get(name.module_id)
        if name is not None and name.stack is None and module is not None and name.number in module.unused:
            unused.append(key)
    if unused:
        more = f" and {len(unused) - 1} other tensors are" if len(unused) > 1 else " is"
        options.tell(
            f"{min(unused)}{more} of layers that read the keys and values of another layer: without effect"
        )
    return {key: tensor for key, tensor in tensors.items() if key not in unused}


def _check_activated(keys: Iterable[str]) -> None:
    """Refuse a tensor of an activated LoRA that would act on every token: tokens before the invocation
    sequence belong to the base model."""
    for key in keys:
        if not (LOW_RANK.search(key) or names.is_whole_table(key)) or names.EXPERT_KEY.fullmatch(key):
            raise AdapterInvalidError(
                f"{CONFIG} sets {ALORA}, and {key} would act before these tokens too: of an activated LoRA "
                "only low-rank matrices of linear layers are supported"
            )


def _encoded_type(tensors: Mapping[str, RawTensor], config: PeftConfig) -> NumberType | None:
    """The 8-bit type of all tensors. None: there is none, there is DoRA, or a row may need several scalings
    because those of its experts may differ."""
    if config.use_dora or (config.alpha_pattern and any(names.EXPERT_KEY.fullmatch(key) for key in tensors)):
        return None
    kinds = {tensor.dtype for tensor in tensors.values()}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None or kind.encoding is Encoding.PLAIN or any(names.DORA.search(key) for key in tensors):
        return None
    return kind


def _is_named(path: str, listed: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in listed)


def _check_targets(
    settings: Mapping[str, Any], keys: Iterable[str], options: ReadOptions, model_type: str | None
) -> None:
    """A note about matrices of modules that the settings exclude, as far as these are lists: PEFT ignores
    them with a warning. Regular expressions are not evaluated. If target_modules is null, PEFT has a default
    for each model type, and a file with other modules is refused. keys: names of a LoRA's tensors.
    model_type: in the base's config.json; None: not known."""
    named, excluded = settings.get("target_modules"), settings.get("exclude_modules")
    others = settings.get("target_parameters") or settings.get("ensure_weight_tying")
    known = (listed.split() for listed, types in DEFAULT_TARGETS.items() if model_type in types.split())
    is_null = named is None and not settings.get("target_parameters") and "peft_type" in settings
    default = next(known, []) if is_null else []  # Tinker's has neither of these
    named = named if isinstance(named, list) and not others else []
    asked = settings.get("layers_to_transform")
    layers = asked if isinstance(asked, list) else [] if asked is None else [asked]
    left_out, unnamed = [], []
    for path in sorted({match["path"] for match in map(names.SIDE.fullmatch, keys) if match}):
        name = path.removeprefix("base_model.model.")
        if default and not _is_named(name, default):
            unnamed.append(path)
        if isinstance(excluded, list) and _is_named(name, excluded):
            left_out.append(path)
        elif named and name not in named:
            layer = IN_LAYER.match(name)
            elsewhere = layers and (layer is None or int(layer[1]) not in layers)
            if elsewhere or not _is_named(name, named):
                left_out.append(path)
    if unnamed:
        raise AdapterInvalidError(
            f"{CONFIG}: target_modules is null, which is {' and '.join(default)} for {model_type}, but the "
            f"file has {some(unnamed)}: name in target_modules what was trained"
        )
    if left_out:
        options.tell(
            f"{CONFIG} leaves out what the file has, and PEFT does too; here it acts: {some(left_out)}"
        )


def _tell_missing(
    settings: Mapping[str, Any], places: Collection[tuple[int, int]], options: ReadOptions
) -> None:
    """A note about modules and layers that the settings name and the file does not have. places: (layer,
    module id) of the adapter's rows."""
    modules, depth = options.modules, options.depth
    targets = settings.get("target_modules") or []
    plain = isinstance(targets, list) and all("." not in name for name in targets)
    if not (modules and depth and places) or not plain or settings.get("exclude_modules"):
        return
    asked = settings.get("layers_to_transform")
    layers = set(range(depth)) if asked is None else set(asked if isinstance(asked, list) else [asked])
    last = max(layer for layer, _ in places)
    if asked is None and last + 1 < depth:
        options.tell(
            f"it has rows for layers 0 to {last} of {depth}: it was trained on a base of fewer "
            "layers, or saved in part"
        )
        layers &= set(range(last + 1))
    lines = []
    for name in sorted(set(targets)):
        tables = (names.ATTENTION_IDS, names.MLP_IDS, names.LINEAR_IDS)
        found = {ids[name] for ids in tables if name in ids} & modules.keys()
        for module_id in sorted(found):
            own = modules[module_id].layers
            there = {layer for layer, other in places if other == module_id}
            missing = {layer for layer in layers if own is None or layer in own} - there
            if missing and there:
                lines.append(f"{name} of layer{'s' if len(missing) > 1 else ''} {some(sorted(missing))}")
            elif missing and len(found) == 1:  # of two modules a model may have one in the place of the other
                lines.append(name)
    if lines:
        options.tell(f"target_modules names what the file does not have: {some(lines)}")

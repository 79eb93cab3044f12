"""LoRA itself, its variants that are a LoRA once their matrices are written out, and trainable tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.names import PEFT_KEY, layer_of, module_id_of
from manylora.lora.formats.peft.settings import CONFIG, config_of, initial_kind
from manylora.lora.formats.peft.tables import TOKENS
from manylora.lora.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.lora.formats.peft_types.from_base import CHANGES, with_initial
from manylora.lora.formats.tensor_files import RawTensor, check_type, decode

DELTA = TOKENS.rpartition(".")[2]


def read_tokens(files: PeftFiles) -> LoraForm:
    """Trainable tokens: rows of the embedding alone, as `trainable_token_indices` of a LoRA. Raises
    AdapterInvalidError.
    """
    found, tables = {}, []
    for key, tensor in files.tensors.items():
        path, _, part = key.rpartition(".")
        if part == DELTA and not path.endswith(".token_adapter"):
            tables.append(path.rpartition(".")[2])
            key = f"{path}.{TOKENS}"
        found[key] = tensor
    if not tables:
        raise AdapterInvalidError(f"the adapter holds no {DELTA}")
    ids = files.settings.get("token_indices") or []
    indices = {"trainable_token_indices": dict.fromkeys(tables, ids)}
    return LoraForm(config_of({"lora_alpha": 1, **indices}), found)


Tensors = Mapping[str, RawTensor]
SIDE = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # in `init_lora_weights`
# What training alone needs: the sampler of MonteCLoRA, the projection of VeLoRA.
OF_TRAINING = {
    "monteclora_config": re.compile(r".+\.lora_monteclora_sampler\..+"),
    "velora_config": re.compile(r".+\.lora_velora_embed(?:\.weight)?"),
}


def read_lora_kind(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    settings, tensors = files.settings, files.tensors
    for name, pattern in OF_TRAINING.items():
        if settings.get(name):
            tensors = {key: tensor for key, tensor in tensors.items() if not pattern.fullmatch(key)}
    changes: list[Callable[[PeftFiles], Tensors]] = []
    if settings.get("use_qalora"):
        changes.append(_spread)
    if settings.get("use_bdlora"):
        changes.append(_diagonal)
    _check_together(settings, len(changes))
    for change in changes:
        tensors = change(replace(files, tensors=tensors))
    if initial_kind(settings) in CHANGES:
        return with_initial(replace(files, tensors=tensors))
    return LoraForm(config_of(settings), tensors)


def _check_together(settings: Mapping[str, Any], count: int) -> None:
    """count: of variants whose matrices are written out. Raises AdapterInvalidError for variants that are not
    served together."""
    start, dora = initial_kind(settings), bool(settings.get("use_dora"))
    own = initial_kind({**settings, "kasa_config": None})
    twice = start == "kasa" and (dora or own.startswith(OTHER_BASES))
    if count + max(dora, start in CHANGES) > 1 or twice:
        raise AdapterInvalidError(f"{CONFIG} asks for several variants of LORA that are not served together")


def _spread(files: PeftFiles) -> Tensors:
    """QALoRA: A is multiplied with the means of groups of inputs, times their number. PEFT does so on layers
    of GPTQ only; on other layers use_qalora has no effect, and A has a column for each input.
    """
    size = files.settings.get("qalora_group_size", 16)
    if type(size) is not int or not 0 < size < 2**31:
        raise AdapterInvalidError(f"{CONFIG}: qalora_group_size must be a positive number")

    def is_plain(path: str) -> bool:
        match, modules = PEFT_KEY.fullmatch(f"{path}.lora_A.weight"), files.options.modules
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None or match.string not in files.tensors:
            return False
        module = files.options.module(module_id, layer_of(match))
        return module is not None and files.tensors[match.string].shape[-1:] == (module.in_dim,)

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if side == "B" or is_plain(path):
            return values
        factor = np.float32(values.shape[1]) / np.float32(size)
        return np.repeat(values * factor, size, axis=1)

    return _rewritten(files, spread, lambda path, side: size if side == "A" and not is_plain(path) else 1)


def _diagonal(files: PeftFiles) -> Tensors:
    """BD-LoRA: A or B of a module consists of blocks on its diagonal, stored one below the other."""
    blocks, patterns = _blocks(files.settings)

    def is_cut(path: str, side: str) -> bool:
        name = path.rpartition(".")[2]
        found = [one for one in "AB" if any(part in name for part in patterns[one])]
        if len(found) > 1:
            raise AdapterInvalidError(f"{CONFIG}: use_bdlora names {path} for A and for B")
        return side in found

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if not is_cut(path, side):
            return values
        rows, width = values.shape
        if rows % blocks:
            raise AdapterInvalidError(f"{path}: {rows} rows of lora_{side} are not {blocks} blocks")
        whole = np.zeros((rows, width * blocks), np.float32)
        for place, block in enumerate(np.split(values, blocks)):
            step = rows // blocks
            whole[place * step : (place + 1) * step, place * width : (place + 1) * width] = block
        return whole

    return _rewritten(files, spread, lambda path, side: blocks if is_cut(path, side) else 1)


def _blocks(settings: Mapping[str, Any]) -> tuple[int, dict[str, list[str]]]:
    """Their number, and the parts of names of modules that have them in A and in B."""
    found = settings["use_bdlora"]
    blocks = found.get("nblocks", 1) if isinstance(found, dict) else None
    patterns = {side: found.get(f"target_modules_bd_{side.lower()}") or [] for side in "AB"} if blocks else {}
    named = all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in patterns.values())
    if type(blocks) is not int or not 0 < blocks < 2**16 or not named:
        raise AdapterInvalidError(f"{CONFIG}: use_bdlora must have nblocks and lists of names of modules")
    return blocks, patterns


def _rewritten(
    files: PeftFiles,
    change: Callable[[str, str, np.ndarray], np.ndarray],
    growth: Callable[[str, str], int],
) -> Tensors:
    """With all A and B changed. change, growth: by a module's path and the side; growth: how many times as
    large it becomes, which is judged first."""
    made, elements = {}, 0
    for key, tensor in files.tensors.items():
        match = SIDE.fullmatch(key)
        if match is None:
            made[key] = tensor
            continue
        check_type(key, tensor)
        if len(tensor.shape) != 2:
            raise AdapterInvalidError(f"{key} has shape {tensor.shape}, 2 dimensions are expected")
        elements += tensor.shape[0] * tensor.shape[1] * growth(match["path"], match["side"])
        files.options.bounds.check_elements(elements)
        values = np.ascontiguousarray(change(match["path"], match["side"], decode(key, tensor)))
        made[key] = RawTensor("F32", values.shape, values)
    return made

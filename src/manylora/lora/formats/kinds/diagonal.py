"""Kinds of PEFT that scale, rotate or shift what a linear layer takes or gives: IA3, RoAd, BEFT; and LN
tuning, which brings norms. All become extras, see `manylora.lora.extras`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.peft_config import CONFIG, PeftConfig, peft_type, saved_modules
from manylora.lora.formats.peft_names import MODULE, in_our_order, module_id_of
from manylora.lora.formats.peft_stacks import MODULE as STACK_MODULE
from manylora.lora.formats.peft_stacks import check_stacks, stack_layer, stack_module_id
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.modules import MODULE_NAMES, LoraModule
from manylora.lora.modules import LoraModuleId as Id
from manylora.request import LoraExtra

DIAGONAL = {"IA3": ("ia3_l",), "ROAD": ("road_theta", "road_alpha"), "BEFT": ("beft_bias",)}
"""By PEFT's kind, the tensors of a module."""
PART = r"(?P<part>ia3_l|road_theta|road_alpha|beft_bias)"
KEYS = re.compile(MODULE + PART), re.compile(STACK_MODULE + PART)
NOT_LINEAR = (Id.ATTN_KV_B, Id.MOE_ROUTER)  # whose outputs no layer computes as one matrix
VARIANTS = {"road_1": 1, "road_2": 2, "road_4": 4}  # numbers of theta for each two outputs
Modules = Mapping[int, LoraModule] | None


def read_norms(files: PeftFiles) -> LoraForm:
    """LN tuning: norms as if they had been saved whole. Raises AdapterInvalidError."""
    tensors = {key.replace("ln_tuning_layers.", ""): tensor for key, tensor in files.tensors.items()}
    return LoraForm(_config(files), tensors)


def read_diagonal(files: PeftFiles) -> LoraForm:
    """IA3, RoAd or BEFT. Raises AdapterInvalidError."""
    kind = peft_type(files.settings)
    mine = {key: tensor for key, tensor in files.tensors.items() if key.endswith(DIAGONAL[kind])}
    if not mine:
        raise AdapterInvalidError(f"the adapter holds no {DIAGONAL[kind][0]}")
    files.options.bounds.check_elements(2 * sum(math.prod(tensor.shape) for tensor in mine.values()))
    others = {key: tensor for key, tensor in files.tensors.items() if key not in mine}
    return LoraForm(_config(files), others, _extras(kind, files.settings, mine, files.options.modules))


def _config(files: PeftFiles) -> PeftConfig:
    return PeftConfig(1.0, modules_to_save=saved_modules(files.settings))


def _extras(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, RawTensor], modules: Modules
) -> list[LoraExtra]:
    found: dict[tuple[str, int, int], dict[str, tuple[str, RawTensor]]] = defaultdict(dict)
    for key, tensor in sorted(tensors.items()):
        match, module_id, layer = _place(kind, key, modules)
        found[match["path"], layer, module_id][match["part"]] = key, tensor
    extras: list[LoraExtra] = []
    for (path, layer, number), parts in found.items():
        missing = [part for part in DIAGONAL[kind] if part not in parts]
        if missing:
            raise AdapterInvalidError(f"{path} is missing its {missing[0]}")
        module = modules.get(number) if modules else None
        where = f"layers.{layer}.{MODULE_NAMES[number]}"
        one = _Module(path, where, number, module, {k: decode(*v) for k, v in parts.items()})
        extras += one.road(config) if kind == "ROAD" else [one.shift() if kind == "BEFT" else one.ia3()]
    if len({extra.name for extra in extras}) < len(extras):
        raise AdapterInvalidError("the adapter has two tensors for the same module")
    return extras


def _place(kind: str, key: str, modules: Modules) -> tuple[re.Match[str], Id, int]:
    """The match of a key, its module and its layer."""
    match = next((m for m in (pattern.fullmatch(key) for pattern in KEYS) if m), None)
    of_stack = match is not None and match.re is KEYS[1]
    module_id = None
    if match is not None:
        module_id = stack_module_id(match) if of_stack else module_id_of(match, modules)
    if match is None or module_id is None or module_id in NOT_LINEAR:
        raise AdapterInvalidError(f"{key}: {kind} is not supported on this module")
    if modules is not None and module_id not in modules:
        raise AdapterInvalidError(f"{key}: lora module {MODULE_NAMES[module_id]} not enabled for this model")
    if not of_stack:
        check_stacks([key], modules)
    return match, module_id, stack_layer(key, match, modules) if of_stack else int(match["layer"])


class _Module:
    """One linear layer. where: its name in extras. values: by tensor, float32."""

    def __init__(
        self, path: str, where: str, module_id: int, module: LoraModule | None, values: dict[str, np.ndarray]
    ) -> None:
        self._path, self._where, self._id, self._module = path, where, module_id, module
        self._values = values

    def ia3(self) -> LoraExtra:
        """[out, 1] scales what the layer gives, [1, in] what it takes."""
        values = self._values["ia3_l"]
        if values.ndim != 2 or 1 not in values.shape:
            raise AdapterInvalidError(f"{self._path}: ia3_l must be [out, 1] or [1, in], got {values.shape}")
        flat = values.reshape(-1)
        if values.shape[1] == 1:
            return LoraExtra(f"{self._where}.scale", self._outputs(flat, "ia3_l"))
        if self._module is not None and len(flat) != self._module.in_dim:
            raise self._mismatch("ia3_l", len(flat), f"takes {self._module.in_dim}")
        return LoraExtra(f"{self._where}.input_scale", flat)

    def shift(self) -> LoraExtra:
        return LoraExtra(f"{self._where}.bias", self._outputs(self._values["beft_bias"].reshape(-1), "bias"))

    def road(self, config: Mapping[str, Any]) -> list[LoraExtra]:
        """y -> scale * y + turn * (y with the halves of each group swapped, the second one's sign too)."""
        variant, group = config.get("variant", "road_1"), config.get("group_size", 64)
        if not isinstance(variant, str) or variant not in VARIANTS:
            raise AdapterInvalidError(f"{CONFIG}: variant must be one of {', '.join(VARIANTS)}")
        if type(group) is not int or group < 2 or group % 2:
            raise AdapterInvalidError(f"{CONFIG}: group_size must be an even number")
        theta, alpha = (self._values[name].reshape(-1) for name in DIAGONAL["ROAD"])
        size, rest = divmod(2 * len(theta), VARIANTS[variant])
        if rest or len(theta) != len(alpha) or not size or size % group:
            raise AdapterInvalidError(
                f"{self._path}: road_theta and road_alpha have {len(theta)} and {len(alpha)} numbers, which "
                f"{variant} with group_size {group} does not have"
            )
        first, second = (alpha * np.cos(theta), alpha * np.sin(theta))
        if variant == "road_1":
            first, second = (np.repeat(v.reshape(-1, group // 2), 2, axis=0) for v in (first, second))
        elif variant == "road_4":
            first, second = first.reshape(-1, 2, group)[:, 0], second.reshape(-1, 2, group)[:, 1]
        places = self._outputs(np.arange(size), "road_theta").reshape(-1, group)
        if (places % group != np.arange(group)).any():
            raise AdapterInvalidError(
                f"{self._path}: groups of {group} outputs lie across its parts; use a smaller group_size"
            )
        scale, turn = (v.reshape(-1)[places].astype(np.float32) for v in (first, second))
        return [LoraExtra(f"{self._where}.scale", scale.reshape(-1)), LoraExtra(f"{self._where}.turn", turn)]

    def _outputs(self, values: np.ndarray, part: str) -> np.ndarray:
        """[out], in our order."""
        if self._module is not None and len(values) != self._module.out_dim:
            raise self._mismatch(part, len(values), f"gives {self._module.out_dim}")
        return in_our_order(self._path, self._id, values, self._module)

    def _mismatch(self, part: str, count: int, does: str) -> AdapterInvalidError:
        assert self._module is not None
        return AdapterInvalidError(
            f"{self._path}: {part} has {count} values, {self._module.name} of this model {does}: the adapter "
            "was made for another model"
        )

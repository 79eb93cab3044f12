"""Kinds of PEFT that scale, rotate or shift what a linear layer takes or gives: IA3, RoAd, BEFT, OFT; and LN
tuning, which brings norms. All become extras, see `manylora.lora.extras`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.formats.peft.module_tensors import MODULE as STACK_MODULE
from manylora.lora.formats.peft.module_tensors import check_stacks, stack_layer, stack_module_id
from manylora.lora.formats.peft.names import MODULE, in_our_order, layer_of, module_id_of
from manylora.lora.formats.peft.settings import CONFIG, PeftConfig, peft_type, saved_modules
from manylora.lora.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.modules import MODULE_NAMES, LoraModule, not_enabled
from manylora.lora.modules import LoraModuleId as Id
from manylora.lora.tensors import check_layer
from manylora.request import LoraExtra

DIAGONAL = {
    "IA3": ("ia3_l",),
    "ROAD": ("road_theta", "road_alpha"),
    "BEFT": ("beft_bias",),
    "OFT": ("oft_R.weight",),
}
"""By PEFT's kind, the tensors of a module."""
PART = r"(?P<part>ia3_l|road_theta|road_alpha|beft_bias|oft_R\.weight)"
KEYS = re.compile(MODULE + PART), re.compile(STACK_MODULE + PART)
NOT_LINEAR = (Id.ATTN_KV_B, Id.MOE_ROUTER)  # whose outputs no layer computes as one matrix
MOST_TERMS = 64  # of OFT's series, each a product of all blocks
VARIANTS = {"road_1": 1, "road_2": 2, "road_4": 4}  # numbers of theta for each two outputs
Modules = Mapping[int, LoraModule] | None


def read_norms(files: PeftFiles) -> LoraForm:
    """LN tuning: norms as if they had been saved whole. Raises AdapterInvalidError."""
    tensors = {key.replace("ln_tuning_layers.", ""): tensor for key, tensor in files.tensors.items()}
    return LoraForm(_config(files), tensors)


def read_diagonal(files: PeftFiles) -> LoraForm:
    """IA3, RoAd, BEFT or OFT. Raises AdapterInvalidError."""
    kind = peft_type(files.settings)
    mine = {key: tensor for key, tensor in files.tensors.items() if key.endswith(DIAGONAL[kind])}
    if not mine:
        raise AdapterInvalidError(f"the adapter holds no {DIAGONAL[kind][0]}")
    files.options.bounds.check_elements(2 * sum(math.prod(tensor.shape) for tensor in mine.values()))
    others = {key: tensor for key, tensor in files.tensors.items() if key not in mine}
    return LoraForm(_config(files), others, _extras(kind, files.settings, mine, files.options))


def _config(files: PeftFiles) -> PeftConfig:
    return PeftConfig(1.0, modules_to_save=saved_modules(files.settings))


def _extras(
    kind: str, config: Mapping[str, Any], tensors: Mapping[str, RawTensor], options: ReadOptions
) -> list[LoraExtra]:
    found: dict[tuple[str, int, int], dict[str, tuple[str, RawTensor]]] = defaultdict(dict)
    for key, tensor in sorted(tensors.items()):
        match, module_id, layer = _place(kind, key, options.modules)
        found[match["path"], layer, module_id][match["part"]] = key, tensor
    extras: list[LoraExtra] = []
    for (path, layer, number), parts in found.items():
        missing = [part for part in DIAGONAL[kind] if part not in parts]
        if missing:
            raise AdapterInvalidError(f"{path} is missing its {missing[0]}")
        module = options.module(number, layer)
        where = f"layers.{layer}.{MODULE_NAMES[number]}"
        one = _Module(path, where, number, module, {k: decode(*v) for k, v in parts.items()}, options.bounds)
        extras += ONE[kind](one, config)
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
        raise AdapterInvalidError(f"{key}: {not_enabled(module_id, modules)}")
    if not of_stack:
        check_stacks([key], modules)
    layer = stack_layer(key, match, modules) if of_stack else layer_of(match)
    if modules is not None:
        check_layer(key, modules[module_id], layer)
    return match, module_id, layer


class _Module:
    """One linear layer. where: its name in extras. values: by tensor, float32."""

    def __init__(
        self,
        path: str,
        where: str,
        module_id: int,
        module: LoraModule | None,
        values: dict[str, np.ndarray],
        bounds: Bounds,
    ) -> None:
        self._path, self._where, self._id, self._module = path, where, module_id, module
        self._values, self._bounds = values, bounds

    def ia3(self, _: Mapping[str, Any]) -> list[LoraExtra]:
        """[out, 1] scales what the layer gives, [1, in] what it takes."""
        values = self._values["ia3_l"]
        if values.ndim != 2 or 1 not in values.shape:
            raise AdapterInvalidError(f"{self._path}: ia3_l must be [out, 1] or [1, in], got {values.shape}")
        flat = values.reshape(-1)
        if values.shape[1] == 1:
            return [LoraExtra(f"{self._where}.scale", self._outputs(flat, "ia3_l"))]
        if self._module is not None and len(flat) != self._module.in_dim:
            raise self._mismatch("ia3_l", len(flat), f"takes {self._module.in_dim}")
        return [LoraExtra(f"{self._where}.input_scale", flat)]

    def shift(self, _: Mapping[str, Any]) -> list[LoraExtra]:
        values = self._values["beft_bias"].reshape(-1)
        return [LoraExtra(f"{self._where}.bias", self._outputs(values, "beft_bias"))]

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

    def oft(self, config: Mapping[str, Any]) -> list[LoraExtra]:
        """x -> x R, R of blocks on the diagonal, the Cayley transforms of what the file has above theirs."""
        values = self._values["oft_R.weight"]
        size = (1 + math.isqrt(1 + 8 * values.shape[-1])) // 2
        if values.ndim != 2 or not len(values) or size < 2 or 2 * values.shape[1] != size * (size - 1):
            raise AdapterInvalidError(f"{self._path}: oft_R of shape {values.shape} holds no blocks")
        shared, terms = bool(config.get("block_share")), config.get("num_cayley_neumann_terms", 5)
        inputs = self._module.in_dim if self._module is not None else len(values) * size
        if inputs % size or len(values) != (1 if shared else inputs // size):
            raise self._mismatch("oft_R", len(values) * size, f"takes {inputs}")
        self._bounds.check_elements(len(values) * size * size)
        if type(terms) is not int or not 1 <= terms <= MOST_TERMS:
            raise AdapterInvalidError(f"{CONFIG}: num_cayley_neumann_terms must be from 1 to {MOST_TERMS}")
        skew = np.zeros((len(values), size, size))
        above = np.triu_indices(size, 1)
        skew[:, above[0], above[1]] = values
        skew -= skew.swapaxes(1, 2)
        if config.get("coft"):
            eps = config.get("eps", 6e-5)
            if not isinstance(eps, float | int) or not 0 < eps < math.inf:
                raise AdapterInvalidError(f"{CONFIG}: eps must be a number above 0")
            limit = eps / math.sqrt(len(values))
            norms = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
            skew = np.where(norms <= limit, skew, limit * skew / np.maximum(norms, limit))
        turned = _cayley(skew, terms if config.get("use_cayley_neumann", True) else None)
        return [LoraExtra(f"{self._where}.input_turn", turned.reshape(-1, size).astype(np.float32))]

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


def _cayley(skew: np.ndarray, terms: int | None) -> np.ndarray:
    """(I - Q)(I + Q)^-1 of each [n, n], as PEFT has it: with terms, the beginning of a series for it."""
    eye = np.broadcast_to(np.eye(skew.shape[-1]), skew.shape)
    if terms is None:
        return np.linalg.solve((eye + skew).swapaxes(1, 2), (eye - skew).swapaxes(1, 2)).swapaxes(1, 2)
    if terms == 1:
        return eye.copy()
    found, power = eye + 2 * skew, skew
    if terms > 2:
        power = skew @ skew
        found = found + 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            found = found + 2 * power
        found = found + power @ skew
    return found


ONE = {"IA3": _Module.ia3, "ROAD": _Module.road, "BEFT": _Module.shift, "OFT": _Module.oft}

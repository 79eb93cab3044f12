"""Types that become extras (`manylora.adapters.extras`): IA3, RoAd, BEFT and OFT scale, rotate or shift what
a linear layer takes or gives; LN tuning brings norms; prompt tuning and P-tuning put virtual tokens before
each prompt, prefix tuning and Cartridge their keys and values. PEFT saves what a prompt's encoder or
projection gives, not these. All functions raise AdapterInvalidError."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manylora.adapters.formats.peft.names import ModuleNames, encoder_layers, in_our_order
from manylora.adapters.formats.peft.settings import CONFIG, PeftConfig, names_in, peft_type
from manylora.adapters.formats.peft_types.converted import LoraForm, PeftFiles, integer
from manylora.adapters.formats.tensor_files import RawTensor, decode
from manylora.adapters.modules import MODULE_NAMES, LoraModule, not_enabled
from manylora.adapters.modules import LoraModuleId as Id
from manylora.adapters.tensors import check_layer
from manylora.errors import AdapterInvalidError
from manylora.request import LoraExtra

NAMES = ModuleNames(r"(?P<part>ia3_l|road_theta|road_alpha|beft_bias|oft_R\.weight)")
NOT_LINEAR = (Id.ATTN_KV_B, Id.MOE_ROUTER)  # whose outputs no layer computes as one matrix
MOST_TERMS = 64  # of OFT's series, each a product of all blocks
VARIANTS = {"road_1": 1, "road_2": 2, "road_4": 4}  # numbers of theta for each two outputs
PROMPT = "prompt_embeddings"


def read_norms(files: PeftFiles) -> LoraForm:
    """LN tuning: norms, as if they had been saved as whole modules."""
    tensors = {key.replace("ln_tuning_layers.", ""): tensor for key, tensor in files.tensors.items()}
    config = PeftConfig(1.0, modules_to_save=names_in(files.settings, "modules_to_save"))
    return LoraForm(config, tensors)


def read_diagonal(files: PeftFiles) -> LoraForm:
    """IA3, RoAd, BEFT or OFT."""
    kind, options, modules = peft_type(files.settings), files.options, files.options.modules
    wanted, convert = CONVERTERS[kind]
    own = {key: tensor for key, tensor in files.tensors.items() if key.endswith(wanted)}
    if not own:
        raise AdapterInvalidError(f"the adapter holds no {wanted[0]}")
    options.bounds.check_elements(2 * sum(math.prod(tensor.shape) for tensor in own.values()))
    others = {key: tensor for key, tensor in files.tensors.items() if key not in own}
    found: dict[tuple[str, int, Id], dict[str, tuple[str, RawTensor]]] = defaultdict(dict)
    for key, tensor in sorted(own.items()):
        name = NAMES.find(key, modules)
        if name is None or name.module_id is None or name.module_id in NOT_LINEAR:
            raise AdapterInvalidError(f"{key}: {kind} is not supported on this module")
        if modules is not None and name.module_id not in modules:
            raise AdapterInvalidError(f"{key}: {not_enabled(name.module_id, modules)}")
        layer = name.layer(modules)
        if modules is not None:
            check_layer(key, modules[name.module_id], layer)
        found[name.path, layer, name.module_id][str(name.part)] = key, tensor
    extras: list[LoraExtra] = []
    for (path, layer, number), parts in found.items():
        if missing := [part for part in wanted if part not in parts]:
            raise AdapterInvalidError(f"{path} is missing its {missing[0]}")
        values = {part: decode(*tensor) for part, tensor in parts.items()}
        where, module = f"layers.{layer}.{MODULE_NAMES[number]}", options.module(number, layer)
        extras += convert(_Module(path, where, number, module, values, files))
    if len({extra.name for extra in extras}) < len(extras):
        raise AdapterInvalidError("the adapter has two tensors for the same module")
    config = PeftConfig(1.0, modules_to_save=names_in(files.settings, "modules_to_save"))
    return LoraForm(config, others, extras)


@dataclass(frozen=True)
class _Module:
    """One linear layer. where: its name in extras. values: by tensor, in float32."""

    path: str
    where: str
    module_id: int
    module: LoraModule | None
    values: dict[str, np.ndarray]
    files: PeftFiles

    def ia3(self) -> list[LoraExtra]:
        """A tensor [out, 1] scales the outputs, [1, in] the inputs."""
        values = self.values["ia3_l"]
        if values.ndim != 2 or 1 not in values.shape:
            raise AdapterInvalidError(f"{self.path}: ia3_l must be [out, 1] or [1, in], got {values.shape}")
        flat = values.reshape(-1)
        if values.shape[1] == 1:
            return [LoraExtra(f"{self.where}.scale", self._outputs(flat, "ia3_l"))]
        if self.module is not None and len(flat) != self.module.in_dim:
            raise self._mismatch("ia3_l", len(flat), f"takes {self.module.in_dim}")
        return [LoraExtra(f"{self.where}.input_scale", flat)]

    def shift(self) -> list[LoraExtra]:
        values = self.values["beft_bias"].reshape(-1)
        return [LoraExtra(f"{self.where}.bias", self._outputs(values, "beft_bias"))]

    def road(self) -> list[LoraExtra]:
        """y -> scale * y + turn * (y with the halves of each group swapped, the second one's sign too)."""
        settings = self.files.settings
        variant, group = settings.get("variant", "road_1"), settings.get("group_size", 64)
        if variant not in VARIANTS:
            raise AdapterInvalidError(f"{CONFIG}: variant must be one of {', '.join(VARIANTS)}")
        if group is None or group < 2 or group % 2:
            raise AdapterInvalidError(f"{CONFIG}: group_size must be an even number")
        theta, alpha = (self.values[name].reshape(-1) for name in ("road_theta", "road_alpha"))
        size, rest = divmod(2 * len(theta), VARIANTS[variant])
        if rest or len(theta) != len(alpha) or not size or size % group:
            raise AdapterInvalidError(
                f"{self.path}: road_theta and road_alpha have {len(theta)} and {len(alpha)} numbers, which "
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
                f"{self.path}: groups of {group} outputs lie across its parts; use a smaller group_size"
            )
        scale, turn = (v.reshape(-1)[places].astype(np.float32) for v in (first, second))
        return [LoraExtra(f"{self.where}.scale", scale.reshape(-1)), LoraExtra(f"{self.where}.turn", turn)]

    def oft(self) -> list[LoraExtra]:
        """x -> x R. R has blocks on its diagonal: the Cayley transforms of skew-symmetric matrices, of which
        the file has the upper triangles."""
        values, settings = self.values["oft_R.weight"], self.files.settings
        size = (1 + math.isqrt(1 + 8 * values.shape[-1])) // 2
        if values.ndim != 2 or not len(values) or size < 2 or 2 * values.shape[1] != size * (size - 1):
            raise AdapterInvalidError(f"{self.path}: oft_R of shape {values.shape} holds no blocks")
        shared = bool(settings.get("block_share"))
        inputs = self.module.in_dim if self.module is not None else len(values) * size
        if inputs % size or len(values) != (1 if shared else inputs // size):
            raise self._mismatch("oft_R", len(values) * size, f"takes {inputs}")
        self.files.options.bounds.check_elements(len(values) * size * size)
        terms = range(1, MOST_TERMS + 1)
        count = integer(settings, "num_cayley_neumann_terms", 5, terms, f"from 1 to {MOST_TERMS}")
        skew = np.zeros((len(values), size, size))
        above = np.triu_indices(size, 1)
        skew[:, above[0], above[1]] = values
        skew -= skew.swapaxes(1, 2)
        if settings.get("coft"):
            eps = settings.get("eps", 6e-5)
            if eps is None or eps <= 0:
                raise AdapterInvalidError(f"{CONFIG}: eps must be a number above 0")
            limit = eps / math.sqrt(len(values))
            norms = np.linalg.norm(skew, axis=(1, 2), keepdims=True)
            skew = np.where(norms <= limit, skew, limit * skew / np.maximum(norms, limit))
        turned = _cayley(skew, count if settings.get("use_cayley_neumann", True) else None)
        return [LoraExtra(f"{self.where}.input_turn", turned.reshape(-1, size).astype(np.float32))]

    def _outputs(self, values: np.ndarray, part: str) -> np.ndarray:
        """values [out] in our order."""
        if self.module is not None and len(values) != self.module.out_dim:
            raise self._mismatch(part, len(values), f"gives {self.module.out_dim}")
        return in_our_order(self.path, self.module_id, values, self.module)

    def _mismatch(self, part: str, count: int, does: str) -> AdapterInvalidError:
        assert self.module is not None
        return AdapterInvalidError(
            f"{self.path}: {part} has {count} values, {self.module.name} of this model {does}: the adapter "
            "was made for another model"
        )


def _cayley(skew: np.ndarray, terms: int | None) -> np.ndarray:
    """(I - Q)(I + Q)^-1 of each [n, n], as PEFT computes it. terms: of a series that approximates it; None:
    exact."""
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


# By PEFT type: the tensors of a module, and what makes extras of them.
CONVERTERS: dict[str, tuple[tuple[str, ...], Callable[[_Module], list[LoraExtra]]]] = {
    "IA3": (("ia3_l",), _Module.ia3),
    "ROAD": (("road_theta", "road_alpha"), _Module.road),
    "BEFT": (("beft_bias",), _Module.shift),
    "OFT": (("oft_R.weight",), _Module.oft),
}


def read_prompt(files: PeftFiles) -> LoraForm:
    """Prompt tuning and P-tuning: embeddings [tokens, hidden]."""
    values = _values(files)
    modules = files.options.modules or {}
    own = files.base.settings if files.base is not None else {}
    if own.get("model_type") == "falcon_h1" and own.get("embedding_multiplier", 1.0) != 1.0:
        raise AdapterInvalidError(
            f"{peft_type(files.settings)} is not supported on a Falcon-H1 with embedding_multiplier: PEFT "
            "leaves that out in the prompt and not in what is generated; train a LoRA instead"
        )
    readers = (Id.PROJECT_IN, Id.ATTN_Q, Id.ATTN_QKV, Id.ATTN_KV_A)
    hidden = next((modules[one].in_dim for one in readers if one in modules), 0)
    if modules and values.shape[1] != hidden:
        raise AdapterInvalidError(
            f"{PROMPT} has rows of {values.shape[1]} values, embeddings of this model have {hidden}: the "
            "adapter was made for another model"
        )
    return LoraForm(PeftConfig(1.0), {}, [LoraExtra("prompt.weight", values)])


def read_prefix(files: PeftFiles) -> LoraForm:
    """Prefix tuning and Cartridge: keys and values [tokens, layers * 2 * kv_size], with rotary positions
    applied if the model has them. Raises AdapterInvalidError."""
    values, modules, kind = _values(files), files.options.modules or {}, peft_type(files.settings)
    layers = files.settings.get("num_layers")
    if not layers or values.shape[1] % (2 * layers):
        raise AdapterInvalidError(
            f"{CONFIG}: num_layers must be that of the model whose keys and values {PROMPT} of shape "
            f"{values.shape} are"
        )
    keys = modules.get(Id.ATTN_K)
    if modules and (keys is None or keys.layers is not None or keys.others):
        raise AdapterInvalidError(
            f"{kind} is not supported on this model: not all of its layers keep the keys and values of the "
            "same heads"
        )
    whole, size = files.options.depth, values.shape[1] // (2 * layers)
    if modules and (size != modules[Id.ATTN_K].out_dim or (whole is not None and layers != whole)):
        raise AdapterInvalidError(
            f"{PROMPT} holds keys of {size} values for {layers} layers, those of this model have "
            f"{modules[Id.ATTN_K].out_dim}" + (f" and it has {whole} layers" if whole is not None else "")
        )
    parts, extras = values.reshape(len(values), layers, 2, size), []
    for layer in range(layers):
        for part, name in enumerate(("keys", "values")):
            own = np.ascontiguousarray(parts[:, layer, part])
            extras.append(LoraExtra(f"layers.{layer}.prefix.{name}", own))
    return LoraForm(PeftConfig(1.0), {}, extras)


def _values(files: PeftFiles) -> np.ndarray:
    """The only tensor of the adapter: [tokens, n] in float32."""
    kind = peft_type(files.settings)
    if encoder_layers(files.options.modules):
        raise AdapterInvalidError(f"{kind} is not supported on encoder-decoder models")
    if any(module.layer_inputs for module in (files.options.modules or {}).values()):
        raise AdapterInvalidError(
            f"{kind} is not supported on models with per-layer embeddings, as virtual tokens have none"
        )
    other = next((key for key in sorted(files.tensors) if key != PROMPT), None)
    if other is not None or PROMPT not in files.tensors:
        raise AdapterInvalidError(f"{other or PROMPT}: a {kind} adapter must hold {PROMPT} and nothing else")
    tensor, count = files.tensors[PROMPT], files.settings.get("num_virtual_tokens")
    if len(tensor.shape) != 2 or 0 in tensor.shape or (count is not None and count != tensor.shape[0]):
        raise AdapterInvalidError(
            f"{PROMPT} has shape {tensor.shape}, {CONFIG} sets num_virtual_tokens to {str(count)[:40]}"
        )
    files.options.bounds.check_elements(tensor.shape[0] * tensor.shape[1])
    return decode(PROMPT, tensor)

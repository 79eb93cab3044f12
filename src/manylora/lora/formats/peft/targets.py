"""What an adapter's settings say beside its matrices: keys and types of adapter_config.json, modules and
layers that are not in the file.

PEFT takes adapters with unknown keys or missing modules with a warning, so they are served, and it is told; a
key that looks like another type of adapter, and a matrix without its other one, are refused.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.names import ATTENTION_IDS, LINEAR_IDS, MLP_IDS
from manylora.lora.formats.peft.settings import CONFIG, initial_kind, shown
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.modules import LoraModule

LARGEST = 2**31  # above every count and every rank


def _flag(value: Any) -> bool:
    return type(value) is bool


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    # An integer may be too large for a float.
    return type(value) in (int, float) and -math.inf < value < math.inf and abs(value) < 2.0**1023


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(n, str) for n in value))


def _layers(value: Any) -> bool:
    return all(_count(n) for n in (value if isinstance(value, list) else [value]))


def _rank(value: Any) -> bool:
    return _count(value) and value > 0


def _object(value: Any) -> bool:
    return isinstance(value, dict)


# What a value must be where there is one: in words, the test, the keys.
TYPES: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "true or false",
        _flag,
        "apply_GS block_share coft decompose_both dora_normalized ensure_weight_tying fan_in_fan_out "
        "lora_bias para prefix_projection sample_at_inference save_indices save_only_topk_weights "
        "save_projection use_cayley_neumann use_dora use_effective_conv2d use_qalora use_rslora",
    ),
    (
        f"a count, an integer from 0 to {LARGEST - 1}",
        _count,
        "boft_block_num boft_block_size depth encoder_hidden_size encoder_num_layers gralora_k "
        "group_size hybrid_r init_r mini_r num_attention_heads num_cayley_neumann_terms num_frozen_tokens "
        "num_layers num_transformer_submodules num_vectors num_virtual_tokens oft_block_size "
        "qalora_group_size r target_r theta_d_length token_dim topk u vector_length",
    ),
    (
        "a number",
        _number,
        "alpha delora_lambda eps lora_alpha lora_dropout scaling weight_tying",
    ),
    (
        "a name, or a list of names",
        _names,
        "exclude_modules feedforward_modules layers_pattern modules_to_save target_modules target_parameters",
    ),
    ("the number of a layer, or a list of them", _layers, "layers_to_transform"),
    (
        "a text",
        _text,
        "act_fn base_model_name_or_path bias decomposition_method peft_type peft_version revision task_type "
        "variant",
    ),
    (
        "an object",
        _object,
        "alpha_pattern arrow_config corda_config eva_config kasa_config loftq_config lora_ga_config "
        "monteclora_config rank_pattern runtime_config use_bdlora velora_config",
    ),
]
# The same of what modules are given by their names.
OF_MODULES: list[tuple[str, Callable[[Any], bool], str]] = [
    (f"an integer from 1 to {LARGEST - 1}", _rank, "rank_pattern"),
    ("a number", _number, "alpha_pattern"),
]
# Their readers judge these, or they matter in training, or to nobody.
OTHERS = """
adapter_layers adapter_len alora_invocation_tokens auto_mapping beta1 beta2 block_size block_size_pattern
boft_dropout boft_n_butterfly_factor cpt_mask cpt_token_ids cpt_tokens_type_mask d_initial decompose_factor
deft_dropout deltaT enable_lora encoder_dropout encoder_reparameterization_type generator_seed gralora_dropout
inference_mode init_ia3_weights init_logits_std init_lora_weights init_scale init_theta_d_bound init_v_bound
init_vector_bank_bound init_weights lambda_pattern layer_replication lora_dtype megatron_config megatron_core
merge_weights miss_dropout module_dropout opt_loss_decay_factor opt_projection_epsilon
opt_projection_format_epsilon opt_weighted_loss_type orth_reg_weight proj_seed projection_prng_key
projection_seed prompt_tuning_init prompt_tuning_init_text pvera_dropout rank_dropout rank_dropout_scale
tfinal tinit tinylora_dropout token_indices tokenizer_kwargs tokenizer_name_or_path total_step
trainable_token_indices unilora_dropout vblora_dropout vera_dropout
"""
KNOWN = frozenset(OTHERS.split()).union(*(names.split() for *_, names in TYPES))


def check_types(settings: Mapping[str, Any]) -> None:
    """Null is as if the key were not there. Raises AdapterInvalidError naming the first key whose value is of
    another type."""
    for what, fits, names in TYPES:
        for name in names.split():
            value = settings.get(name)
            if value is not None and not fits(value):
                raise AdapterInvalidError(f"{CONFIG}: {name} must be {what}, got {shown(value)}")
    for what, fits, name in OF_MODULES:
        for module, value in (settings.get(name) or {}).items():
            if not fits(value):
                where = f"{name} of {module[:80]}"
                raise AdapterInvalidError(f"{CONFIG}: {where} must be {what}, got {shown(value)}")


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
MAX_SHOWN = 5  # names in one line
IN_LAYER = re.compile(r".*?\.(\d{1,6})\.")
SIDE = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")


def check_keys(settings: Mapping[str, Any], options: ReadOptions) -> None:
    """Raises AdapterInvalidError for a value of another type, and for a key of another kind of adapter."""
    check_types(settings)
    if initial_kind(settings).startswith("lora_ga"):
        options.tell(
            "its training began with a base that LoRA-GA had changed; here, as in PEFT, it is added to the "
            "base as it is, which is right if that is the changed one"
        )
    unknown = sorted(name[:40] for name, value in settings.items() if name not in KNOWN and value)
    for name in unknown:
        if name.startswith("use_") or name.endswith("_config"):
            raise AdapterInvalidError(
                f"{CONFIG} sets {name}, which is not supported: it may mean another kind of adapter"
            )
    if unknown:
        options.tell(f"{CONFIG} sets {_some(unknown)}, which nobody here knows: without effect, as in PEFT")


def check_pairs(keys: Iterable[str]) -> None:
    """Raises AdapterInvalidError for modules without A or B. It names two of them: where a tensor has a wrong
    name, one is the module that lacks it, the other the one that is not there."""
    sides: dict[str, set[str]] = defaultdict(set)
    for match in filter(None, map(SIDE.fullmatch, sorted(keys))):
        sides[match["path"]].add(match["side"])
    lines = [
        f"{path} is missing its lora_{'B' if 'A' in found else 'A'} matrix"
        for path, found in sides.items()
        if len(found) == 1
    ]
    if lines:
        raise AdapterInvalidError(", and ".join(lines[:2]))


def check_default_targets(settings: Mapping[str, Any], keys: Iterable[str], model_type: str) -> None:
    """Raises AdapterInvalidError where target_modules is null and the file has other modules than those that
    it means to PEFT, which would pass over them. model_type: in the base's config.json."""
    if settings.get("target_modules") is not None or settings.get("target_parameters"):
        return
    known = (names.split() for names, types in DEFAULT_TARGETS.items() if model_type in types.split())
    names = next(known, None)
    paths = {match["path"] for match in map(SIDE.fullmatch, keys) if match}
    others = sorted(path for path in paths if names is not None and not _is_named(path, names))
    if names is not None and others:
        raise AdapterInvalidError(
            f"{CONFIG}: target_modules is null, which is {' and '.join(names)} for {model_type}, but the "
            f"file has {_some(others)}: name in target_modules what was trained"
        )


def tell_missing(
    settings: Mapping[str, Any], places: Collection[tuple[int, int]], options: ReadOptions
) -> None:
    """places: (layer, module id) of the adapter's rows."""
    modules, depth = options.modules, options.depth
    names = settings.get("target_modules") or []
    plain = isinstance(names, list) and all(isinstance(n, str) and "." not in n for n in names)
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
    lines = [line for name in sorted(set(names)) for line in _absent(name, layers, places, modules)]
    if lines:
        options.tell(f"target_modules names what the file does not have: {_some(lines)}")


def tell_left_out(settings: Mapping[str, Any], keys: Iterable[str], options: ReadOptions) -> None:
    """Of matrices in the file of modules that the settings leave out: PEFT passes over these, with a warning.
    keys: of the tensors, by the names of a LoRA's. Settings that are regular expressions are not run."""
    paths = {match["path"] for match in map(SIDE.fullmatch, keys) if match}
    left_out = sorted(
        path for path in paths if _is_left_out(path.removeprefix("base_model.model."), settings)
    )
    if left_out:
        options.tell(
            f"{CONFIG} leaves out what the file has, and PEFT does too; here it acts: {_some(left_out)}"
        )


def _is_left_out(path: str, settings: Mapping[str, Any]) -> bool:
    """By target_modules, exclude_modules and layers_to_transform, where these are lists."""
    named, excluded = settings.get("target_modules"), settings.get("exclude_modules")
    if isinstance(excluded, list) and _is_named(path, excluded):
        return True
    others = settings.get("target_parameters") or settings.get("ensure_weight_tying")
    if not isinstance(named, list) or not named or others or path in named:
        return False
    asked = settings.get("layers_to_transform")
    layers = asked if isinstance(asked, list) else [] if asked is None else [asked]
    layer = IN_LAYER.match(path)
    elsewhere = bool(layers) and (layer is None or int(layer[1]) not in layers)
    return elsewhere or not _is_named(path, named)


def _is_named(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _absent(
    name: str, layers: Collection[int], places: Collection[tuple[int, int]], modules: Mapping[int, LoraModule]
) -> Iterator[str]:
    found = {ids[name] for ids in (ATTENTION_IDS, MLP_IDS, LINEAR_IDS) if name in ids} & modules.keys()
    for module_id in sorted(found):
        own = modules[module_id].layers
        there = {layer for layer, other in places if other == module_id}
        wanted = {layer for layer in layers if own is None or layer in own}
        if len(found) > 1 and not there:
            continue  # a name of two modules, of which the model may have one in the place of the other
        if missing := wanted - there:
            yield (
                f"{name} of layer{'s' if len(missing) > 1 else ''} {_some(sorted(missing))}"
                if there
                else name
            )


def _some(names: Iterable[Any]) -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more

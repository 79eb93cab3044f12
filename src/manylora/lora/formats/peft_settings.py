"""The keys of adapter_config.json that are known here, of every kind of adapter, and their values' types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_config import CONFIG, shown

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

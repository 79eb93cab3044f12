"""What an adapter's settings promise beside its matrices: keys that nobody here knows, modules and layers
that are not in the file.

PEFT takes such adapters with a warning, so they are served, and it is told; a key that looks like another
kind of adapter is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_config import CONFIG
from manylora.lora.formats.peft_names import ATTENTION_IDS, LINEAR_IDS, MLP_IDS
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.modules import LoraModule

# Of every kind: what the reader of that kind reads, and what matters in training or to nobody.
NAMES = """
adapter_layers adapter_len alora_invocation_tokens alpha alpha_pattern apply_GS arrow_config auto_mapping
base_model_name_or_path beta1 beta2 bias block_share block_size block_size_pattern boft_block_num
boft_block_size boft_dropout boft_n_butterfly_factor coft corda_config d_initial decompose_both
decompose_factor delora_lambda deltaT dora_normalized enable_lora encoder_dropout encoder_hidden_size
encoder_num_layers encoder_reparameterization_type ensure_weight_tying eps eva_config exclude_modules
fan_in_fan_out feedforward_modules group_size inference_mode init_ia3_weights init_logits_std
init_lora_weights init_r init_theta_d_bound init_v_bound init_vector_bank_bound init_weights kasa_config
lambda_pattern layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias
lora_dropout lora_dtype lora_ga_config megatron_config megatron_core merge_weights mini_r miss_dropout
modules_to_save module_dropout monteclora_config num_attention_heads num_cayley_neumann_terms
num_frozen_tokens num_layers num_transformer_submodules num_vectors num_virtual_tokens oft_block_size
orth_reg_weight peft_type peft_version prefix_projection proj_seed projection_prng_key projection_seed
prompt_tuning_init prompt_tuning_init_text qalora_group_size r rank_dropout rank_dropout_scale
rank_pattern revision runtime_config save_indices save_only_topk_weights save_projection target_modules
target_parameters target_r task_type tfinal theta_d_length tinit tinylora_dropout token_dim
tokenizer_kwargs tokenizer_name_or_path topk total_step trainable_token_indices u unilora_dropout
use_bdlora use_cayley_neumann use_dora use_effective_conv2d use_qalora use_rslora variant vblora_dropout
vector_length velora_config vera_dropout weight_tying pvera_dropout sample_at_inference generator_seed
"""
KNOWN = frozenset(NAMES.split())
MAX_SHOWN = 5  # names in one line


def check_keys(settings: Mapping[str, Any], options: ReadOptions) -> None:
    """Raises AdapterInvalidError for a key of another kind of adapter."""
    unknown = sorted(name[:40] for name, value in settings.items() if name not in KNOWN and value)
    for name in unknown:
        if name.startswith("use_") or name.endswith("_config"):
            raise AdapterInvalidError(
                f"{CONFIG} sets {name}, which is not supported: it may mean another kind of adapter"
            )
    if unknown:
        options.tell(f"{CONFIG} sets {_some(unknown)}, which nobody here knows: without effect, as in PEFT")


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

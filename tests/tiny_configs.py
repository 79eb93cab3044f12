"""The tested variants of each model family: settings for transformers' configuration classes.

A row is a name, transformers' `model_type`, and the settings that differ from COMMON.
"""

from __future__ import annotations

from typing import Any

Table = dict[str, tuple[str, dict[str, Any]]]
# The tokenizer has 256 bytes, then <s>, </s>, <pad>. The remaining ids of the vocabulary have no text.
BEGIN_ID, END_ID, PAD_ID, VOCAB = 256, 257, 258, 272
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# original_max_position_embeddings is shorter than the prompts, so that their later queries are scaled.
MINISTRAL3 = {
    **YARN, "original_max_position_embeddings": 16, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.5, 11.5, 15.0],
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
GEMMA = {
    "head_dim": 24,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "hidden_activation": "gelu_pytorch_tanh",
}
# Layers have two head sizes and numbers of heads. In layers without a window, values are equal to keys.
GEMMA4 = {
    "head_dim": 24, "global_head_dim": 40, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 9, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
}  # fmt: skip
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
FAMILIES: Table = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    # max_position_embeddings is shorter than the prompts, which changes their rotary frequencies.
    "llama-dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
    ),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 9}),
    "ministral": (
        "ministral",
        {"sliding_window": 9, "head_dim": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ministral3": ("ministral3", {"head_dim": 24, "rope_parameters": MINISTRAL3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-sliding": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True,
         "mlp_bias": True, "rope_scaling": YARN},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3-partial-rotary": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 40}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": YARN},
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 24},
    ),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "glm": ("glm", {"head_dim": 24}),
    "glm4": ("glm4", {"head_dim": 24, "attention_bias": False, "tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True}),
    "cohere-plain": ("cohere", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "ernie4.5": ("ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma4": ("gemma4_text", {**GEMMA4, "final_logit_softcapping": 3.0}),
    "gemma4-values": (
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4-shared": (
        "gemma4_text",
        {**GEMMA4, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
         "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB},
    ),
    "gemma4-unified": ("gemma4_unified_text", {**GEMMA4, "num_kv_shared_layers": 0}),
    "gpt2": ("gpt2", {"n_inner": 96, "tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 96, "init_std": 0.2, "tie_word_embeddings": True}),
    "opt-350m": (
        "opt",
        {"ffn_dim": 96, "init_std": 0.2, "tie_word_embeddings": True, "word_embed_proj_dim": 40,
         "do_layer_norm_before": False},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("nemotron", {"head_dim": 24}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "falcon": ("falcon", FALCON),
    "falcon-new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": (
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
}  # fmt: skip
QWEN2_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
GPT_OSS = {
    "head_dim": 24, "intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 3,
    "sliding_window": 9, "swiglu_limit": 0.9,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}  # fmt: skip
QWEN3_MOE = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DEEPSEEK = {
    "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 28,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 32}
GLM4_MOE = {
    "head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1, "num_hidden_layers": 3,
}  # fmt: skip
# Attention chunks and the steps of the attention temperature are shorter than the prompts.
LLAMA4 = {
    "head_dim": 24, "intermediate_size": 40, "intermediate_size_mlp": 72, "num_local_experts": 4,
    "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5, "no_rope_layers": [1, 0],
}  # fmt: skip
MOE_FAMILIES: Table = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-plain": (
        "gpt_oss",
        {**GPT_OSS, "attention_bias": False, "swiglu_alpha": 1.3, "num_experts_per_tok": 1,
         "layer_types": ["full_attention", "sliding_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": 4}),
    "granitemoe-shared": (
        "granitemoeshared",
        {**GRANITE, "num_local_experts": 3, "num_experts_per_tok": 1, "shared_intermediate_size": 72},
    ),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.8}),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-sparse": (
        "qwen2_moe",
        {**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "use_sliding_window": True,
         "sliding_window": 9, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("qwen3_moe", {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0]}),
    "deepseek-v2-lite": (
        "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.7, "rope_scaling": DEEPSEEK_YARN},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
         "rope_scaling": DEEPSEEK_YARN},
    ),
    "deepseek-v3-plain": (
        "deepseek_v3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0,
         "rope_interleave": False, "attention_bias": True},
    ),
    "glm4-moe": (
        "glm4_moe", {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1},
    ),
    "glm4-moe-plain": ("glm4_moe", {**GLM4_MOE, "routed_scaling_factor": 1.7}),
    "glm4-moe-lite": ("glm4_moe_lite", DEEPSEEK),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3},
    ),
    "llama4": (
        "llama4_text",
        {**LLAMA4, "num_experts_per_tok": 2, "attention_bias": True, "rope_scaling": LLAMA3},
    ),
    "llama4-interleaved": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_hidden_layers": 4,
         "no_rope_layers": [0, 1, 1, 0]},
    ),
}  # fmt: skip

MOE_FAMILIES["gemma4-moe"] = (
    "gemma4_text",
    {**GEMMA4, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40},
)

# Three value heads per key head, and head sizes that are not multiples of a vector register.
DELTA = {
    "num_hidden_layers": 3, "head_dim": 24, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "partial_rotary_factor": 0.5,
}  # fmt: skip
DELTA_MOE = {**DELTA, **QWEN2_MOE}
FAMILIES |= {
    "qwen3-next-dense": ("qwen3_next", {**DELTA_MOE, "mlp_only_layers": [0, 1, 2], "attention_bias": True}),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
}
LFM2 = {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES |= {
    "lfm2": ("lfm2", LFM2),
    "lfm2-plain": (
        "lfm2",
        {**LFM2, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
}
MOE_FAMILIES |= {
    "qwen3-next": ("qwen3_next", {**DELTA_MOE, "norm_topk_prob": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", DELTA_MOE),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **LFM2,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.3,
        },
    ),
}
GEMMA3N = {
    "head_dim": 24, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 264, "laurel_rank": 10,
    "altup_num_inputs": 3, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.4], "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES |= {
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-plain": (
        "gemma3n_text",
        {**GEMMA3N, "num_kv_shared_layers": 0, "altup_active_idx": 1, "altup_correct_scale": False,
         "activation_sparsity_pattern": None, "num_hidden_layers": 3, "altup_num_inputs": 2,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "attention_bias": True, "final_logit_softcapping": 2.0},
    ),
}  # fmt: skip
# State sizes that are not multiples of a vector register, and two heads per group.
MAMBA = {
    "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_head": 32, "mamba_d_conv": 3,
}  # fmt: skip
GRANITE_HYBRID = {
    **GRANITE, **MAMBA, "num_hidden_layers": 3, "shared_intermediate_size": 72, "intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FAMILIES |= {
    "granite4": ("granitemoehybrid", {**GRANITE_HYBRID, "num_local_experts": 0}),
    "granite4-rope": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True,
         "attention_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "granite4-attention": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope",
         "layer_types": ["full_attention"] * 3},
    ),
}  # fmt: skip
# Some steps would be below time_step_min, so that the limit has an effect.
NEMOTRON_H = {
    "ssm_state_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 20, "n_groups": 2, "conv_kernel": 3,
    "head_dim": 24, "time_step_min": 0.04, "layers_block_type": ["linear_attention", "mlp", "full_attention"],
}  # fmt: skip
FAMILIES |= {
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-biases": (
        "nemotron_h", {**NEMOTRON_H, "mlp_bias": True, "use_bias": True, "use_conv_bias": False},
    ),
}  # fmt: skip
FALCON_H1 = {
    **MAMBA, "mamba_d_ssm": 80, "mamba_d_head": 20, "head_dim": 24, "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9], "mlp_multipliers": [1.4, 0.7],
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4,
}  # fmt: skip
FAMILIES |= {
    "bamba": ("bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-normed": (
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True,
         "attention_bias": True, "mlp_bias": True, "ssm_multipliers": None, "mlp_multipliers": None},
    ),
}  # fmt: skip
MOE_FAMILIES |= {
    "nemotron-h-moe": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
         "n_routed_experts": 6, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 72,
         "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.3},
    ),
    # As in Nemotron 3 Super.
    "nemotron-h-moe-latent": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "moe"],
         "n_routed_experts": 6, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 72,
         "moe_latent_size": 28},
    ),
    "granite4-moe": (
        "granitemoehybrid", {**GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
T5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    "d_model": 64,
    **{f"{stack}_{name}": size for stack in ("encoder", "decoder")
       for name, size in (("attention_heads", 4), ("ffn_dim", 96))},
    "encoder_layers": 2,
    "decoder_layers": 3,
    "init_std": 0.2,
    "decoder_start_token_id": END_ID,
    "forced_eos_token_id": None,
    "tie_word_embeddings": True,
}  # fmt: skip
ENCODER_DECODER_FAMILIES: Table = {
    "t5": ("t5", {**T5, "d_kv": 16, "relative_attention_max_distance": 20}),
    # As in the released checkpoints, whose head and embedding are separate.
    "t5-v1.1": (
        "t5",
        {**T5, "d_kv": 24, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False},
    ),
    "mt5": ("mt5", {**T5, "d_kv": 24, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", BART),
    "bart-scaled-untied": (
        "bart",
        {**BART, "scale_embedding": True, "tie_word_embeddings": False, "encoder_attention_heads": 2},
    ),
}  # fmt: skip

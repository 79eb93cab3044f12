"""Names of a GGUF file's tensors in a Hugging Face checkpoint, by architecture.

A table maps a tensor's name in llama.cpp, without `blk.N.` and mostly without `.weight` or `.bias`, to the
name in a layer of the checkpoint. `{}` stands for the number of one of the matrices or vectors that are
stacked in the tensor. Several names: the tensor has the rows of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, str | tuple[str, ...]]

OUTSIDE: Names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION: Names = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}  # fmt: skip
NAMES: Names = {
    **ATTENTION, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
PHI3: Names = {**NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GEMMA2: Names = {
    **NAMES, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
POST_NORM: Names = {**GEMMA2, "ffn_norm": "ffn_norm"}
GLM: Names = {**NAMES, "ffn_up": "mlp.gate_up_proj"}
GLM4: Names = {
    **GLM, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip


def experts(block: str = "", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Names:
    """Experts in a layer's block, of which `block` is the name with a dot, and their router."""
    gates, ups = f"{block}experts.{{}}.{gate}", f"{block}experts.{{}}.{up}"
    return {
        "ffn_gate_inp": f"{block}gate", "ffn_gate_exps": gates, "ffn_up_exps": ups,
        "ffn_down_exps": f"{block}experts.{{}}.{down}", "ffn_gate_up_exps": (gates, ups),
    }  # fmt: skip


def shared(block: str) -> Names:
    return {
        "ffn_gate_shexp": f"{block}.gate_proj", "ffn_up_shexp": f"{block}.up_proj",
        "ffn_down_shexp": f"{block}.down_proj",
    }  # fmt: skip


MIXTRAL: Names = {
    **ATTENTION,
    **experts("block_sparse_moe.", "w1", "w3", "w2"),
    "ffn_norm": NAMES["ffn_norm"],
}
QWEN_MOE: Names = {
    **NAMES, **experts("mlp."), **shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
GPT_OSS: Names = {
    **NAMES, **experts("mlp."), "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
DEEPSEEK: Names = {
    **NAMES, **experts("mlp."), **shared("mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
GLM4_MOE: Names = {**DEEPSEEK, "post_attention_norm": "post_attention_layernorm"}
ERNIE_MOE: Names = {**DEEPSEEK, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
LLAMA4: Names = {
    **ATTENTION, **experts("feed_forward."), **shared("feed_forward.shared_expert"),
    "ffn_gate_inp": "feed_forward.router", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj", "ffn_norm": NAMES["ffn_norm"],
}  # fmt: skip
GRANITE_MOE: Names = {
    **ATTENTION, **experts("block_sparse_moe."), "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_norm": NAMES["ffn_norm"], "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip


def mamba2(block: str) -> Names:
    return {
        "ssm_a": f"{block}.A_log", "ssm_d": f"{block}.D", "ssm_dt.bias": f"{block}.dt_bias",
        "ssm_in": f"{block}.in_proj", "ssm_out": f"{block}.out_proj", "ssm_norm": f"{block}.norm",
        "ssm_conv1d": f"{block}.conv1d",
    }  # fmt: skip


GRANITE_HYBRID: Names = {**GRANITE_MOE, **mamba2("mamba")}
NEMOTRON_H: Names = {
    **mamba2("mixer"), **experts("mixer."), **shared("mixer.shared_experts"), "attn_norm": "norm",
    "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
NEMOTRON_H_OUTSIDE: Names = {
    "token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head",
}  # fmt: skip
LFM2: Names = {
    **ATTENTION, **experts("feed_forward.", "w1", "w3", "w2"), "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
LFM2_OUTSIDE: Names = {
    **OUTSIDE, "output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
QWEN35: Names = {
    **QWEN_MOE, "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_ba": "linear_attn.in_proj_ba", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
PHI2: Names = {
    **ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
STARCODER2: Names = {**NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
STABLELM: Names = {
    **NAMES, "attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}  # fmt: skip
GPT2: Names = {
    "attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
GPT2_OUTSIDE: Names = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip
NEOX: Names = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
NEOX_OUTSIDE: Names = {
    "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
}  # fmt: skip
FALCON: Names = {
    **NEOX, "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
}  # fmt: skip
FALCON_TWO_NORMS: Names = {**FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
FALCON_OUTSIDE: Names = {
    "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
LAYER_INPUTS: Names = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
LAYER_INPUTS_OUTSIDE: Names = {
    **OUTSIDE, "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
GEMMA3N: Names = {
    **GEMMA2, **LAYER_INPUTS, "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
GEMMA3N_OUTSIDE: Names = {
    **LAYER_INPUTS_OUTSIDE, "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}  # fmt: skip
GEMMA4: Names = {
    **GEMMA2, **LAYER_INPUTS, "layer_output_scale.weight": "layer_scalar", **experts(),
    "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip
BERT: Names = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_qkv": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
BERT_OUTSIDE: Names = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "cls.output": "classifier",
}  # fmt: skip
ROBERTA_OUTSIDE: Names = {**BERT_OUTSIDE, "cls": "classifier.dense", "cls.output": "classifier.out_proj"}
NOMIC_BERT: Names = {
    "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
}  # fmt: skip
NOMIC_BERT_OUTSIDE: Names = {**BERT_OUTSIDE, "token_embd_norm": "emb_ln"}
MODERN_BERT: Names = {
    "attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo", "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo",
}  # fmt: skip
MODERN_BERT_OUTSIDE: Names = {
    "token_embd": "model.embeddings.tok_embeddings", "token_embd_norm": "model.embeddings.norm",
    "output_norm": "model.final_norm", "cls": "head.dense", "cls.norm": "head.norm",
    "cls.output": "classifier",
}  # fmt: skip
GEMMA_EMBEDDING_OUTSIDE: Names = {**OUTSIDE, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"}
BAMBA: Names = {
    **ATTENTION, **mamba2("mamba"), "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
FALCON_H1: Names = {**BAMBA, **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")}
BAMBA_OUTSIDE: Names = {**OUTSIDE, "output_norm": "model.final_layernorm"}

"""Tiny models and adapters by seed, and the answers of transformers + PEFT to compare with.

Needs transformers and peft, imported where they are used.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from manylora.quant.config import QuantConfig

__all__ = [
    "ENCODER_DECODER_FAMILIES", "FAMILIES", "MOE_FAMILIES", "make_adapter", "make_model", "make_nemo",
    "make_wide", "reference_generate", "reference_logits",
]  # fmt: skip

BYTES = 256
SPECIALS = ("<s>", "</s>", "<pad>")
VOCAB = 272
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
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
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3-partial-rotary": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("gpt2", {"n_inner": 96, "tie_word_embeddings": True}),
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
}
QWEN2_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
QWEN3_MOE = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-sparse": (
        "qwen2_moe",
        {**QWEN2_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "use_sliding_window": True,
         "sliding_window": 9, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("qwen3_moe", {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0]}),
}  # fmt: skip

T5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    "d_model": 64,
    **{f"{stack}_{name}": size for stack in ("encoder", "decoder")
       for name, size in (("attention_heads", 4), ("ffn_dim", 96))},
    "encoder_layers": 2,
    "decoder_layers": 3,
    "init_std": 0.2,
    "decoder_start_token_id": BYTES + 1,
    "forced_eos_token_id": None,
    "tie_word_embeddings": True,
}  # fmt: skip
LOUDER, WEAKER = 1.5, 0.1  # float32 would be no reference for T5, whose scores are not scaled
ENCODER_DECODER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {**T5, "d_kv": 16, "relative_attention_max_distance": 20}),
    # The released ones say that head and embedding are two; `scale_decoder_outputs` comes from that.
    "t5-v1.1": (
        "t5",
        {**T5, "d_kv": 24, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False},
    ),
    "bart": ("bart", BART),
    "bart-scaled-untied": ("bart", {**BART, "scale_embedding": True, "tie_word_embeddings": False}),
}  # fmt: skip


def make_model(
    path: Path,
    family: str = "llama",
    seed: int = 0,
    sharded: bool = False,
    stacked: bool = False,
    **overrides: Any,
) -> Path:
    """A random small model of one of FAMILIES, MOE_FAMILIES or ENCODER_DECODER_FAMILIES in a Hugging Face
    directory, with a byte tokenizer. stacked: the experts of a layer in two tensors, as transformers holds
    them in memory."""
    from transformers import AutoConfig

    kind, variant = {**FAMILIES, **MOE_FAMILIES, **ENCODER_DECODER_FAMILIES}[family]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES,
        "eos_token_id": BYTES + 1,
        "pad_token_id": BYTES + 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    if family in ENCODER_DECODER_FAMILIES:
        settings = {
            name: value for name, value in settings.items() if not name.startswith(("num_", "hidden"))
        }
    config = AutoConfig.for_model(kind, **{**settings, **variant, **overrides})
    model = _class_for(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        if variant.get("feed_forward_proj"):  # a head of its own
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms, which start as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if config.is_encoder_decoder:  # else a tied head repeats the last token for ever
            for name, parameter in model.named_parameters():
                if re.search(r"attn|Attention\.[qkvo]\.|fc|wi|wo", name) and parameter.ndim == 2:
                    parameter.mul_(LOUDER)
    size = "40KB" if sharded else "5GB"
    model.save_pretrained(path, max_shard_size=size, save_original_format=not stacked)
    _save_tokenizer(Path(path))
    return Path(path)


def make_wide(path: Path, model_dir: Path, quant: QuantConfig, linears: Sequence[str]) -> Path:
    """A copy of a plain model whose linear layers, by the ends of their names, have the values that they are
    rounded to by `quant`."""
    from safetensors.torch import load_file, save_file

    from manylora.model.checkpoint import read_model_config
    from manylora.model.quant import quantise

    shutil.copytree(model_dir, path)
    weights = load_file(path / "model.safetensors")
    transposed = read_model_config(path).transposed_weights
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module != name and module.endswith(tuple(linears)) and quant.quantises(module):
            rounded = quantise(weight.T.contiguous() if transposed else weight, quant).wide()
            weights[name] = (rounded.T if transposed else rounded).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def make_adapter(
    path: Path,
    model_dir: Path,
    seed: int = 0,
    rank: int = 8,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    alpha: float | None = None,
    **options: Any,
) -> Path:
    """A random adapter, written by PEFT, strong enough to change greedy answers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    options = {"target_modules": list(modules), "lora_alpha": alpha or 2 * rank, **options}
    adapted = get_peft_model(_load(Path(model_dir)), LoraConfig(r=rank, **options))
    strength = WEAKER if adapted.config.is_encoder_decoder else 0.3
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (strength / rank**0.25))
            elif parameter.requires_grad:  # biases, modules_to_save, rows of tokens: copies of the base's
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(str(path))
    return Path(path)


def make_nemo(path: Path, model_dir: Path, seed: int = 0, rank: int = 6) -> tuple[Path, Path]:
    """A random NeMo archive for q, k and v together, and the directory of the PEFT adapter that it equals."""
    from safetensors.torch import load_file, save_file

    from manylora.model.checkpoint import read_model_config
    from manylora.model.families import FAMILIES as ARCHITECTURES

    model = read_model_config(Path(model_dir))
    names = [name.rpartition(".")[2] for name in ARCHITECTURES[model.architecture].names(model).qkv]
    peft = make_adapter(path / "peft", model_dir, seed, rank, names, alpha=rank)
    tensors = load_file(peft / "adapter_model.safetensors")
    parts = (model.q_size, model.kv_size, model.kv_size)
    state: dict[str, torch.Tensor] = {}
    for layer in range(model.num_layers):
        a = torch.randn(rank, model.hidden_size) * 0.2
        b = torch.randn(sum(parts), rank) * 0.2
        prefix = f"model.decoder.layers.{layer}.self_attention.adapter_layer.lora_kqv_adapter"
        state[f"{prefix}.linear_in.weight"], state[f"{prefix}.linear_out.weight"] = a, b
        stacked = [part.reshape(model.qkv_groups, -1, rank) for part in b.split(parts)]
        grouped = torch.cat(stacked, dim=1).reshape(-1, rank)
        rows = b.split(parts) if len(names) == 3 else (grouped,)
        for name, part in zip(names, rows, strict=True):
            [key] = [k for k in tensors if re.search(rf"\.(layers|h)\.{layer}\..*\.{name}\.lora_A\.", k)]
            tensors[key], tensors[key.replace("lora_A", "lora_B")] = a.clone(), part.contiguous()
    save_file(tensors, peft / "adapter_model.safetensors", metadata={"format": "pt"})
    weights = io.BytesIO()
    torch.save(state, weights)
    config = f"num_layers: {model.num_layers}\nhidden_size: {model.hidden_size}\n"
    archive = path / "adapter.nemo"
    with tarfile.open(archive, "w") as tar:
        members = (("model_config.yaml", config.encode()), ("model_weights.ckpt", weights.getvalue()))
        for name, data in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive, peft


def reference_generate(
    model_dir: Path,
    adapter_dir: Path | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    encoder_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation by transformers (+ PEFT) in float32, never stopping early. encoder_ids: for the
    encoder, of a model that has one."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(reference_logits(model_dir, adapter_dir, ids, encoder_ids=encoder_ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def reference_logits(
    model_dir: Path,
    adapter_dir: Path | None,
    ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    encoder_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Logits [len(ids), vocab] by transformers (+ PEFT) in `dtype`, returned as float32."""
    model = _reference(Path(model_dir), Path(adapter_dir) if adapter_dir else None, dtype)
    inputs = {"decoder_input_ids" if encoder_ids else "input_ids": torch.tensor([list(ids)])}
    if encoder_ids:
        inputs["input_ids"] = torch.tensor([list(encoder_ids)])
    with torch.inference_mode():
        return model(**inputs).logits[0].float()


@lru_cache(maxsize=64)
def _reference(model_dir: Path, adapter_dir: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    model = _load(model_dir)
    if adapter_dir is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter_dir))
    return model.to(dtype).eval()


def _load(model_dir: Path) -> Any:
    from transformers import AutoConfig

    kind = _class_for(AutoConfig.from_pretrained(model_dir))
    return kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def _class_for(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BYTES)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))

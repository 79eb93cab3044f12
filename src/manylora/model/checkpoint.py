"""Reads a model's config.json and generation_config.json into a ModelConfig."""

from __future__ import annotations

import re
from pathlib import Path

from manylora.checkpoints.quant.config import checkpoint_quant
from manylora.config.model import ModelConfig
from manylora.config.model_folder import check_model_folder, weight_files
from manylora.config.pooling import attends_both_ways, num_labels, read_score_tokens
from manylora.config.settings import read_settings
from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer
from manylora.model.families import FAMILIES
from manylora.model.families.common import read_common, read_dtype

HEADED = re.compile(
    r"(\w+?)(ForSequenceClassification|ForTokenClassification|ForMaskedLM|ForPreTraining|Model)"
)
CAUSAL = ("ForCausalLM", "LMHeadModel", "Model")
START = "decoder_start_token_id"
# Encoders that are not supported, by the start of their name, and models that do the same work.
RERANKERS = "BAAI/bge-reranker-v2-m3 or cross-encoder/ms-marco-MiniLM-L6-v2"
EMBEDDERS = "BAAI/bge-m3, intfloat/multilingual-e5-large or Alibaba-NLP/gte-modernbert-base"
INSTEAD = {
    "Deberta": RERANKERS,
    **dict.fromkeys(("Jina", "XLMRobertaLoRA", "New", "Gte", "EuroBert"), EMBEDDERS),
}


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read a Hugging Face directory. Raises ConfigError that names what is missing or not supported."""
    model_dir = Path(model_dir)
    check_model_folder(model_dir, weights=False)
    raw = read_settings(model_dir / "config.json")
    if "architectures" not in raw and ("pretrained_config" in raw or "mapping" in raw):
        kind = "engine" if "pretrained_config" in raw else "checkpoint"
        raise ConfigError(
            f"{model_dir} is a TensorRT-LLM {kind}: name the Hugging Face directory that it was made from"
        )
    architecture, headed = (raw.get("architectures") or ["none"])[0], None
    named_head = HEADED.fullmatch(architecture)
    if named_head is not None and architecture not in FAMILIES:  # the family has a language-model head
        stem = named_head[1]
        known = [name for end in CAUSAL if (name := f"{stem}{end}") in FAMILIES]
        if known:
            architecture, headed = known[0], named_head[2].endswith("Classification")
    family = FAMILIES.get(architecture)
    if family is None:
        other = next((models for name, models in INSTEAD.items() if architecture.startswith(name)), None)
        advice = f"; models for the same work are {other}" if other else ""
        raise ConfigError(
            f"{model_dir}/config.json: architecture {architecture} is not supported{advice}; supported are "
            + ", ".join(FAMILIES)
        )
    quant = checkpoint_quant(raw, model_dir)
    generation = read_settings(model_dir / "generation_config.json")
    if family.encoder is not None and generation:  # its first token ids override config.json's
        start = {name: generation[name] for name in (START,) if name in generation}
        raw = {**raw, **start, "forced_bos_token_id": generation.get("forced_bos_token_id")}
    try:
        settings = family.settings(raw)
        fields = {**read_common(settings, family.rope), **family.config(settings)}
        if headed is not None:  # the language-model head would be the embedding, and is unused
            labels = num_labels(raw) if headed else 0
            fields |= {"makes_text": False, "tie_word_embeddings": True, "num_labels": labels}
        named = read_score_tokens(model_dir) if fields.get("makes_text", True) else None
        if named is not None:
            ids: list[int] = []
            for one in named:
                found = (
                    [one]
                    if isinstance(one, int)
                    else Tokenizer(model_dir).encode(one, add_special_tokens=False)
                )
                if len(found) != 1 or not 0 <= found[0] < fields["vocab_size"]:
                    raise ConfigError(
                        f"{model_dir}: {one!r:.40} of classifier_from_token is not one of its tokens"
                    )
                ids += found
            fields |= {"score_tokens": (ids[0], ids[1]), "num_labels": 1}
        dtype = read_dtype(settings) or _stored_dtype(model_dir)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"{model_dir}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{model_dir}/config.json has a value of the wrong type: {error}") from error
    both_ways = attends_both_ways(raw) or raw.get("is_causal") is False
    if both_ways and not fields.get("bidirectional"):
        raise ConfigError(
            f"{model_dir}/config.json: this {architecture} attends in both directions, which is not supported"
        )
    inner = (raw.get("text_config") or {}).get("eos_token_id")
    eos = generation.get("eos_token_id", inner if raw.get("eos_token_id") is None else raw["eos_token_id"])
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    config = ModelConfig(architecture=architecture, dtype=dtype, eos_token_ids=eos_ids, quant=quant, **fields)
    for heads in (config.num_kv_heads, *(shape.num_kv_heads for shape in config.layer_shapes)):
        if config.num_heads % heads:
            raise ConfigError(
                f"{model_dir}/config.json: {config.num_heads} attention heads cannot share "
                f"{heads} key heads equally"
            )
    return config


def _stored_dtype(model_dir: Path) -> str:
    """Dtype of the checkpoint's first weight, if config.json gives none. float32 without a checkpoint."""
    from manylora.model.safetensors_file import FLOATS, SafetensorsFile  # with torch, which few need here

    try:
        paths = weight_files(model_dir)
    except ConfigError:  # only the description is available
        return "float32"
    for path in paths:
        with SafetensorsFile(path) as file:
            found = next((FLOATS[kind] for kind in file.types() if kind in FLOATS), None)
        if found is not None:
            return found
    return "float32"

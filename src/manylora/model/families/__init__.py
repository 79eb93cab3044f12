"""FAMILIES: every supported architecture. To add a family, add a module here and name it in MODULES."""

from __future__ import annotations

from manylora.model.families import (
    bart,
    bert,
    deepseek,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gpt,
    gpt_oss,
    interleaved,
    lfm2,
    llama,
    llama4,
    mamba,
    modernbert,
    moe,
    nemotron_h,
    nomic_bert,
    qwen3_next,
    t5,
    vision,
)
from manylora.model.families.family import ModelFamily

MODULES = (
    llama,
    interleaved,
    gemma,
    gemma3n,
    gemma4,
    gpt,
    moe,
    gpt_oss,
    deepseek,
    llama4,
    qwen3_next,
    lfm2,
    mamba,
    nemotron_h,
    falcon_h1,
    vision,
    t5,
    bart,
    bert,
    modernbert,
    nomic_bert,
)
FAMILIES: dict[str, ModelFamily] = {
    name: family for module in MODULES for name, family in module.FAMILIES.items()
}
"""The keys are the names in config.json's `architectures`."""

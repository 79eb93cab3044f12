"""FAMILIES: every supported architecture. To add a family, add a module here and name it in MODULES."""

from __future__ import annotations

from manylora.model.families import (
    bart,
    bert,
    deepseek,
    gemma,
    gpt,
    interleaved,
    lfm2,
    llama,
    llama4,
    mamba,
    moe,
    qwen3_next,
    t5,
    vision,
)
from manylora.model.families.family import ModelFamily

MODULES = (
    llama,
    interleaved,
    gemma,
    gpt,
    moe,
    deepseek,
    llama4,
    qwen3_next,
    lfm2,
    mamba,
    vision,
    t5,
    bart,
    bert,
)
FAMILIES: dict[str, ModelFamily] = {
    name: family for module in MODULES for name, family in module.FAMILIES.items()
}
"""The keys are the names in config.json's `architectures`."""

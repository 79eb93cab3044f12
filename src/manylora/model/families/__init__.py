"""FAMILIES: every supported architecture. To add a family, add a module here and name it in MODULES."""

from __future__ import annotations

from manylora.model.families import (
    bert,
    deepseek,
    encoder_decoder,
    gemma,
    gpt,
    llama,
    moe,
    recurrent,
    vision,
)
from manylora.model.families.family import ModelFamily

MODULES = (llama, gemma, gpt, moe, deepseek, recurrent, vision, encoder_decoder, bert)
FAMILIES: dict[str, ModelFamily] = {
    name: family for module in MODULES for name, family in module.FAMILIES.items()
}
"""The keys are the names in config.json's `architectures`."""

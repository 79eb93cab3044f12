"""FAMILIES: each supported architecture as data. A new family is an entry in one of these modules."""

from __future__ import annotations

from manylora.model.families import bart, gemma, gpt, llama, moe, t5
from manylora.model.families.family import Family

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **gpt.FAMILIES,
    **moe.FAMILIES,
    **t5.FAMILIES,
    **bart.FAMILIES,
}
"""By the name in config.json's `architectures`."""

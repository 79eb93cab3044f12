"""PEFT's types of adapter: each is converted to the form of a LoRA, exactly, or refused."""

from __future__ import annotations

"""manylora: one base LLM, very many LoRA adapters, served by Triton Inference Server."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

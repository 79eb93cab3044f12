"""QuantConfig under the path that TensorRT-LLM has it at."""

from __future__ import annotations

from manylora.quant.config import QuantConfig

__all__ = ["QuantConfig"]

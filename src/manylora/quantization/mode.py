"""QuantAlgo under the path that TensorRT-LLM has it at."""

from __future__ import annotations

from manylora.quant.config import QuantAlgo

__all__ = ["QuantAlgo"]

"""QuantAlgo and QuantConfig: quantisation of a model's weights, under TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any


class QuantAlgo(str, Enum):
    """Each member equals its own name as text."""

    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W8A8 = "W8A8"
    W4A8 = "W4A8"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A16_GPTQ = "W8A16_GPTQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"
    W4A8_QSERVE_PER_GROUP = "W4A8_QSERVE_PER_GROUP"
    W4A8_QSERVE_PER_CHANNEL = "W4A8_QSERVE_PER_CHANNEL"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    INT8 = "INT8"
    MIXED_PRECISION = "MIXED_PRECISION"
    NVFP4 = "NVFP4"
    W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
    W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    W4A16_MXFP4 = "W4A16_MXFP4"
    NO_QUANT = "NO_QUANT"

    __str__ = str.__str__  # StrEnum, for Python 3.10


SERVED = (QuantAlgo.W8A16, QuantAlgo.W4A16, QuantAlgo.FP8)
"""Formats to which plain weights can be quantised here, on any device."""
INTEGER = (QuantAlgo.W8A8, QuantAlgo.W4A8)
"""Further formats, on a CPU only: inputs of linear layers are rounded to 8 bits, for integer products."""
CALIBRATED = (
    QuantAlgo.W4A16_AWQ, QuantAlgo.W4A16_GPTQ, QuantAlgo.W8A16_GPTQ, QuantAlgo.FP8_BLOCK_SCALES,
    QuantAlgo.W4A16_MXFP4,
)  # fmt: skip
"""Formats of other tools' quantised checkpoints that can be read."""
# Fields that no algorithm here uses, with the accepted values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "smoothquant_val": (0.5,),
    "clamp_val": (None,),
    "use_meta_recipe": (False,),
    "has_zero_point": (False,),
    "pre_quant_scale": (False,),
}


@dataclass(frozen=True)
class QuantConfig:
    """How weights are quantised. Adapters keep the compute dtype. Raises ValueError.

    quant_algo:  W8A16: 8-bit integers with a scale for each output. W4A16: 4-bit integers with a scale and an
                 offset for each group of inputs. FP8: 8-bit floats (e4m3) with a scale for each output; on a
                 GPU with FP8 units activations are rounded so too, with a scale for each token. W8A8, W4A8:
                 on a CPU only, 8-bit integers with a scale for each output, or 4-bit ones with a scale for
                 each 32 inputs; activations are rounded to 8 bits, a scale for each token and 32 inputs.
                 W4A16_AWQ, W4A16_GPTQ, W8A16_GPTQ, FP8_BLOCK_SCALES and W4A16_MXFP4: what the checkpoint is
                 held in; it says so itself. None or NO_QUANT: as they are. All others are refused.
    kv_cache_quant_algo: FP8: keys and values as 8-bit floats (e4m3) without a scale. None or NO_QUANT: in
                 the compute dtype. All others are refused.
    group_size:  inputs that share a scale with W4A16: 32, 64, 128 or 256. Where a matrix has no whole number
                 of groups, the next smaller size that fits is taken.
    exclude_modules: patterns such as `*o_proj`; a linear layer whose name matches is left as it is.
    The embedding and the output head are never quantised.
    """

    quant_algo: QuantAlgo | str | None = None
    kv_cache_quant_algo: QuantAlgo | str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("quant_algo", "kv_cache_quant_algo"):
            value = getattr(self, name)
            if value is not None and value not in list(QuantAlgo):
                raise ValueError(f"{name} must be one of {', '.join(QuantAlgo)}, got {value!r}")
            object.__setattr__(self, name, None if value is None else QuantAlgo(value))
        if self.kv_cache_quant_algo not in (None, QuantAlgo.NO_QUANT, QuantAlgo.FP8):
            raise ValueError(
                f"kv_cache_quant_algo {self.kv_cache_quant_algo} is not supported: no attention kernel here "
                "reads such a KV cache; use FP8 or leave it out"
            )
        if self.quant_algo not in (None, QuantAlgo.NO_QUANT, *SERVED, *INTEGER, *CALIBRATED):
            reason = "activations are quantised here with W8A8 and W4A8, on a CPU, and else only weights"
            if "A16" in str(self.quant_algo):
                reason = "no kernel here reads such weights"
            served = " or ".join(SERVED)
            raise ValueError(f"quant_algo {self.quant_algo} is not supported: {reason}; use {served}")
        if self.group_size not in (32, 64, 128, 256):
            raise ValueError(f"group_size must be 32, 64, 128 or 256, got {self.group_size}")
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise ValueError(
                    f"QuantConfig: {name} is not supported, got {getattr(self, name)!r}; leave it out"
                )

    @property
    def any_weights(self) -> bool:
        """Whether plain weights are to be quantised."""
        return self.quant_algo in (*SERVED, *INTEGER)

    @property
    def fp8_kv_cache(self) -> bool:
        return self.kv_cache_quant_algo == QuantAlgo.FP8

    def quantises(self, module: str) -> bool:
        """module: a linear layer by its name in the checkpoint, as `model.layers.0.self_attn.q_proj`."""
        excluded = self.exclude_modules or ()
        return self.any_weights and not any(fnmatchcase(module, pattern) for pattern in excluded)

    def to_dict(self) -> dict[str, Any]:
        """The fields, JSON-serialisable."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantConfig:
        """Raises ValueError for an unknown field."""
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"QuantConfig has no field {unknown[0]}")
        return cls(**values)

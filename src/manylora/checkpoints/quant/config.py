"""QuantAlgo and QuantConfig: quantisation of a model's weights, under TensorRT-LLM's names. CheckpointQuant:
how a Hugging Face checkpoint describes its quantised weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError


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
        return self.quant_algo in (*SERVED, *INTEGER)

    @property
    def fp8_kv_cache(self) -> bool:
        return self.kv_cache_quant_algo == QuantAlgo.FP8

    def quantises(self, module: str) -> bool:
        """module: a linear layer by its name in the checkpoint, as `model.layers.0.self_attn.q_proj`."""
        excluded = self.exclude_modules or ()
        return self.any_weights and not any(fnmatchcase(module, pattern) for pattern in excluded)

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantConfig:
        """Raises ValueError for an unknown field."""
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"QuantConfig has no field {unknown[0]}")
        return cls(**values)


GPTQ_FILE = "quantize_config.json"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes")
AWQ_VERSIONS = ("gemm", "exllama")  # one file layout, two kernels
PACKED = "pack-quantized"
COMPRESSED = (PACKED, "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
BITS = (4, 8)


@dataclass(frozen=True)
class CheckpointQuant:
    """method: one of METHODS. algo: TensorRT-LLM's name for it. zero_shift: added to stored zero points; 1 in
    GPTQ's first layout, which stores them minus 1. block: (outputs, inputs) that share a scale, or None.
    """

    method: str
    algo: QuantAlgo
    zero_shift: int = 0
    block: tuple[int, int] | None = None


def checkpoint_quant(raw: Mapping[str, Any], model_dir: Path) -> CheckpointQuant | None:
    """raw: config.json. Also reads the file that the first GPTQ tools wrote. None: plain weights, or ours."""
    named, path = raw.get("quantization_config"), model_dir / GPTQ_FILE
    file = "config.json: quantization_config"
    try:
        if not named and path.is_file():
            file = GPTQ_FILE
            named = {"quant_method": "gptq", **json.loads(path.read_text(encoding="utf-8"))}
        return read_checkpoint_quant(named or {})
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{model_dir}/{file}: {error}") from error


def read_checkpoint_quant(raw: Mapping[str, Any]) -> CheckpointQuant | None:
    """raw: `quantization_config`. None: plain weights. Raises ValueError for what is not supported."""
    if not raw:
        return None
    method = raw.get("quant_method")
    if method not in METHODS:
        raise ValueError(f"quant_method {method!r} is not supported; supported are {', '.join(METHODS)}")
    if method == "awq":
        _one_of("version", str(raw.get("version", "gemm")).lower(), AWQ_VERSIONS)
        _one_of("bits", raw.get("bits", 4), (4,))
        return CheckpointQuant(method, QuantAlgo.W4A16_AWQ)
    if method == "gptq":
        bits = _one_of("bits", raw.get("bits", 4), BITS)
        layout = _one_of("checkpoint_format", raw.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
        algo = QuantAlgo.W4A16_GPTQ if bits == 4 else QuantAlgo.W8A16_GPTQ
        return CheckpointQuant(method, algo, 1 if layout == "gptq" else 0)
    if method == "compressed-tensors":
        return _compressed(raw)
    if method == "bitsandbytes":
        four = raw.get("load_in_4bit", raw.get("_load_in_4bit", False))
        return CheckpointQuant(method, QuantAlgo.W4A16 if four else QuantAlgo.W8A16)
    if method == "mxfp4":
        return CheckpointQuant(method, QuantAlgo.W4A16_MXFP4)
    if method == "fbgemm_fp8":
        return CheckpointQuant(method, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
    _one_of("fmt", raw.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
    block = raw.get("weight_block_size")
    if block is None:
        return CheckpointQuant(method, QuantAlgo.FP8)
    return CheckpointQuant(method, QuantAlgo.FP8_BLOCK_SCALES, block=_block("weight_block_size", block))


def _compressed(raw: Mapping[str, Any]) -> CheckpointQuant:
    layout = _one_of("format", raw.get("format"), COMPRESSED)
    sparsity = (raw.get("sparsity_config") or {}).get("format", "dense")
    _one_of("sparsity_config.format", sparsity, ("dense",))
    groups = [group.get("weights") or {} for group in (raw.get("config_groups") or {}).values()]
    kinds = {(weights.get("type", "int"), weights.get("num_bits")) for weights in groups}
    for kind, bits in kinds:
        _one_of("config_groups: type of weights", kind, ("int", "float"))
        _one_of("config_groups: num_bits of weights", bits, BITS if kind == "int" else (8,))
    blocks = {tuple(weights["block_structure"]) for weights in groups if weights.get("block_structure")}
    if len(blocks) > 1:
        raise ValueError("config_groups with several block_structures are not supported")
    block = _block("block_structure", blocks.pop()) if blocks else None
    algo = QuantAlgo.MIXED_PRECISION
    if kinds == {("float", 8)}:
        algo = QuantAlgo.FP8_BLOCK_SCALES if block else QuantAlgo.FP8
    elif kinds in ({("int", 4)}, {("int", 8)}):
        algo = QuantAlgo.W4A16 if kinds == {("int", 4)} and layout == PACKED else QuantAlgo.W8A16
    return CheckpointQuant("compressed-tensors", algo, block=block)


def _block(name: str, value: Any) -> tuple[int, int]:
    if len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        return value[0], value[1]
    raise ValueError(f"{name} must be two sizes, as [128, 128], got {value!r}")


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not supported; supported: {', '.join(map(str, choices))}")
    return value

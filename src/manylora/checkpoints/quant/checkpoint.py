"""CheckpointQuant: how a Hugging Face checkpoint describes its quantised weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.checkpoints.quant.config import QuantAlgo
from manylora.errors import ConfigError

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

"""LoRA adapters of llama.cpp: a GGUF file as its convert_lora_to_gguf.py writes it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.adapters.bounds import Bounds
from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.safe_files import OpenFile
from manylora.adapters.formats.tensor_files import NUMPY_TYPES, RawTensor, decode
from manylora.checkpoints.gguf.config import ARCHITECTURES, EXPERTS
from manylora.checkpoints.gguf.container import Header, TensorInfo, read_open
from manylora.errors import AdapterInvalidError, ConfigError, printable

if TYPE_CHECKING:  # torch only when something is read
    from manylora.checkpoints.gguf.file import Source, Target

ARCHITECTURE = "general.architecture"
TYPES = {"general.type": "adapter", "adapter.type": "lora"}
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
MOST_TEXT = 300  # characters of an error
EMBEDDING = "token_embd.weight"
# What the order of rows depends on, in GGUF's words and in those of config.json.
SIZES = {
    "attention.head_count": ("num_attention_heads", "n_head"), "attention.key_length": ("head_dim",),
    "embedding_length": ("hidden_size", "n_embd"), "ssm.time_step_rank": ("linear_num_value_heads",),
    "ssm.group_count": ("linear_num_key_heads",), "ssm.state_size": ("linear_key_head_dim",),
}  # fmt: skip


def read_settings(path: Path, bounds: Bounds) -> dict[str, Any]:
    """The file's settings in PEFT's words. ARCHITECTURE marks the tensors as llama.cpp's. Raises
    AdapterInvalidError."""
    found = _open(path, bounds)[0].metadata
    for key, wanted in TYPES.items():
        if found.get(key) != wanted:
            raise AdapterInvalidError(
                f"{path.name} is a GGUF file, but no LoRA adapter: its {key} must be {wanted}, got "
                f"{printable(str(found.get(key)))[:40]}"
            )
    settings = {
        "peft_type": "LORA", "lora_alpha": found.get(ALPHA, 0.0), "target_modules": "all-linear",
        ARCHITECTURE: printable(str(found.get(ARCHITECTURE)))[:40],
    }  # fmt: skip
    if INVOCATION in found:
        settings["alora_invocation_tokens"] = np.asarray(found[INVOCATION]).tolist()
    return settings


def read_tensors(path: Path, bounds: Bounds) -> dict[str, RawTensor]:
    """The tensors as stored; those of other types than safetensors has keep GGUF's name of it. Raises
    AdapterInvalidError."""
    header, file = _open(path, bounds)
    infos = header.tensors.values()
    return {one.name: RawTensor(one.kind, one.shape, None, file, one.offset, one.nbytes) for one in infos}


def _open(path: Path, bounds: Bounds) -> tuple[Header, OpenFile]:
    try:
        file = OpenFile(path, bounds)
        with os.fdopen(os.dup(file.descriptor), "rb") as stream:
            stream.seek(0)
            return read_open(stream, Path(path.name), bounds.header_bytes, bounds.tensors), file
    except OSError as error:
        raise AdapterInvalidError(f"{path.name} is not readable: {error.strerror}") from error
    except ConfigError as error:
        raise AdapterInvalidError(str(error)[:MOST_TEXT]) from error


def in_peft_form(
    settings: Mapping[str, Any],
    tensors: Mapping[str, RawTensor],
    base: BaseReader | None,
    tell: Callable[[str], None],
) -> tuple[Mapping[str, Any], dict[str, RawTensor]]:
    """The settings, and the tensors by PEFT's names and in its order of rows. base: an open base model. tell:
    as in `ReadOptions`. Raises AdapterInvalidError."""
    pairs: dict[str, dict[str, RawTensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part in ("lora_a", "lora_b"):
            pairs[name][part] = tensor
        elif key.endswith("_norm.weight"):
            tell(f"{printable(key)} is without effect, as in llama.cpp")
        else:
            raise AdapterInvalidError(f"{printable(key)[:200]} is neither lora_a nor lora_b of a weight")
    for name, pair in pairs.items():
        if len(pair) < 2:
            missing = "lora_b" if "lora_a" in pair else "lora_a"
            raise AdapterInvalidError(f"{printable(name)[:200]} is missing its {missing}")
    found: dict[str, RawTensor] = {}
    if table := pairs.pop(EMBEDDING, None):
        a, b = (_plain(EMBEDDING, table[part]) for part in ("lora_a", "lora_b"))
        if len(a.shape) != 2:
            raise AdapterInvalidError(f"{EMBEDDING}.lora_a must be a matrix, got {a.shape}")
        path = "base_model.model.model.embed_tokens.lora_embedding_"
        found = {f"{path}A": a.turned(EMBEDDING), f"{path}B": b}
    ranks: dict[str, int] = {}
    for name, target in _targets(settings, pairs, base).items():
        path = name.removesuffix(".weight")
        parts = [_matrices(pairs[source.info.name], source) for source in target.parts]
        if any(len(one.shape) != 2 or 0 in one.shape for pair in parts for one in pair):
            raise AdapterInvalidError(f"{printable(name)[:200]}: lora_a and lora_b must be matrices")
        a, b = parts[0] if target.runs is None and len(parts) == 1 else _in_order(name, target, parts)
        ranks[path] = a.shape[0]
        found |= {f"base_model.model.{path}.lora_{side}.weight": one for side, one in (("A", a), ("B", b))}
    if not settings["lora_alpha"]:  # then llama.cpp has a scaling of 1
        settings = {**settings, "alpha_pattern": {path.replace(".", r"\."): r for path, r in ranks.items()}}
    return settings, found


def _targets(
    settings: Mapping[str, Any], pairs: Mapping[str, Mapping[str, RawTensor]], base: BaseReader | None
) -> dict[str, Target]:
    from manylora.checkpoints.gguf.file import read_targets

    kind = settings[ARCHITECTURE]
    known = base.settings if base is not None else {}
    known = known["text_config"] if isinstance(known.get("text_config"), dict) else known
    sizes = {own: next((known[key] for key in keys if known.get(key)), None) for own, keys in SIZES.items()}
    metadata: dict[str, Any] = {f"{kind}.{key}": size for key, size in sizes.items() if size is not None}
    values = known.get("linear_num_value_heads", 0) * known.get("linear_value_head_dim", 0)
    metadata |= {ARCHITECTURE: kind, f"{kind}.ssm.inner_size": values}
    routed = ARCHITECTURES.get(kind + EXPERTS)
    if routed and (kind not in ARCHITECTURES or routed.architecture in known.get("architectures", ())):
        metadata[f"{kind}.expert_count"] = 1
    if "BambaForCausalLM" not in known.get("architectures", ()):
        metadata["granitehybrid.embedding_scale"] = 1.0
    infos = {
        name: TensorInfo(name, pair["lora_b"].shape, pair["lora_b"].dtype, pair["lora_b"].offset)
        for name, pair in pairs.items()
    }
    try:
        return read_targets(Header(Path("the adapter"), metadata, infos), partial=True)
    except ConfigError as error:
        if base is None and kind in ARCHITECTURES:
            raise AdapterInvalidError(
                "the order in which llama.cpp stores rows of q and k depends on the base model, which is not "
                "known here: name its directory (--base)"
            ) from error
        raise AdapterInvalidError(str(error)[:MOST_TEXT]) from error


def _matrices(pair: Mapping[str, RawTensor], source: Source) -> tuple[RawTensor, RawTensor]:
    """A and B of a part of a tensor: of one expert, or some rows, in the checkpoint's order."""
    info, whole, a = source.info, pair["lora_b"], pair["lora_a"]
    b = RawTensor(info.kind, info.shape, None, whole.file, info.offset, info.nbytes)
    if len(whole.shape) == 3 and len(a.shape) == 3:
        if a.shape[0] != whole.shape[0]:
            raise AdapterInvalidError(
                f"{info.name}: lora_a is of {a.shape[0]} experts, lora_b of {whole.shape[0]}"
            )
        number = (info.offset - whole.offset) // (whole.nbytes // whole.shape[0])
        size = a.nbytes // a.shape[0]
        a = RawTensor(a.dtype, a.shape[1:], None, a.file, a.offset + number * size, size)
    a, b = _plain(info.name, a), _plain(info.name, b)
    if source.rows is not None:
        b = RawTensor.of(decode(info.name, b)[source.rows.numpy()])
    return a, b


def _in_order(
    name: str, target: Target, parts: list[tuple[RawTensor, RawTensor]]
) -> tuple[RawTensor, RawTensor]:
    """A and B of a layer whose rows are several weights of the file, or whose inputs are in other runs."""
    import torch

    from manylora.checkpoints.gguf.file import in_runs

    first, *others = [decode(name, a) for a, _ in parts]
    if any(not np.array_equal(one, first) for one in others):
        raise AdapterInvalidError(f"{name} is one layer here, and its parts have different matrices lora_a")
    if target.runs is not None:
        if first.shape[1] % len(target.runs):
            raise AdapterInvalidError(f"{name}: lora_a must have inputs of {len(target.runs)} heads")
        return RawTensor.of(in_runs(torch.from_numpy(first), target.runs).numpy()), parts[0][1]
    b = np.concatenate([decode(name, one) for _, one in parts])
    return parts[0][0], RawTensor.of(b if target.rows is None else b[target.rows.numpy()])


def _plain(name: str, tensor: RawTensor) -> RawTensor:
    """Widened if safetensors has no such type."""
    if tensor.dtype in NUMPY_TYPES:
        return tensor
    from gguf import GGMLQuantizationType, dequantize

    data = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # NaNs are found when values are used
        return RawTensor.of(dequantize(data, GGMLQuantizationType[tensor.dtype]).reshape(tensor.shape))

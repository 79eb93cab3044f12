"""Detects the format of an adapter by its content, and reads any format as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from manylora.adapters.extras import take_invocation
from manylora.adapters.formats import mlx, npy, one_line
from manylora.adapters.formats.nemo import find_nemo, nemo_tensors, read_nemo
from manylora.adapters.formats.npy import read_llgtrt, read_npy, read_npy_invocation
from manylora.adapters.formats.peft.settings import CONFIG
from manylora.adapters.formats.peft_folder import WEIGHTS, peft_tensors, read_peft, read_peft_whole
from manylora.adapters.formats.read_options import DEFAULT, ReadOptions
from manylora.adapters.formats.safe_files import file_kind, is_plain, list_files
from manylora.adapters.number_types import BY_DTYPE, BY_SAFETENSORS, to_bfloat16
from manylora.adapters.tensors import AdapterContent, lora_input, pack_rows
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.request import LoraExtra, LoraInput


@dataclass(frozen=True)
class Source:
    """kind: npy, peft, mlx, gguf, nemo or llgtrt. path: a folder for npy, peft and mlx, a file for others,
    or of PEFT in a single file."""

    kind: str
    path: Path

    @property
    def in_peft(self) -> bool:
        """Whether it is read in PEFT's words."""
        return self.kind in ("peft", "mlx", "gguf")

    @property
    def has_rows(self) -> bool:
        """Whether its files give the size of each row."""
        return self.in_peft or self.kind == "nemo"


def find_source(path: Path) -> Source:
    """The first of these in a folder: the .npy pair, a PEFT adapter, one .nemo file, one llgtrt file.

    Raises AdapterInvalidError when there is none.
    """
    try:
        if path.is_file():
            kind = "nemo" if path.suffix == ".nemo" else file_kind(path)
            if kind is not None:
                return Source(kind.removeprefix("other "), path)
            raise AdapterInvalidError(
                f"{path.name} is neither a .nemo archive nor an llgtrt .safetensors file, nor one of PEFT "
                "with adapter_config in its metadata"
            )
        if not path.is_dir():
            reason = "is neither a file nor a directory" if path.exists() else "does not exist"
            raise AdapterInvalidError(f"{path.name} {reason}")
        if is_plain(path / npy.WEIGHTS):
            return Source("npy", path)
        if is_plain(path / CONFIG):
            is_mlx = is_plain(path / mlx.WEIGHTS) and not is_plain(path / WEIGHTS)
            return Source("mlx" if is_mlx else "peft", path)
        if list_files(path, ".nemo"):
            return Source("nemo", find_nemo(path))
        found = []
        for kind, suffix in (("llgtrt", ".safetensors"), ("gguf", ".gguf")):
            found += [Source(kind, file) for file in list_files(path, suffix) if file_kind(file) == kind]
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterInvalidError(f"{path.name[:80]} cannot be read: {one_line(error)}") from error
    if len(found) > 1:
        raise AdapterInvalidError(f"folder {path.name} holds {len(found)} adapters: name one of them")
    if found:
        return found[0]
    raise AdapterInvalidError(
        f"folder {path.name} holds neither model.lora_weights.npy nor a PEFT adapter_config.json, a .nemo "
        "archive or an llgtrt .safetensors file"
    )


def read_source(
    source: Source, options: ReadOptions = DEFAULT, invocation: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] int32. Those of PEFT and NeMo are float32, others as
    stored.

    invocation: as in `take_invocation`. Raises AdapterInvalidError, also for other extras, which `read_lora`
    reads.
    """
    path, bounds = source.path, options.bounds
    if source.in_peft:
        return read_peft(path, options, invocation)
    if source.kind == "nemo":
        return pack_rows(read_nemo(path, options))
    if source.kind == "npy":
        take_invocation(read_npy_invocation(path, bounds), invocation)
        return read_npy(path, bounds)
    weights, config = read_llgtrt(path, bounds)
    if not options.float8 and BY_DTYPE[weights.dtype].encoding is not Encoding.PLAIN:
        weights = to_bfloat16(f"{path.name}: weights", weights)
    return weights, config


def read_lora(source: Source, task_id: int, options: ReadOptions = DEFAULT) -> LoraInput:
    """A whole adapter, with extras, as a request in this process carries it. Otherwise like `read_source`."""
    if not source.in_peft:
        invocation: list[int] = []
        tensors = read_source(source, options, invocation)
        extras = (LoraExtra.invocation(invocation),) if invocation else ()
        return LoraInput(task_id, *tensors, extras=extras)
    content = read_peft_whole(source.path, options)
    return lora_input(task_id, content.rows, content.extras)


def read_whole(source: Source, options: ReadOptions = DEFAULT) -> AdapterContent:
    """Reads PEFT, mlx-lm and NeMo, whose files give the size of each row. Raises AdapterInvalidError."""
    if source.in_peft:
        return read_peft_whole(source.path, options)
    return AdapterContent(read_nemo(source.path, options), [])


def source_dtype(source: Source, options: ReadOptions = DEFAULT) -> str:
    """The stored type: float16, bfloat16 or float8_e4m3fn if all tensors have it; otherwise float32."""
    if source.kind in ("npy", "llgtrt"):
        kind = BY_DTYPE.get(read_source(source, replace(options, float8=True), [])[0].dtype)
        return kind.name if kind is not None else "float32"
    nemo = source.kind == "nemo"
    tensors = nemo_tensors(source.path, options.bounds) if nemo else peft_tensors(source.path, options)
    kinds = {tensor.dtype for tensor in tensors.values()}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    return kind.name if kind is not None else "float32"

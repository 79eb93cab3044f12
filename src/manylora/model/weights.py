"""Reads a checkpoint's safetensors into a Decoder: each tensor once, straight into its fused place."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.config.engine import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.device import Device
from manylora.kernels.quantised import QuantisedWeight, StackedWeight
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.plan import Part, Piece, checkpoint_plan, unused_names
from manylora.model.quant import check_asked, chosen, quantise, stacked
from manylora.model.safetensors_file import StoredTensor, TensorFile
from manylora.quant.checkpoint_weights import StoredWeights
from manylora.quant.config import QuantConfig

__all__ = [
    "adapter_dtype", "check_names", "compute_dtype", "load_decoder", "open_checkpoint", "read_whole",
]  # fmt: skip

# Buffers that some checkpoints carry and that the configuration determines; the biases are causal masks.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def compute_dtype(choice: str, config: ModelConfig, device: Device) -> torch.dtype:
    """`auto` takes the checkpoint's; on a CPU float32 in place of float16, and of bfloat16 where the
    processor does not have it: both are slow there, and float32 loses nothing."""
    if choice == "auto":
        choice = config.dtype
        slow = choice == "float16" or (choice == "bfloat16" and not device.ops.has_bfloat16)
        if device.torch.type == "cpu" and slow:
            choice = "float32"
    return DTYPES[choice]


def adapter_dtype(choice: str, config: ModelConfig, compute: torch.dtype, device: Device) -> torch.dtype:
    """What adapters are held in: the compute dtype, or with `auto` the checkpoint's where the operations
    widen that themselves. Half the bytes to keep and to read; float32 adapters are rounded, as on a GPU."""
    stored = DTYPES[config.dtype]
    return stored if choice == "auto" and device.ops.keeps(stored, compute) else compute


def load_decoder(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    max_seq_len: int | None = None,
    quant: QuantConfig | None = None,
) -> Decoder | EncoderDecoder:
    """Weights of `model_dir` in `dtype` on `device`, for sequences of up to max_seq_len tokens (None: what
    the model allows), linear layers as `quant` says or as they are stored. Raises ConfigError naming a
    missing, unknown or wrongly shaped tensor, or a broken file."""
    with ExitStack() as stack:
        files = open_checkpoint(Path(model_dir), stack)
        plan = checkpoint_plan(config, files)
        stored = check_names(files, plan, config, quant)
        weights: dict[str, Any] = {}
        for name, part in plan.items():  # packed one by one, so that no more than one matrix is here twice
            routed = ".expert." in name
            if any(stored.parts(piece.source) for piece in part.pieces):
                weights[name] = device.ops.pack(_read_quantised(part, files, stored, dtype, device), routed)
                continue
            rows = _PartRows(part, files, _dtype_here(name, part, files, dtype, device), device)
            sources = [piece.source for piece in part.pieces]
            if quant and chosen(name, sources, quant):
                weights[name] = device.ops.pack(quantise(rows.whole().to(dtype), quant), routed)
            else:
                weights[name] = device.ops.pack_rows(rows, routed) if part.is_matrix else rows.whole()
    if "head.weight" not in weights:  # it is the embedding
        weights["head.weight"] = device.ops.pack(weights["embed"])
    model = Decoder if config.encoder is None else EncoderDecoder
    return model(config, weights, dtype, device.ops, max_seq_len)


def _dtype_here(
    name: str, part: Part, files: dict[str, TensorFile], compute: torch.dtype, device: Device
) -> torch.dtype:
    """What a tensor is held in: the compute dtype, or narrower as it is stored where nothing is lost."""
    if part.plus_one:
        return torch.float32
    if not (part.is_matrix or name == "embed"):
        return compute
    sources = {piece.source for piece in part.pieces} & files.keys()
    stored = {STORED.get(files[source].get_slice(source).get_dtype(), compute) for source in sources}
    narrow = stored.pop() if len(stored) == 1 else compute
    return narrow if device.ops.keeps(narrow, compute) else compute


def open_checkpoint(model_dir: Path, stack: ExitStack) -> dict[str, TensorFile]:
    """Tensor name -> open file that has it; nothing is read. Raises ConfigError."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    else:
        names = ["model.safetensors"]
    found: dict[str, TensorFile] = {}
    for name in names:
        path = model_dir / Path(name).name
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: weights are read from safetensors files")
        file = stack.enter_context(TensorFile(path))
        found.update(dict.fromkeys(file.keys(), file))
    return found


def check_names(
    files: dict[str, TensorFile], plan: dict[str, Part], config: ModelConfig, quant: QuantConfig | None
) -> StoredWeights:
    """Which weights are stored quantised. Raises ConfigError unless the checkpoint has what the plan names,
    and nothing else, and can be had as `quant` asks."""
    stored = StoredWeights(config.quant, files.keys())
    sources = {piece.source for part in plan.values() for piece in part.pieces}
    wanted = {name for source in sources for name in stored.names(source)}
    check_asked(quant, config.quant, wanted != sources)
    missing = sorted(wanted - files.keys())
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]} ({len(missing)} tensors missing)")
    unused = unused_names(config)
    rest = files.keys() - wanted
    unknown = {n for n in rest if not n.endswith(IGNORED_SUFFIXES) and not n.startswith(unused)}
    unknown = {n for n in unknown if not stored.is_left_out(n) or _adds(n, files, stored)}
    if unknown:
        raise ConfigError(
            f"the checkpoint holds {min(unknown)}, which {config.architecture} with this config.json does "
            f"not use ({len(unknown)} such tensors)"
        )
    return stored


def _adds(name: str, files: dict[str, TensorFile], stored: StoredWeights) -> bool:
    """Whether this is a bias that the model has no place for, and not one of zeros."""
    return stored.is_spare_bias(name) and bool(files[name].get_tensor(name).any())


class _PartRows:
    """Rows of a fused plain weight, read when they are wanted. dtype: what they become."""

    def __init__(self, part: Part, files: dict[str, TensorFile], dtype: torch.dtype, device: Device) -> None:
        self._part, self.dtype, self._device = part, dtype, device.torch
        self._stored = [_checked(part, piece, files) for piece in part.pieces]
        self.shape = part.shape
        self.streams = not (part.transposed and part.columns) and all(s.dtype == dtype for s in self._stored)

    def read(self, start: int, out: Tensor) -> None:
        """Rows [start, start + len(out)) into a contiguous tensor on the CPU; where `streams`. Any thread."""
        first, stop = 0, start + len(out)  # of the piece, in the whole
        for piece, stored in zip(self._part.pieces, self._stored, strict=True):
            low, high = max(start, first), min(stop, first + piece.rows)
            if low < high:
                place = piece.expert * piece.total + piece.start + low - first
                stored.read_rows(place, out[low - start : high - start])
            first += piece.rows

    def whole(self) -> Tensor:
        """On the device."""
        made = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.streams and made.device.type == "cpu":
            self.read(0, made)
            return made.add_(1) if self._part.plus_one else made
        start = 0
        for piece, stored in zip(self._part.pieces, self._stored, strict=True):
            made[start : start + piece.rows].copy_(_plain_rows(self._part, piece, stored))
            start += piece.rows
        return made.add_(1) if self._part.plus_one else made


def _checked(part: Part, piece: Piece, files: dict[str, TensorFile]) -> StoredTensor:
    tensor, expected = files[piece.source].get_slice(piece.source), part.stored_shape(piece)
    if tuple(tensor.get_shape()) != expected:
        raise ConfigError(
            f"{piece.source} must be {expected} by config.json, got {tuple(tensor.get_shape())}"
        )
    if tensor.get_dtype() not in STORED:
        raise ConfigError(
            f"{piece.source} is stored as {tensor.get_dtype()}, and nothing says how; plain weights are "
            + ", ".join(STORED)
        )
    return tensor


def _plain_rows(part: Part, piece: Piece, stored: StoredTensor) -> Tensor:
    if part.transposed and part.columns:
        return stored.whole()[:, piece.start : piece.start + piece.rows].T
    shape = (piece.rows, part.columns) if part.columns else (piece.rows,)
    rows = torch.empty(shape, dtype=stored.dtype)
    stored.read_rows(piece.expert * piece.total + piece.start, rows)
    return rows


def _read_quantised(
    part: Part, files: dict[str, TensorFile], stored: StoredWeights, dtype: torch.dtype, device: Device
) -> Tensor | QuantisedWeight | StackedWeight:
    """Each source is read once, whole: in some layouts its rows lie side by side."""
    whole: dict[str, QuantisedWeight] = {}
    pieces: list[Tensor | QuantisedWeight] = []
    for piece in part.pieces:
        source = piece.source
        if not stored.parts(source):
            pieces.append(_plain_rows(part, piece, _checked(part, piece, files)).to(device.torch, dtype))
            continue
        if source not in whole:
            whole[source] = read_whole(source, piece.total, part.columns, files, stored, device.torch).to(
                dtype
            )
        pieces.append(whole[source].rows(slice(piece.start, piece.start + piece.rows)))
    return stacked(pieces)


def read_whole(
    source: str,
    rows: int,
    columns: int,
    files: dict[str, TensorFile],
    stored: StoredWeights,
    device: torch.device,
) -> QuantisedWeight:
    """A quantised weight as it is stored, [rows, columns]. Raises ConfigError."""
    found = stored.read(source, columns, lambda name: files[name].get_tensor(name).to(device))
    if found.shape != (rows, columns):
        raise ConfigError(
            f"{source.removesuffix('.weight')} must be {(rows, columns)} by config.json, got {found.shape}"
        )
    return found

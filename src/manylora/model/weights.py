"""Loads safetensors files or a GGUF file into a model. Each tensor is read once, into its fused weight."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.checkpoints.gguf.container import block_sizes
from manylora.checkpoints.gguf.file import GgufFile, PlainTensor
from manylora.checkpoints.quant.config import INTEGER, SERVED, QuantConfig
from manylora.checkpoints.quant.layouts import PARTS, CheckpointWeights
from manylora.config.engine import EngineConfig, weights_algo
from manylora.config.model import ModelConfig
from manylora.config.model_folder import weight_files
from manylora.errors import ConfigError
from manylora.kernels.device import Device
from manylora.kernels.panels import Panels
from manylora.kernels.quantised import QuantisedWeight, StackedWeight
from manylora.kernels.spec import Weight
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.families import FAMILIES
from manylora.model.plan import checkpoint_plan, head_name, unused_prefixes
from manylora.model.plan_layers import Plan, RowSlice, WeightSpec
from manylora.model.quant import check_quant_request, quantise, should_quantise, stack_weights
from manylora.model.safetensors_file import FileTensor, SafetensorsFile
from manylora.system.command_line import Progress
from manylora.system.resources import release_free_memory

logger = logging.getLogger("manylora")

# Buffers in some checkpoints that follow from the configuration. These biases are causal masks.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias", "position_ids")

COMPUTE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

Files = dict[str, SafetensorsFile | GgufFile]
"""Tensor name -> the open file that contains it."""


def compute_dtype(choice: str, config: ModelConfig, device: Device) -> torch.dtype:
    """The dtype of all tensors except weights. `auto`: the checkpoint's. On a CPU, float32 replaces float16,
    and bfloat16 if the processor lacks it or its products would round: float32 loses nothing.
    """
    if choice == "auto":
        choice = config.dtype
        slow = choice == "float16" or (choice == "bfloat16" and not device.ops.has_bfloat16)
        if device.torch.type == "cpu" and slow:
            choice = "float32"
    return device.ops.compute_in(COMPUTE_DTYPES[choice])


def adapter_dtype(
    settings: EngineConfig, config: ModelConfig, compute: torch.dtype, device: Device
) -> torch.dtype:
    """The dtype of adapters in memory. `auto`: `dtype` if it was set, or the checkpoint's if kernels widen it
    on reading, which halves the bytes and rounds float32 ones; else the compute dtype. Raises ConfigError.
    """
    wanted, name = settings.lora.lora_adapter_dtype, settings.dtype
    if wanted == "auto":
        if name == "auto":
            name = config.dtype
        if not device.ops.keeps(COMPUTE_DTYPES[name], compute):
            return compute
        if COMPUTE_DTYPES[name] != compute:
            logger.info(
                "adapters are kept in %s, as the weights are: those saved in float32 are rounded; "
                "lora_adapter_dtype float32 keeps them as they are, in twice the bytes",
                name,
            )
        return COMPUTE_DTYPES[name]
    if COMPUTE_DTYPES[wanted] != compute and (device.torch.type != "cpu" or compute != torch.float32):
        name = str(compute).removeprefix("torch.")
        raise ConfigError(
            f"lora_adapter_dtype must be auto or {name}, the compute dtype, on this device, got {wanted}"
        )
    return COMPUTE_DTYPES[wanted]


def load_decoder(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    max_seq_len: int | None = None,
    quant: QuantConfig | None = None,
) -> Decoder | EncoderDecoder:
    """Load the model in `model_dir` onto `device`. max_seq_len: of an encoder-decoder model; None: what it
    allows. quant: for linear layers; None: as in the checkpoint. Raises ConfigError that names a tensor.
    """
    config, weights = load_weights(model_dir, config, dtype, device, quant)
    if config.bidirectional:
        weights["head.weight"] = weights["embed"]  # required, but never used
    elif "head.weight" not in weights:  # tied to the embedding
        weights["head.weight"] = tied_head(weights["embed"], device)
    if config.encoder is None:
        return Decoder(config, weights, dtype, device.ops)
    return EncoderDecoder(config, weights, dtype, device.ops, max_seq_len)


def tied_head(table: Tensor | Panels, device: Device) -> Weight:
    return table if isinstance(table, Panels) else device.ops.pack(table)


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    quant: QuantConfig | None = None,
    take: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[ModelConfig, dict[str, Any]]:
    """The weights by our names, with packed matrices; and the config, corrected according to the checkpoint.
    take: selects the part of the plan to read. Raises ConfigError, as `load_decoder`.
    """
    algo = weights_algo(model_dir, quant)
    rounds_inputs = algo in INTEGER
    if rounds_inputs and device.torch.type != "cpu":
        raise ConfigError(
            f"quant_algo {algo} is for CPUs, and device is {device.torch.type} ({device.name}): use "
            f"{' or '.join(SERVED)} there"
        )
    with ExitStack() as stack:
        paths = weight_files(Path(model_dir))
        progress = stack.enter_context(
            Progress("loading", "loaded", "weights", sum(path.stat().st_size for path in paths))
        )
        files = open_checkpoint(Path(model_dir), stack, progress.add)
        config = _with_own_head(config, files)
        plan = plan_of_files(config, files)
        stored = check_names(files, plan, config, quant)
        taken = take(plan)
        is_head = "head.weight" not in taken and not config.bidirectional
        reader = _WeightReader(files, stored, dtype, device, quant, rounds_inputs, is_head)
        # Packed one by one: at most one matrix is in memory twice.
        weights: dict[str, Any] = {name: reader.read(name, spec) for name, spec in taken.items()}
    if config.score_tokens is not None:
        weights["score.weight"] = weights.pop("score.for") - weights.pop("score.against")
    release_free_memory()
    return config, weights


def _with_own_head(config: ModelConfig, files: Files) -> ModelConfig:
    """As in transformers 5, whatever config.json says: a head that differs from the embedding is not tied."""
    if not config.tie_word_embeddings or config.encoder is not None:
        return config
    head = f"{head_name(config, files)}.weight"
    embed = checkpoint_plan(config, files)["embed"].slices[0].source
    if head not in files or embed not in files:
        return config
    if torch.equal(files[head].get_tensor(head), files[embed].get_tensor(embed)):
        return config
    logger.warning("tie_word_embeddings is true, but %s differs from %s: both are used", head, embed)
    return replace(config, tie_word_embeddings=False)


def _loaded_dtype(
    name: str, spec: WeightSpec, files: Files, compute: torch.dtype, device: Device
) -> torch.dtype:
    """The compute dtype, the checkpoint's if kernels widen that, or the one to which inputs are rounded."""
    if spec.plus_one or spec.wide:
        return torch.float32
    if not (spec.is_matrix or name in ("embed", "layer_inputs.embed")):
        return compute
    sources = {piece.source for piece in spec.slices} & files.keys()
    stored = {PLAIN_DTYPES.get(files[source].get_slice(source).get_dtype(), compute) for source in sources}
    narrow = stored.pop() if len(stored) == 1 else compute
    if device.ops.rounds_inputs:
        narrow = torch.bfloat16
    return narrow if device.ops.keeps(narrow, compute) else compute


def weight_bytes(model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: Device) -> int:
    """About the bytes that the weights take in memory, from the headers of the files. Raises ConfigError."""
    total = sum(path.stat().st_size for path in weight_files(model_dir))
    with ExitStack() as stack:
        files = open_checkpoint(model_dir, stack)
        for name, spec in plan_of_files(config, files).items():
            loaded = _loaded_dtype(name, spec, files, dtype, device)
            is_head = name == "embed" and config.tie_word_embeddings and not config.bidirectional
            for piece in spec.slices:
                numbers = math.prod(spec.checkpoint_shape(piece))
                if is_head and not device.ops.packs_tables:
                    total += numbers * loaded.itemsize  # the head is packed for its kernel
                if piece.source in files:
                    stored_bytes = files[piece.source].get_slice(piece.source).stored_bytes
                    total += numbers * loaded.itemsize - stored_bytes
                elif name.endswith("embed") and not device.ops.packs_tables:
                    total += numbers * loaded.itemsize  # it is widened
        total += sum(file.added_bytes for file in {*files.values()} if isinstance(file, GgufFile))
    return total


def open_checkpoint(
    model_dir: Path, stack: ExitStack, on_read: Callable[[int], None] = lambda count: None
) -> Files:
    """Reads only headers. on_read: as in SafetensorsFile. Raises ConfigError."""
    found: Files = {}
    paths = weight_files(model_dir)
    if paths[0].suffix == ".gguf":
        whole = stack.enter_context(GgufFile(paths[0], on_read))  # it finds the other parts
        return dict.fromkeys(whole.keys(), whole)
    for path in paths:
        file = stack.enter_context(SafetensorsFile(path, on_read))
        found.update(dict.fromkeys(file.keys(), file))
    return found


def plan_of_files(config: ModelConfig, files: Files) -> Plan:
    """The plan of this checkpoint, in which stacked experts may have either orientation. Reads headers."""
    plan = checkpoint_plan(config, files)
    if config.moe is None or not config.moe.either_way:
        return plan
    for name, spec in plan.items():
        turned, source = replace(spec, transposed=False), spec.slices[0].source
        if spec.transposed and source in files:
            found = tuple(files[source].get_slice(source).get_shape())
            plan[name] = turned if found == turned.checkpoint_shape(spec.slices[0]) else spec
    return plan


def check_names(
    files: Files, plan: Plan, config: ModelConfig, quant: QuantConfig | None, is_served: bool = True
) -> CheckpointWeights:
    """Raises ConfigError unless it has exactly the tensors of the plan, and can be quantised as asked.
    is_served: it is not converted.
    """
    stored = CheckpointWeights(config.quant, files.keys())
    sources = {piece.source for spec in plan.values() for piece in spec.slices}
    wanted = {name for source in sources for name in stored.names(source)}
    is_gguf = any(isinstance(file, GgufFile) for file in files.values())
    check_quant_request(quant, config.quant, wanted != sources, is_gguf, is_served)
    missing = sorted(wanted - files.keys())
    if missing:
        head = f"{FAMILIES[config.architecture].names(config).head}.weight"
        hint = "; where the head is the embedding, config.json must have tie_word_embeddings true"
        raise ConfigError(
            f"the checkpoint lacks {missing[0]} ({len(missing)} tensors missing)"
            + (hint if missing == [head] else "")
        )
    unused = unused_prefixes(config)
    rest = files.keys() - wanted
    unknown = {n for n in rest if not n.endswith(IGNORED_SUFFIXES) and not n.startswith(unused)}
    unknown = {  # not biases that the model does not have, if they are all zeros
        n
        for n in unknown
        if not stored.is_left_out(n) or (stored.is_spare_bias(n) and bool(files[n].get_tensor(n).any()))
    }
    if unknown:
        raise ConfigError(
            f"the checkpoint holds {min(unknown)}, which {config.architecture} with this config.json does "
            f"not use ({len(unknown)} such tensors)"
        )
    return stored


class _SpecRows:
    """The WeightRows of a plain weight, fused from slices and read on demand. dtype: after loading."""

    def __init__(self, spec: WeightSpec, files: Files, dtype: torch.dtype, device: Device) -> None:
        self._spec, self.dtype, self._device = spec, dtype, device.torch
        self._stored = [_checked(spec, piece, files) for piece in spec.slices]
        self.shape = spec.shape
        runs = all(piece.step == 1 and (spec.columns or not piece.experts) for piece in spec.slices)
        runs = runs and not (spec.columns and (spec.transposed or spec.all_columns))
        self.streams = runs and all(s.dtype == dtype for s in self._stored)

    def read(self, start: int, out: Tensor) -> None:
        """Rows [start, start + len(out)) into a contiguous CPU tensor, if `streams`. Thread-safe."""
        first, stop = 0, start + len(out)  # rows of the slice in the fused weight
        for piece, stored in zip(self._spec.slices, self._stored, strict=True):
            low, high = max(start, first), min(stop, first + piece.rows)
            if low < high:
                row = piece.expert * piece.total + piece.start + low - first
                stored.read_rows(row, out[low - start : high - start])
            first += piece.rows

    def whole(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if self.streams and made.device.type == "cpu":
            self.read(0, made)
            return made.add_(1) if self._spec.plus_one else made
        start = 0
        for piece, stored in zip(self._spec.slices, self._stored, strict=True):
            made[start : start + piece.rows].copy_(_plain_rows(self._spec, piece, stored))
            start += piece.rows
        return made.add_(1) if self._spec.plus_one else made


def _checked(spec: WeightSpec, piece: RowSlice, files: Files) -> FileTensor | PlainTensor:
    tensor, expected = files[piece.source].get_slice(piece.source), spec.checkpoint_shape(piece)
    if tuple(tensor.get_shape()) != expected:
        raise ConfigError(
            f"{piece.source} must be {expected} by config.json, got {tuple(tensor.get_shape())}"
        )
    if tensor.get_dtype() not in PLAIN_DTYPES:
        raise ConfigError(
            f"{piece.source} is stored as {tensor.get_dtype()}, and nothing says how; plain weights are "
            + ", ".join(PLAIN_DTYPES)
        )
    return tensor


def _plain_rows(spec: WeightSpec, piece: RowSlice, stored: FileTensor | PlainTensor) -> Tensor:
    if spec.columns and spec.transposed:
        first = piece.expert * (spec.all_columns or spec.columns) + spec.first_column
        rows = range(piece.places.start, min(piece.places.stop, piece.total))
        return stored.read_block(range(first, first + spec.columns), rows)[:, :: piece.step].T
    if not spec.columns and piece.experts:
        row = torch.empty((1, piece.total), dtype=stored.dtype)
        stored.read_rows(piece.expert, row)
        return row[0, piece.places]
    start = piece.expert * piece.total + piece.start
    if spec.columns:
        return stored.read_block(range(start, start + piece.rows), spec.column_range)
    vector = torch.empty(piece.rows, dtype=stored.dtype)
    stored.read_rows(start, vector)
    return vector


@dataclass(frozen=True)
class _WeightReader:
    """Reads and packs a plan's weights. quant: for plain linear layers. is_head: so is the embedding."""

    files: Files
    stored: CheckpointWeights
    dtype: torch.dtype
    device: Device
    quant: QuantConfig | None
    rounds_inputs: bool
    is_head: bool

    def read(self, name: str, spec: WeightSpec) -> Tensor | Weight:
        """A packed matrix or table, or a tensor. Raises ConfigError."""
        if any(self.stored.parts(piece.source) for piece in spec.slices):
            return self._read_quantised(name, spec)
        ops, routed = self.device.ops, ".expert." in name
        dtype = _loaded_dtype(name, spec, self.files, self.dtype, self.device)
        sources = [piece.source for piece in spec.slices]
        if self.quant and should_quantise(name, sources, self.quant):
            every = replace(spec, columns=spec.all_columns or spec.columns, first_column=0, all_columns=0)
            whole = _SpecRows(every, self.files, dtype, self.device).whole()
            with _naming(sources[0]):
                quantised = quantise(whole.to(self.dtype), self.quant).columns(spec.column_range)
            return ops.pack(quantised, routed)
        rows = _SpecRows(spec, self.files, dtype, self.device)
        if spec.is_matrix:
            return ops.pack_rows(rows, routed)
        if name.endswith("embed"):
            return ops.pack_table(rows, self.is_head and name == "embed")
        return rows.whole()

    def _read_quantised(self, name: str, spec: WeightSpec) -> Tensor | Weight:
        is_table = name.endswith("embed")
        if spec.is_matrix or is_table:
            packed = self._pack_blocks(spec)
            if packed is not None:
                return packed
        wide = torch.float32 if spec.wide or is_table else self.dtype
        pieces = self._pieces(spec, wide)
        if spec.is_matrix:
            return self.device.ops.pack(pieces, ".expert." in name)
        assert isinstance(pieces, QuantisedWeight)
        made = self.device.ops.pack_table(pieces, self.is_head) if is_table else pieces.wide()
        return made if isinstance(made, Panels) or spec.wide else made.to(self.dtype)

    def _pack_blocks(self, spec: WeightSpec) -> Weight | None:
        """Straight from a GGUF file's bytes. None if the device cannot, or for some columns only."""
        ops = self.device.ops
        if self.dtype != torch.float32 or spec.all_columns:
            return None
        rounds_inputs = self._rounds_inputs_of(spec)
        runs: list[tuple[str, list[Tensor]]] = []  # of slices of one type
        read: dict[str, tuple[str, Tensor]] = {}
        for piece in spec.slices:
            file = self.files.get(piece.source.removesuffix("weight") + PARTS["values"])
            found = read.get(piece.source)
            if found is None and isinstance(file, GgufFile):
                found = file.blocks(piece.source, ops.block_types)
            if found is None:
                return None
            read[piece.source] = kind, data = found
            inputs, size = block_sizes()[kind]
            if (len(data), data.shape[1] // size * inputs) != (piece.total, spec.columns):
                return None
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(data[piece.places])
        joined = [(kind, rows[0] if len(rows) == 1 else torch.cat(rows)) for kind, rows in runs]
        parts = [ops.pack_blocks(kind, rows, spec.columns, rounds_inputs) for kind, rows in joined]
        counts = tuple(sum(map(len, rows)) for _, rows in runs)
        return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts), counts)

    def _rounds_inputs_of(self, spec: WeightSpec) -> bool:
        modules = [piece.source.removesuffix(".weight") for piece in spec.slices]
        return self.rounds_inputs and (self.quant is None or all(map(self.quant.quantises, modules)))

    def _pieces(self, spec: WeightSpec, dtype: torch.dtype) -> Tensor | QuantisedWeight | StackedWeight:
        """The slices as one weight. Reads each source once and completely: some layouts interleave rows."""
        whole: dict[tuple[str, int], QuantisedWeight] = {}
        pieces: list[Tensor | QuantisedWeight] = []
        device, files = self.device.torch, self.files
        for piece in spec.slices:
            source, place = piece.source, (piece.source, piece.expert)
            if not self.stored.parts(source):
                pieces.append(_plain_rows(spec, piece, _checked(spec, piece, files)).to(device, dtype))
                continue
            if place not in whole:
                columns, expert = spec.all_columns or spec.columns, piece.expert if piece.experts else None
                found = read_quantised(source, piece.total, columns, files, self.stored, device, expert)
                whole[place] = replace(found.to(dtype), rounds_inputs=self._rounds_inputs_of(spec))
            rows = whole[place].rows(piece.places)
            with _naming(source):
                pieces.append(rows.columns(spec.column_range))
        return stack_weights(pieces)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source.removesuffix('.weight')}: {error}") from error


def read_quantised(
    source: str,
    rows: int,
    columns: int,
    files: Files,
    stored: CheckpointWeights,
    device: torch.device,
    expert: int | None = None,
) -> QuantisedWeight:
    """A quantised weight [rows, columns] of the checkpoint, or of one expert. Raises ConfigError."""

    def read(name: str) -> Tensor:
        file = files[name]
        if expert is None:
            return file.get_tensor(name).to(device)
        assert isinstance(file, SafetensorsFile), "experts of a GGUF file are separate tensors"
        return file.get_slice(name).of_expert(expert).to(device)

    found = stored.read(source, columns, read)
    if found.shape != (rows, columns):
        raise ConfigError(
            f"{source.removesuffix('.weight')} must be {(rows, columns)} by config.json, got {found.shape}"
        )
    return found

"""`manylora build`: writes a model directory with converted or quantised weights and recorded limits."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from manylora.checkpoints.quant.config import QuantConfig
from manylora.checkpoints.quant.layouts import PARTS
from manylora.config.engine import EngineConfig
from manylora.config.model import ModelConfig
from manylora.config.model_folder import INDEX
from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES
from manylora.model.plan_layers import STACKS, WeightSpec
from manylora.model.quant import is_linear, quantise, should_quantise
from manylora.model.weights import COMPUTE_DTYPES, check_names, open_checkpoint, plan_of_files, read_quantised
from manylora.version import __version__

DEFAULT_BATCH = EngineConfig.max_batch_size
SHARD_BYTES = 4 * 2**30
# Weights in other formats are not copied. All other files are: they may belong to the tokenizer.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
NOT_COPIED = ("config.json", "quantize_config.json", INDEX)
CPU = torch.device("cpu")
LARGEST_COPIED = 2**28


@dataclass(frozen=True)
class BuildPlan:
    """model_dir: a Hugging Face directory. dtype: of the weights; auto: the checkpoint's. limits: as in the
    build record; None: not recorded. lora: fields of LoraConfig. tp_size, pp_size: only recorded, as each
    rank reads its part of the one checkpoint.
    """

    model_dir: Path
    output_dir: Path
    dtype: str = "auto"
    quant: QuantConfig = field(default_factory=QuantConfig)
    limits: dict[str, int | None] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    tp_size: int = 1
    pp_size: int = 1


def build(plan: BuildPlan) -> str:
    """Returns what was written. Raises ConfigError. Writes config.json last: a part is no model."""
    model = read_model_config(plan.model_dir)
    _check_limits(plan, model)
    try:
        _prepare(plan)
        with ExitStack() as stack:
            writer = _Writer(plan.output_dir)
            built = _convert(plan, model, open_checkpoint(plan.model_dir, stack), writer)
            writer.close()
        for path in sorted(plan.model_dir.iterdir()):
            other = path.suffix not in WEIGHTS and not path.name.endswith(".index.json")
            small = path.is_file() and path.stat().st_size <= LARGEST_COPIED
            if other and small and path.name not in NOT_COPIED:
                shutil.copyfile(path, plan.output_dir / path.name)
        config = json.dumps(_config(plan, model), ensure_ascii=False, indent=2)
        (plan.output_dir / "config.json").write_text(config + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or plan.output_dir}: {error.strerror}") from error
    return built


def _check_limits(plan: BuildPlan, model: ModelConfig) -> None:
    for name, value in plan.limits.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    rows, batch = plan.limits.get("max_num_tokens"), plan.limits.get("max_batch_size") or DEFAULT_BATCH
    if rows is not None and rows < batch:
        raise ConfigError(f"--max_num_tokens must be at least --max_batch_size ({batch}), got {rows}")
    beams, longest = plan.limits.get("max_beam_width"), plan.limits.get("max_seq_len")
    if beams is not None and beams > batch:
        raise ConfigError(f"--max_beam_width must be at most --max_batch_size ({batch}), got {beams}")
    if longest is not None and longest > model.max_seq_len:
        raise ConfigError(f"--max_seq_len {longest} is more than the model's {model.max_seq_len} positions")
    prompt, most = plan.limits.get("max_input_len"), longest or model.max_seq_len
    if prompt is not None and prompt > most:
        raise ConfigError(f"--max_input_len must be at most --max_seq_len ({most}), got {prompt}")
    raw = json.loads((plan.model_dir / "config.json").read_text(encoding="utf-8"))
    if model.quant is not None and model.quant.method == "mxfp4":
        raise ConfigError(
            f"{plan.model_dir} holds MXFP4 experts, which are served as they are, without a build"
        )
    if "build_config" in raw:
        raise ConfigError(f"{plan.model_dir} was built already; build from the original directory")


def _prepare(plan: BuildPlan) -> None:
    """Create the output directory, or empty that of an earlier build. Raises ConfigError for others."""
    out = plan.output_dir
    out.mkdir(parents=True, exist_ok=True)
    config = out / "config.json"
    if config.exists():
        try:
            earlier = "build_config" in json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            earlier = False
        if not earlier:
            raise ConfigError(f"--output_dir {out} holds another model; name an empty directory")
        config.unlink()
    elif any(out.iterdir()) and not any(out.glob("model*.safetensors")):
        raise ConfigError(f"--output_dir {out} is not empty; name an empty directory")
    for path in (*out.glob("model*.safetensors"), out / INDEX):
        path.unlink(missing_ok=True)


def _convert(plan: BuildPlan, model: ModelConfig, files: dict[str, Any], writer: _Writer) -> str:
    specs = plan_of_files(model, files)
    sources = {piece.source for spec in specs.values() for piece in spec.slices}
    stored = check_names(files, specs, model, plan.quant, is_served=False)
    linears: set[str] = set()
    wanted: dict[str, WeightSpec] = {}  # sources to quantise; layers fused at load time together
    before = after = quantised = 0
    taken: set[str] = set()
    for name, spec in specs.items():
        of_spec = [piece.source for piece in spec.slices]
        if is_linear(name):
            linears.update(of_spec)
        if should_quantise(name, of_spec, plan.quant):
            wanted.update(dict.fromkeys(of_spec, spec))
        for piece in spec.slices:
            found = set(stored.parts(piece.source).values())
            if found and not found <= taken:
                weight = read_quantised(piece.source, piece.total, spec.columns, files, stored, CPU)
                if plan.dtype in COMPUTE_DTYPES:
                    weight = weight.to(COMPUTE_DTYPES[plan.dtype])
                after += writer.add_all(_fields(piece.source, weight))
                quantised += 1
                taken |= found
    if plan.quant.any_weights and not wanted:
        raise ConfigError("there is nothing to quantise: exclude_modules names every linear layer")
    for name, file in files.items():
        tensor = file.get_tensor(name)
        before += tensor.nbytes
        if name not in taken and (name in sources or not stored.is_left_out(name)):
            after += writer.add_all(_cast(name, tensor, wanted.get(name), plan, model))
    algo = plan.quant.quant_algo if model.quant is None else model.quant.algo
    summary = f"{plan.output_dir}: weights {before / 1e6:.1f} -> {after / 1e6:.1f} MB"
    if count := len(wanted) + quantised:
        summary += f", {count} of {len(linears)} linear layers in {algo}"
    return summary


def _cast(
    name: str, tensor: Tensor, spec: WeightSpec | None, plan: BuildPlan, model: ModelConfig
) -> dict[str, Tensor]:
    """The tensors to write for one of the checkpoint's. spec: of its weight, when it is to be quantised."""
    dtype = COMPUTE_DTYPES.get(plan.dtype)
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if spec is None:
        return {name: tensor}
    if tensor.dim() == 2:
        matrices = {name: tensor.T if spec.transposed else tensor}
    else:  # of all experts
        names = FAMILIES[model.architecture].names(model)
        end = next(one for pair in STACKS for one in pair if name.endswith(one))
        block = name.removesuffix(end)
        if spec.transposed or not block.endswith(f"{names.sparse}."):
            hint = "" if spec.transposed else "save the model with save_original_format=True, or "
            raise ConfigError(
                f"{name} holds all experts of a layer as transformers has them in memory: {hint}quantise it "
                "when it is served, with quant_algo"
            )
        # The stack is [gate; up].
        parts = names.expert_up_gate[::-1] if len(spec.slices) == 2 else (names.expert_down,)
        matrices = {
            f"{block}experts.{number}.{part}.weight": rows
            for number, matrix in enumerate(tensor)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
        }
    made: dict[str, Tensor] = {}
    for part, matrix in matrices.items():
        made |= _fields(part, quantise(matrix, plan.quant))
    return made


def _fields(name: str, weight: QuantisedWeight) -> dict[str, Tensor]:
    stem = name.removesuffix("weight")
    return {stem + PARTS[field]: value for field, value in weight.tensors().items()}


class _Writer:
    """Writes tensors to files of at most SHARD_BYTES, with an index if there are several."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []

    def add_all(self, tensors: dict[str, Tensor]) -> int:
        """Returns the size in bytes."""
        for name, tensor in tensors.items():
            if self._open and self._bytes + tensor.nbytes > SHARD_BYTES:
                self._flush()
            self._open[name] = tensor.contiguous()
            self._bytes += tensor.nbytes
        return sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        self._flush()
        count = len(self._shards)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        places: dict[str, str] = {}
        for (path, tensors), name in zip(self._shards, names, strict=True):
            path.rename(self._directory / name)
            places.update(dict.fromkeys(tensors, name))
        if count > 1:
            index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
            (self._directory / INDEX).write_text(index + "\n", encoding="utf-8")

    def _flush(self) -> None:
        path = self._directory / f"model-part-{len(self._shards)}.safetensors"
        try:
            save_file(self._open, path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for example
            raise ConfigError(f"{self._directory} cannot be written: {error}") from error
        path.chmod(0o644)  # created readable only by its owner
        self._shards.append((path, list(self._open)))
        self._open, self._bytes = {}, 0


def _config(plan: BuildPlan, model: ModelConfig) -> dict[str, Any]:
    raw = json.loads((plan.model_dir / "config.json").read_text(encoding="utf-8"))
    dtype = model.dtype if plan.dtype == "auto" else plan.dtype
    raw.pop("torch_dtype", None)
    raw.pop("quantization_config", None)  # the tensors are in our own format now
    quantization = plan.quant.to_dict()
    if model.quant is not None:
        quantization["quant_algo"] = model.quant.algo
    return {
        **raw,
        "dtype": dtype,
        "version": __version__,
        "pretrained_config": {
            "architecture": model.architecture,
            "dtype": dtype,
            "quantization": quantization,
            "mapping": {
                "world_size": plan.tp_size * plan.pp_size,
                "tp_size": plan.tp_size,
                "pp_size": plan.pp_size,
            },
        },
        "build_config": {**plan.limits, "lora_config": plan.lora or {}},
    }

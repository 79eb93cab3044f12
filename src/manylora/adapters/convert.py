"""Converts adapters of any format to request tensors in a storage type, a .nemo archive to the files of
TensorRT-LLM's runtimes, and DoRA magnitudes to normalised ones. Implements tools/*.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.nemo import MODULE, nemo_key, nemo_num_layers, nemo_tensors, read_nemo
from manylora.adapters.formats.npy import write_npy
from manylora.adapters.formats.peft.experts import normalised_magnitude
from manylora.adapters.formats.peft.names import LORA_NAMES, is_extra
from manylora.adapters.formats.peft.settings import (
    CONFIG,
    NORMALIZED,
    config_of,
    is_plain_lora,
    read_settings,
)
from manylora.adapters.formats.peft_folder import peft_tensors, read_peft
from manylora.adapters.formats.pickled import write_torch
from manylora.adapters.formats.read_options import DEFAULT, ReadOptions
from manylora.adapters.formats.sources import find_source, read_source, source_dtype
from manylora.adapters.formats.tensor_files import decode, encode, write_safetensors
from manylora.adapters.modules import MODULE_NAMES, LoraModule, LoraModuleId, Split, module_name
from manylora.adapters.number_types import BY_SAFETENSORS, is_bfloat16, narrow_to_bfloat16, widen_bfloat16
from manylora.adapters.rules import check_shapes
from manylora.adapters.tensors import check_dims, pack_rows
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.row_format import Encoding
from manylora.request import LoraInput

MODEL_CONFIG = "config.json"
STORAGE_TYPES = ("float32", "float16", "bfloat16")
ALLOW_BIN = "without effect: adapter_model.bin is read too"
ADAPTER = MODULE.rpartition(".")[2]
STEM = "adapter_model"


def normalize_dora(in_dir: Path, base_model: Path, out_dir: Path, *, strip: bool = False) -> int:
    """Write a PEFT directory with normalised magnitudes, or, with `strip`, without. The weights keep their
    file format and types, except magnitudes in 8 bits, which become float32. Returns the number of
    magnitudes. Raises AdapterInvalidError, OSError.
    """
    suffix = _suffix(in_dir, STEM)
    _suffix(base_model, "model")
    settings = read_settings(in_dir)
    if not is_plain_lora(settings):
        raise AdapterInvalidError(f"{CONFIG} describes no plain LORA, which this is for")
    config = config_of(settings)
    if config.dora_normalized:
        raise AdapterInvalidError(f"{CONFIG} sets {NORMALIZED}: the magnitudes are normalised already")
    tensors = peft_tensors(in_dir, ReadOptions(allow_bin=True))
    magnitudes = {}  # by name: the path of the linear layer
    for key in tensors:
        found = LORA_NAMES.find(key)
        if found is None and (not is_extra(key) or "magnitude" in key):
            raise AdapterInvalidError(f"Encountered unknown weight: {key}")
        if found is not None and found.part is None:  # those of embedding and head are copied, too
            magnitudes[key] = found.path
    if strip:
        changed = {key: tensor for key, tensor in tensors.items() if key not in magnitudes}
    else:
        changed = dict(tensors)
        with BaseWeights(base_model).open() as base:
            for key, path in magnitudes.items():
                names = [f"{path}.lora_{side}.weight" for side in "AB"]
                for name in names:
                    if name not in tensors:
                        lacking = name.removeprefix(path + ".")
                        raise AdapterInvalidError(f"{path} has a DoRA magnitude, but no {lacking}")
                a, b = (decode(name, tensors[name]) for name in names)
                check_dims(path, a.shape, b.shape, None)
                b = b * np.float32(config.scale(path, a.shape[0]))
                dtype, magnitude = tensors[key].dtype, decode(key, tensors[key])
                normal = normalised_magnitude(path, magnitude, a, b, config, base, config.fan_in_fan_out)
                assert normal is not None, "it has a magnitude"
                coarse = dtype in BY_SAFETENSORS and BY_SAFETENSORS[dtype].encoding is not Encoding.PLAIN
                changed[key] = encode(key, normal.reshape(magnitude.shape), "F32" if coarse else dtype)
    if not changed:
        raise AdapterInvalidError("the adapter holds no LoRA matrices")
    settings.update({"use_dora": False} if strip else {NORMALIZED: True})
    write = write_safetensors if suffix == ".safetensors" else write_torch
    write(out_dir / f"{STEM}{suffix}", changed)
    (out_dir / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(magnitudes)


def _suffix(folder: Path, stem: str) -> str:
    if not folder.is_dir():
        raise AdapterInvalidError(f"{folder} is not a valid model directory: not found")
    for suffix in (".safetensors", ".bin"):
        if (folder / f"{stem}{suffix}").is_file() or (folder / f"{stem}{suffix}.index.json").is_file():
            return suffix
    raise AdapterInvalidError(f"{folder} does not contain .safetensors or .bin weights")


def find_model_config(adapter: Path, base: Path | None) -> Path | None:
    """config.json of the base model: in `base` if it is given; otherwise beside the adapter, or in the
    directory that adapter_config.json names as the base. None: there is none."""
    folders = [adapter] if base is None else [base]
    if base is None:
        with suppress(AttributeError, OSError, ValueError, RecursionError):  # its reader says what is wrong
            named = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
            if isinstance(named, str) and named and "\0" not in named:
                folders.append(Path(named))
    return next((file for folder in folders if (file := folder / MODEL_CONFIG).is_file()), None)


def read_fused_rows(file: Path) -> dict[int, LoraModule]:
    """attn_qkv of a model that stores q, k, v in groups of heads, by its id; empty for other models.

    file: config.json of a Falcon, GPT-NeoX, Bloom or InternLM 2 model. Raises AdapterInvalidError.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        kind = raw.get("model_type")
        if kind not in ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_neox", "bloom", "internlm2"):
            return {}
        heads = kv_heads = int(raw.get("n_head") or raw["num_attention_heads"])  # groups have a key head each
        if kind == "internlm2":
            kv_heads = int(raw.get("num_key_value_heads") or heads)
        elif kind not in ("gpt_neox", "bloom"):
            if raw.get("new_decoder_architecture", kind == "RefinedWeb"):
                kv_heads = int(raw.get("num_kv_heads") or raw.get("n_head_kv") or heads)
            elif raw.get("multi_query", True):
                kv_heads = 1
        hidden = int(raw.get("n_embed") or raw["hidden_size"])
        size = hidden // heads
        if hidden % heads or heads % kv_heads:
            raise ValueError(f"{heads} heads of {hidden} and {kv_heads} key heads")
    except KeyError as error:
        raise AdapterInvalidError(f"{file.name} of the base model lacks {error}") from error
    except (AttributeError, OSError, TypeError, ValueError, RecursionError) as error:
        raise AdapterInvalidError(f"{file.name} of the base model cannot be read: {error}") from error
    parts = (hidden, kv_heads * size, kv_heads * size)
    fused = LoraModuleId.ATTN_QKV
    return {fused: LoraModule(fused, hidden, sum(parts), Split.B_ROWS, parts=parts, groups=kv_heads)}


def convert_source(
    path: Path,
    storage_type: str | None = None,
    options: ReadOptions = DEFAULT,
    invocation: list[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] int32 of an adapter from any source. storage_type:
    None keeps the source's, or bfloat16 for 8-bit numbers; bfloat16 is 2-byte void. invocation: as in
    `take_invocation`. Raises AdapterInvalidError.
    """
    source = find_source(Path(path))
    weights, config = read_source(source, replace(options, float8=False, allow_bin=True), invocation)
    for module_id, layer, rank, *_ in check_shapes(LoraInput(0, weights, config))[1].tolist():
        if not 0 <= module_id < len(MODULE_NAMES):
            raise AdapterInvalidError(f"lora module {module_name(module_id)} is not known")
        if layer < 0 or rank <= 0:
            raise AdapterInvalidError(f"Expected adapterSize to be > 0, got {rank} in layer {layer}")
    kind = source_dtype(source, replace(options, allow_bin=True))
    # The scaling is folded into B here, for which 8-bit encodings have too few bits.
    storage_type = storage_type or (kind if kind in STORAGE_TYPES else "bfloat16")
    return store_as(weights, config, storage_type), config


def convert_peft(
    folder: Path,
    storage_type: str = "float16",
    partial: list[str] | None = None,
    *,
    invocation: list[int] | None = None,
    base: BaseWeights | None = None,
    text_only: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in the storage type (bfloat16 as 2-byte void) and config [1, rows, 4] int32.

    partial, base, text_only: as in `ReadOptions`. invocation: as in `take_invocation`. The rows of a fused
    query_key_value are ordered by config.json of base, of the adapter's own directory, or of the base model
    that its settings name if that is a directory. Raises AdapterInvalidError.
    """
    file = find_model_config(Path(folder), base.model_dir if base else None)
    modules = read_fused_rows(file) if file else {}
    options = ReadOptions(modules or None, base, allow_bin=True, text_only=text_only, partial=partial)
    weights, config = read_peft(Path(folder), options, invocation)
    return store_as(weights, config, storage_type), config


def store_as(weights: np.ndarray, config: np.ndarray, storage_type: str) -> np.ndarray:
    """Convert weights [1, rows, W] to another type. Raises AdapterInvalidError for a row not finite in it."""
    values = widen_bfloat16(weights) if is_bfloat16(weights.dtype) else weights
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if storage_type == "bfloat16" else values.astype(storage_type)
    read = widen_bfloat16(stored) if storage_type == "bfloat16" else stored
    finite = np.isfinite(read[0]).all(axis=1)
    if not finite.all():
        module_id, layer = config[0, int(finite.argmin()), :2]
        raise AdapterInvalidError(
            f"{module_name(module_id)} of layer {layer} is not finite in {storage_type}"
        )
    return stored


def base_weights(path: Path | None) -> BaseWeights | None:
    """Weights of the model given by --base. Raises ConfigError if there is none."""
    if path is not None and not path.is_dir():
        raise ConfigError(f"the model directory {path}, which --base names, does not exist")
    return None if path is None else BaseWeights(path)


def main(arguments: list[str] | None = None) -> int:
    text = "Convert a PEFT LoRA adapter to lora_weights and lora_config."
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--in-file", "-i", type=Path, required=True, help="adapter directory")
    parser.add_argument("--out-dir", "-o", type=Path, required=True, help="where the two .npy files go")
    parser.add_argument("--storage-type", default="float16", choices=STORAGE_TYPES)
    parser.add_argument("--verbose", action="store_true", help="print every row")
    parser.add_argument(
        "--allow-partial", action="store_true", help="leave out what cannot be converted, printing each part"
    )
    parser.add_argument(
        "--base-model", "--base", "-b", type=Path,
        help="model directory: normalises DoRA, orders the rows of query_key_value",
    )  # fmt: skip
    parser.add_argument("--allow-bin", action="store_true", help=ALLOW_BIN)
    parser.add_argument("--lora-text-only", action="store_true", help="leave out a vision part")
    options = parser.parse_args(arguments)
    partial: list[str] | None = [] if options.allow_partial else None
    invocation: list[int] = []
    try:
        base, text_only = base_weights(options.base_model), options.lora_text_only
        given = options.in_file, options.storage_type, partial
        weights, config = convert_peft(*given, invocation=invocation, base=base, text_only=text_only)
    except AdapterInvalidError as error:
        print(f"{options.in_file}: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for line in partial or ():
        print(line)
    if options.verbose:
        for module_id, layer, rank, _ in config[0]:
            print(f"layer {layer} {module_name(module_id)} rank {rank}")
    try:
        write_npy(options.out_dir, weights, config, tuple(invocation))
    except OSError as error:
        print(f"{options.out_dir} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def write_runtime_tensors(archive: Path, out_dir: Path, storage_type: str) -> list[tuple[int, int]]:
    """The .npy pair: weights [1, layers, r * (in + out)] without padding, config [1, layers, 3].

    Returns (layer, rank) of each row. Raises AdapterInvalidError, also if a layer of model_config.yaml is
    missing or rows differ in size, and OSError.
    """
    rows = read_nemo(archive)
    expected = nemo_num_layers(archive)
    if [row.layer for row in rows] != list(range(expected)):
        raise AdapterInvalidError(
            f"{archive.name} adapts {len(rows)} layers up to {rows[-1].layer}, num_layers is {expected}"
        )
    if len({row.payload.size for row in rows}) > 1:
        raise AdapterInvalidError(f"{archive.name}: the adapter must have the same size in every layer")
    weights, config = pack_rows(rows)
    write_npy(out_dir, store_as(weights, config, storage_type), config[:, :, :3])
    return [(row.layer, row.format.rank) for row in rows]


def write_transposed(archive: Path, out_dir: Path, storage_type: str, key: str) -> list[tuple[int, int]]:
    """The older form: per layer two raw files model.<name>.bin with the transposed matrices, and
    lora_weights.json. key: its customization id. Returns (layer, rank) of each pair. Raises
    AdapterInvalidError, OSError.
    """
    rows = read_nemo(archive)  # checks that every pair is complete
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, tensor in nemo_tensors(archive).items():
        layer, _ = nemo_key(name)
        if "/" in name or "\0" in name or len(name) > 200:  # it becomes a file's name
            raise AdapterInvalidError(f"{name[:80]} cannot be the name of a file")
        transposed = decode(name, tensor).T
        place = np.array([[[LoraModuleId.ATTN_QKV, layer]] * len(transposed)])  # for error messages
        stored = store_as(transposed[None], place, storage_type)
        file = out_dir / f"model.{name.replace(ADAPTER, f'{ADAPTER}.0')}.bin"  # with the adapter's number
        file.write_bytes(stored.tobytes())
    lora = {
        "lora_kqv_adapter": {"0": {"key": key, "low_rank": rows[0].format.rank}},
        "precision": storage_type,
    }
    (out_dir / "lora_weights.json").write_text(json.dumps({"lora_config": lora}, indent=2) + "\n")
    return [(row.layer, row.format.rank) for row in rows]

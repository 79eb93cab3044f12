"""The dense layers that sentence-transformers applies after pooling, in separate folders."""

from __future__ import annotations

from pathlib import Path

import torch

from manylora.config.blocks import HeadLayerConfig
from manylora.config.pooling import read_dense_modules
from manylora.errors import ConfigError
from manylora.gguf.file import GgufFile
from manylora.gguf.folder import linked_files
from manylora.model.heads import HeadLayer
from manylora.model.safetensors_file import SafetensorsFile

FILE = "model.safetensors"


def load_dense(folder: Path, hidden_size: int, device: torch.device) -> tuple[HeadLayer, ...]:
    """In float32. Raises ConfigError for a file that is missing or has another shape."""
    layers, size = [], hidden_size
    for one in read_dense_modules(folder):
        path, stem = one.folder / FILE, "linear"
        if linked_files(folder):  # a GGUF file has them beside the model
            path, stem = linked_files(folder)[0], f"{one.folder.name}.linear"
        elif not path.is_file():
            raise ConfigError(f"{path} is missing: save the model as safetensors, as others are not read")
        shapes: dict[str, tuple[int, ...]] = {f"{stem}.weight": (one.outputs, one.inputs)}
        if one.biased:
            shapes[f"{stem}.bias"] = (one.outputs,)
        if one.inputs != size:
            raise ConfigError(f"{one.folder / 'config.json'}: in_features {one.inputs} must be {size}")
        found = []
        with GgufFile(path) if path.suffix == ".gguf" else SafetensorsFile(path) as file:
            names = set(file.keys())
            for name, shape in shapes.items():
                if name not in names:
                    raise ConfigError(f"{path} lacks {name}")
                tensor = file.get_tensor(name).to(device, torch.float32)
                if tuple(tensor.shape) != shape:
                    raise ConfigError(f"{path}: {name} is {tuple(tensor.shape)}, not {shape}")
                found.append(tensor)
        size, config = one.outputs, HeadLayerConfig(one.activation, one.biased)
        layers.append(HeadLayer(config, found[0], found[1] if one.biased else None))
    return tuple(layers)

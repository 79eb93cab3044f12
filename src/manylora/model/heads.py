"""Classification heads, and the dense layers that sentence-transformers applies after pooling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.adapters.extras import HEAD
from manylora.checkpoints.gguf.config import linked_files
from manylora.checkpoints.gguf.file import GgufFile
from manylora.config.blocks import HeadLayerConfig
from manylora.config.pooling import read_dense_modules
from manylora.errors import ConfigError
from manylora.kernels.reference import ACTIVATIONS
from manylora.kernels.spec import Extra
from manylora.model.safetensors_file import SafetensorsFile

# A head's weights have the same names in the model's weights as in extras.


@dataclass(frozen=True)
class HeadLayer:
    """The layer before a single-layer head, as in `HeadLayerConfig`. norm: weight, bias and eps."""

    config: HeadLayerConfig
    weight: Tensor
    bias: Tensor | None = None
    norm: tuple[Tensor, Tensor | None, float] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, hidden] -> [P, hidden]."""
        x = _activate(F.linear(x, self.weight, self.bias), self.config.activation)
        return x if self.norm is None else F.layer_norm(x, x.shape[-1:], *self.norm)


@dataclass(frozen=True)
class ClassificationHead:
    """weight [labels, n], bias [labels]. dense: weight and bias of a layer before it. activation: its."""

    weight: Tensor
    bias: Tensor | None = None
    dense: tuple[Tensor, Tensor | None] | None = None
    activation: str = "tanh"

    @classmethod
    def of_weights(cls, weights: Mapping[str, Tensor], activation: str) -> ClassificationHead | None:
        """From a model's weights, by our names. None: it has no head."""
        if f"{HEAD}.weight" not in weights:
            return None
        dense = weights.get(f"{HEAD}.dense.weight")
        first = None if dense is None else (dense, weights.get(f"{HEAD}.dense.bias"))
        return cls(weights[f"{HEAD}.weight"], weights.get(f"{HEAD}.bias"), first, activation)

    @classmethod
    def of_extras(cls, extras: Mapping[str, Extra], activation: str) -> ClassificationHead | None:
        """From an adapter's extras. None: it has no head of its own."""
        found = {name: one for name, one in extras.items() if name.startswith(f"{HEAD}.")}
        return cls.of_weights({name: _values(name, one) for name, one in found.items()}, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [P, n] -> [P, labels] float32."""
        if self.dense is not None:
            x = _activate(_linear(x, *self.dense), self.activation)
        return _linear(x, self.weight, self.bias).float()


def _activate(x: Tensor, name: str) -> Tensor:
    if not name:
        return x
    return torch.tanh(x) if name == "tanh" else ACTIVATIONS[name](x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _values(name: str, extra: Extra) -> Tensor:
    whole = extra.pieces[0] if len(extra.pieces) == 1 else torch.cat(extra.pieces)
    return whole.reshape(-1) if name.endswith(".bias") else whole


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

"""BaseWeights: the base model's checkpoint, for adapters that are relative to it: the row norms that DoRA's
magnitudes are divided by, trained biases, and copies of embeddings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.adapters.formats import one_line
from manylora.adapters.formats.tensor_files import TORCH_NAMES, RawTensor
from manylora.checkpoints.gguf.config import linked_files
from manylora.checkpoints.quant.config import checkpoint_quant
from manylora.config.model_folder import WEIGHTS, indexed_files
from manylora.errors import AdapterInvalidError, ConfigError

if TYPE_CHECKING:  # torch only when something is read
    from torch import Tensor

    from manylora.checkpoints.quant.layouts import CheckpointWeights
    from manylora.kernels.quantised import QuantisedWeight

    Hold = Callable[[str, Collection[str], Tensor | QuantisedWeight], Tensor | QuantisedWeight]
    """How a server holds a weight of its checkpoint: its name, the names of all tensors there, some rows as
    they are stored -> those rows as they are held."""

# Where the name of a layer starts, or of a stack of layers where there are two.
LAYER = re.compile(r"(?=(?:^|(?<=\.))(?:(?:encoder|decoder)\.|(?:layers?|block|h)\.\d))")
OUTSIDE = re.compile(r"(?:^|.*\.)([^.\d][^.]*(?:\.\d+)?\.[^.]+)")  # module, its number, tensor
CHUNK = 2**22  # elements of a base weight in memory at one time
QUANTISED = "quantised"
FLOATING = ("F64", "F32", "F16", "BF16", QUANTISED)  # the meaning of whose numbers is known
PACKED = re.compile(r"(?<=\.)(?:qweight|weight_packed)$")  # a tensor that only quantised weights have


@dataclass(frozen=True)
class BaseWeights:
    """A Hugging Face model directory. Nothing is read before `open`. Thread-safe.

    hold: converts linear layers as the server holds them, so that DoRA's norms are those of the weights it
    multiplies with; None: as they are stored, in float32.
    """

    model_dir: Path
    hold: Hold | None = None

    def open(self) -> BaseReader:
        return BaseReader(Path(self.model_dir), self.hold)


class BaseReader(ExitStack):
    """Reads tensors of a base model. Its files are opened when the first tensor is asked for."""

    def __init__(self, model_dir: Path, hold: Hold | None = None) -> None:
        super().__init__()
        self._model_dir, self._hold = model_dir, hold
        self._files: dict[str, Any] | None = None
        self._names: set[str] = set()
        self._stored: CheckpointWeights | None = None

    def row_norms(self, path: str, a: np.ndarray, b: np.ndarray, transposed: bool = False) -> np.ndarray:
        """Norms [out] of the rows of W0 + B A in float32, for the module at `path` of a PEFT adapter.

        a: [rank, in]. b: [out, rank], with the scaling folded in. transposed: an unquantised W0 is stored
        [in, out], as GPT-2's Conv1D does. W0 is what the layer multiplies with; a quantised one is
        dequantised, a few rows at a time. Raises AdapterInvalidError when the base has no such weight, one of
        another shape, or a row of norm 0.
        """
        import torch

        out_dim, in_dim = len(b), a.shape[1]
        weight = self._linear(path, in_dim, out_dim, transposed)
        norms = torch.empty(out_dim)
        step = max(1, CHUNK // in_dim)
        low, high = torch.from_numpy(a), torch.from_numpy(b)
        for start in range(0, out_dim, step):
            rows = slice(start, min(start + step, out_dim))
            merged = torch.addmm(weight.rows(rows), high[rows], low)
            norms[rows] = torch.linalg.vector_norm(merged, dim=1)
        if not bool((torch.isfinite(norms) & (norms > 0)).all()):
            raise AdapterInvalidError(
                f"{path}: a row of the base weight plus its update has norm 0 or is not finite"
            )
        return norms.numpy()

    def weight(self, path: str, in_dim: int, out_dim: int, transposed: bool = False) -> Tensor:
        """The weight [out, in] in float32, with the arguments and errors of `row_norms`."""
        return self._linear(path, in_dim, out_dim, transposed).rows(slice(0, out_dim))

    def _linear(self, path: str, in_dim: int, out_dim: int, transposed: bool) -> BaseMatrix:
        name = self.find(f"{path}.weight")
        if name is None:
            wanted = path.removeprefix("base_model.model.") + ".weight"
            raise AdapterInvalidError(
                f"{path}: the base model has no {wanted}, which the adapter is relative to"
            )
        weight = self._matrix(name, in_dim, transposed)
        flipped = transposed and weight.dtype != QUANTISED
        expected = [in_dim, out_dim] if flipped else [out_dim, in_dim]
        if weight.shape != expected or weight.dtype not in FLOATING:
            raise AdapterInvalidError(
                f"{path} is {weight.dtype} {weight.shape} in the base model, the adapter needs a floating "
                f"{expected}"
            )
        return weight

    def names(self) -> set[str]:
        """The names of its tensors, as `find` returns them. Raises AdapterInvalidError."""
        self._all()
        return self._names

    def find(self, key: str) -> str | None:
        """The checkpoint's name of the tensor that PEFT calls `key`. If there is none of that name, the only
        one with the same layer and module, or, outside layers, of the same module. None: no such tensor.

        A quantised weight has the name that it would have unquantised. Raises AdapterInvalidError.
        """
        self._all()
        name = key.removeprefix("base_model.model.")
        if name in self._names:
            return name
        parts = LAYER.split(name, maxsplit=1)
        outside = OUTSIDE.fullmatch(name)
        tail = parts[1] if len(parts) > 1 else outside[1] if outside else name
        # A multimodal checkpoint has layers of these names in its vision tower too.
        text = [other for other in self._names if "vision" not in other]
        same = [other for other in text if other.endswith(f".{tail}") or other == tail]
        same = [other for other in same if len(parts) > 1 or not LAYER.search(other)]
        return same[0] if len(same) == 1 else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that `find` returned. Of quantised weights, only that of a head is known."""
        files = self._all()
        if name in files:
            return tuple(files[name].get_slice(name).get_shape())
        raw = self.settings
        return tuple(self._matrix(name, int(raw.get("hidden_size") or raw.get("d_model") or 0)).shape)

    def read(self, name: str) -> np.ndarray:
        """A small tensor that `find` returned, in float32."""
        return self._all()[name].get_tensor(name).float().numpy()

    def holds(self, name: str, copy: RawTensor) -> bool:
        """Whether a tensor that `find` returned has the same values as this copy, in the copy's type."""
        import torch

        if copy.dtype not in TORCH_NAMES or len(copy.shape) != 2 or self.shape(name) != copy.shape:
            return False
        kind: torch.dtype = getattr(torch, TORCH_NAMES[copy.dtype])
        stored = self._matrix(name, copy.shape[1])
        rows, columns = copy.shape
        width, step = columns * kind.itemsize, max(1, CHUNK // columns)
        for first in range(0, rows, step):
            part = bytearray(copy.part(first * width, step * width))
            theirs = torch.frombuffer(part, dtype=kind).view(-1, columns)
            ours = stored.values(slice(first, first + step)).to(kind)
            if kind.itemsize == 1:  # which torch does not compare
                ours, theirs = ours.float(), theirs.float()
            if not torch.equal(ours, theirs):
                return False
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """Its config.json. Raises AdapterInvalidError."""
        path = self._model_dir / "config.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise AdapterInvalidError(
                f"the base model's config.json cannot be read for this adapter: {one_line(error)}"
            ) from error

    def _matrix(self, name: str, columns: int, transposed: bool = False) -> BaseMatrix:
        """name: one that `find` returned. columns: number of inputs. transposed: stored as [in, out]."""
        from manylora.checkpoints.quant.layouts import CheckpointWeights

        files = self._all()
        hold = (lambda part: part) if self._hold is None else partial(self._hold, name, files.keys())
        try:
            if self._stored is None:
                quant = checkpoint_quant(self.settings, self._model_dir)
                self._stored = CheckpointWeights(quant, files.keys())
            if self._stored.parts(name):
                found = self._stored.read(name, columns, lambda part: files[part].get_tensor(part))
                return BaseMatrix(QUANTISED, list(found.shape), found.rows, hold)
        except ConfigError as error:
            raise AdapterInvalidError(
                f"the base model's quantised {name} cannot be read as a weight of {columns} inputs: {error}"
            ) from error
        plain = files[name].get_slice(name)
        read = (lambda rows: plain[:, rows].T.contiguous()) if transposed else plain.__getitem__
        return BaseMatrix(plain.get_dtype(), list(plain.get_shape()), read, hold)

    def _all(self) -> dict[str, Any]:
        """The open files by the names of their tensors."""
        if self._files is not None:
            return self._files
        try:
            found: dict[str, Any] = {}
            if linked := linked_files(self._model_dir):
                from manylora.checkpoints.gguf.file import GgufFile

                gguf = self.enter_context(GgufFile(linked[0]))
                found.update(dict.fromkeys(gguf.keys(), gguf))
            for name in [] if linked else indexed_files(self._model_dir) or [WEIGHTS]:
                from safetensors import safe_open  # as in safetensors_file.py

                file = self.enter_context(safe_open(self._model_dir / name, framework="pt"))
                found.update(dict.fromkeys(file.keys(), file))
        except Exception as error:  # safetensors has no common class for all it raises
            reason = one_line(error).replace(f"{self._model_dir}/", "")  # a client may read it
            raise AdapterInvalidError(
                f"the base model's weights cannot be read for this adapter: {reason}"
            ) from error
        self._files, self._names = found, {PACKED.sub("weight", name) for name in found}
        return found


@dataclass(frozen=True)
class BaseMatrix:
    """A weight [out, in] of a checkpoint. Rows are read when they are asked for. A quantised weight is read
    whole and stays in memory, quantised, as long as this object.

    stored: reads some rows. hold: makes of these what the server holds.
    """

    dtype: str
    shape: list[int]
    stored: Callable[[slice], Tensor | QuantisedWeight]
    hold: Callable[[Tensor | QuantisedWeight], Tensor | QuantisedWeight]

    def rows(self, rows: slice) -> Tensor:
        """[rows, in] in float32, as the layer multiplies with them."""
        return _wide(self.hold(self.stored(rows))).float()

    def values(self, rows: slice) -> Tensor:
        """[rows, in] as they are stored; quantised weights in float32."""
        return _wide(self.stored(rows))


def _wide(weight: Tensor | QuantisedWeight) -> Tensor:
    """A dequantised weight is float32, so that of integers or 8-bit floats only the product with the scale is
    rounded."""
    import torch

    return weight if isinstance(weight, torch.Tensor) else weight.to(torch.float32).wide()

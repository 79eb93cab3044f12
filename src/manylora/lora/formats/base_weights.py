"""BaseWeights: the base model's checkpoint, read for what an adapter on disk is relative to: the norms that
DoRA's magnitudes are divided by, trained biases, copies of embeddings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from manylora.errors import AdapterInvalidError
from manylora.lora.formats import one_line
from manylora.lora.formats.tensor_files import RawTensor

__all__ = ["BaseReader", "BaseWeights"]

INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(?=(?:^|(?<=\.))(?:layers|block|h)\.\d)")  # where the name of a layer starts
CHUNK = 2**22  # elements of a base weight in memory at one time
DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class BaseWeights:
    """A Hugging Face model directory. Nothing is read before `open`; safe from any thread."""

    model_dir: Path

    @contextmanager
    def open(self) -> Iterator[BaseReader]:
        with ExitStack() as stack:
            yield BaseReader(Path(self.model_dir), stack)


class BaseReader:
    """Open files of a base model; they are opened when the first tensor is asked for."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._model_dir, self._stack = model_dir, stack
        self._files: dict[str, Any] | None = None

    def row_norms(self, path: str, a: np.ndarray, b: np.ndarray, transposed: bool = False) -> np.ndarray:
        """Norms [out] of the rows of W0 + B A, float32, at the module `path` of a PEFT adapter.

        a [rank, in], b [out, rank] with the scaling in it; transposed: W0 is stored [in, out] (Conv1D of
        GPT-2). W0 is read some rows at a time. Raises
        AdapterInvalidError when the base has no such weight, another shape there, or a row of norm 0.
        """
        import torch

        weight = self._open_slice(path)
        out_dim, in_dim = len(b), a.shape[1]
        expected = [in_dim, out_dim] if transposed else [out_dim, in_dim]
        if list(weight.get_shape()) != expected or weight.get_dtype() not in DTYPES:
            raise AdapterInvalidError(
                f"{path} is {weight.get_dtype()} {weight.get_shape()} in the base model, the adapter needs a "
                f"floating {expected}"
            )
        norms = torch.empty(out_dim)
        step = max(1, CHUNK // in_dim)
        low, high = torch.from_numpy(a), torch.from_numpy(b)
        for start in range(0, out_dim, step):
            rows = slice(start, min(start + step, out_dim))
            stored = weight[:, rows].T if transposed else weight[rows]
            merged = torch.addmm(stored.float(), high[rows], low)
            norms[rows] = torch.linalg.vector_norm(merged, dim=1)
        if not bool((torch.isfinite(norms) & (norms > 0)).all()):
            raise AdapterInvalidError(
                f"{path}: a row of the base weight plus its update has norm 0 or is not finite"
            )
        return norms.numpy()

    def find(self, key: str) -> str | None:
        """The checkpoint's name of the tensor that PEFT calls `key`, or of the only one with the same layer
        and name, or, outside layers, the same last two parts. None: there is none.

        Raises AdapterInvalidError."""
        files = self._all()
        name = key.removeprefix("base_model.model.")
        if name in files:
            return name
        parts = LAYER.split(name, maxsplit=1)
        tail = parts[1] if len(parts) > 1 else ".".join(name.rsplit(".", 2)[-2:])
        # A multimodal checkpoint has layers of these names in its vision tower too.
        text = [other for other in files if "vision" not in other]
        same = [
            other
            for other in text
            if (other.endswith(f".{tail}") or other == tail) and (len(parts) > 1 or not LAYER.search(other))
        ]
        return same[0] if len(same) == 1 else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that `find` found."""
        return tuple(self._all()[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A small tensor that `find` found, in float32."""
        return self._all()[name].get_tensor(name).float().numpy()

    def holds(self, name: str, copy: RawTensor) -> bool:
        """Whether a tensor that `find` found has the same values as this copy, in the copy's type."""
        import torch

        stored = self._all()[name].get_slice(name)
        kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        kind = {**kinds, "F8_E4M3": torch.float8_e4m3fn}.get(copy.dtype)
        if kind is None or tuple(stored.get_shape()) != copy.shape or len(copy.shape) != 2:
            return False
        rows, columns = copy.shape
        data, width, step = memoryview(copy.data), columns * kind.itemsize, max(1, CHUNK // columns)
        for first in range(0, rows, step):
            part = bytearray(data[first * width : (first + step) * width])
            theirs = torch.frombuffer(part, dtype=kind).view(-1, columns)
            ours = stored[first : first + step].to(kind)
            if kind.itemsize == 1:  # which torch does not compare
                ours, theirs = ours.float(), theirs.float()
            if not torch.equal(ours, theirs):
                return False
        return True

    def _open_slice(self, path: str) -> Any:
        name = self.find(f"{path}.weight")
        if name is None:
            wanted = path.removeprefix("base_model.model.") + ".weight"
            raise AdapterInvalidError(f"{path}: the base model has no {wanted} to normalise DoRA with")
        return self._all()[name].get_slice(name)

    def _all(self) -> dict[str, Any]:
        try:
            if self._files is None:
                self._files = self._open()
        except Exception as error:  # safetensors has no common class for all it raises
            reason = one_line(error)
            raise AdapterInvalidError(
                f"the base model's weights cannot be read for this adapter: {reason}"
            ) from error
        return self._files

    def _open(self) -> dict[str, Any]:
        index = self._model_dir / INDEX
        names = ["model.safetensors"]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found: dict[str, Any] = {}
        for name in names:
            file = self._stack.enter_context(safe_open(self._model_dir / Path(name).name, framework="pt"))
            found.update(dict.fromkeys(file.keys(), file))
        return found

"""BaseMatrix: a linear layer's weight in the base's checkpoint, as the layer multiplies with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from manylora.kernels.quantised import QuantisedWeight
from manylora.quant.checkpoint_weights import CheckpointWeights

DTYPES = ("F64", "F32", "F16", "BF16")
Hold = Callable[[str, Collection[str], Tensor | QuantisedWeight], Tensor | QuantisedWeight]
"""How a server holds a weight of its checkpoint: its name, the names of all tensors there, some rows as they
are stored -> those rows as they are held."""


class BaseMatrix:
    """The weight `name` of a checkpoint, [out, in]. Rows are read when they are asked for; of a weight that
    is stored quantised all are here until it is dropped, in as many bits as in the file.

    files: tensor name -> open file that has it. columns: of inputs. transposed: stored as [in, out]. hold:
    None: weights are held as they are stored. Raises ConfigError when a quantised weight is not of so many
    inputs.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Any],
        stored: CheckpointWeights,
        columns: int,
        transposed: bool = False,
        hold: Hold | None = None,
    ) -> None:
        self._name, self._names, self._hold = name, files.keys(), hold
        self._transposed = transposed
        self._quantised: QuantisedWeight | None = None
        if stored.parts(name):
            self._quantised = stored.read(name, columns, lambda part: files[part].get_tensor(part))
            self.dtype, self.shape = "quantised", list(self._quantised.shape)
        else:
            self._plain = files[name].get_slice(name)
            self.dtype, self.shape = self._plain.get_dtype(), list(self._plain.get_shape())

    @property
    def is_readable(self) -> bool:
        """Whether something says what the stored numbers mean."""
        return self._quantised is not None or self.dtype in DTYPES

    def rows(self, rows: slice) -> Tensor:
        """[rows, in] float32, as they are multiplied with."""
        weight = self._stored(rows)
        if self._hold is not None:
            weight = self._hold(self._name, self._names, weight)
        return weight.float() if isinstance(weight, Tensor) else _wide(weight)

    def values(self, rows: slice) -> Tensor:
        """[rows, in] as they are stored; what is quantised in float32."""
        weight = self._stored(rows)
        return weight if isinstance(weight, Tensor) else _wide(weight)

    def _stored(self, rows: slice) -> Tensor | QuantisedWeight:
        if self._quantised is not None:
            return self._quantised.rows(rows)
        return self._plain[:, rows].T.contiguous() if self._transposed else self._plain[rows]


def _wide(weight: QuantisedWeight) -> Tensor:
    """In float32, so that of integers or 8-bit floats only the product with the scale is rounded."""
    return weight.to(torch.float32).wide()

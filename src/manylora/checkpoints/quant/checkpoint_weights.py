"""CheckpointWeights: finds and reads the quantised weights of a checkpoint, several tensors each."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from manylora.checkpoints.quant import layouts
from manylora.checkpoints.quant.checkpoint import CheckpointQuant
from manylora.checkpoints.quant.layouts import BITSANDBYTES_KINDS, NESTED_ABSMAX, NESTED_MAP, STATE
from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight

PARTS = {"values": "qweight", **{name: name for name in ("scales", "offsets", "zeros", "order", "codebook")}}
"""Fields of a QuantisedWeight -> suffixes of tensor names in a directory of `manylora build`."""

# For each method: required and optional suffixes of a quantised weight's tensors.
TENSORS: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "built": ((("qweight", "scales"), ("offsets", "zeros", "order", "codebook")),),
    "awq": ((("qweight", "qzeros", "scales"), ()),),
    "gptq": ((("qweight", "qzeros", "scales"), ("g_idx",)),),
    "compressed-tensors": (
        (("weight_packed", "weight_scale"), ("weight_zero_point", "weight_g_idx", "weight_shape")),
        (("weight", "weight_scale"), ("weight_zero_point",)),
    ),
    "fp8": ((("weight", "weight_scale_inv"), ()), (("weight", "weight_scale"), ())),
    "mxfp4": ((("_blocks", "_scales"), ()),),  # for the experts of a layer
    "bitsandbytes": (
        *(
            (("weight", "weight.absmax", "weight.quant_map", f"{STATE}{kind}"), (NESTED_ABSMAX, NESTED_MAP))
            for kind in BITSANDBYTES_KINDS
        ),
        (("weight", "SCB"), ("weight_format",)),
    ),
    "fbgemm_fp8": ((("weight", "weight_scale"), ("input_scale_ub",)),),
}
# Suffixes that plain layers do not have.
KEYS = {
    "qweight", "weight_packed", "weight_scale", "weight_scale_inv", "_blocks", "_scales",
    "weight.absmax", "SCB",
}  # fmt: skip
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")


class CheckpointWeights:
    """quant: of the checkpoint; None: plain, or built here. names: of all its tensors."""

    def __init__(self, quant: CheckpointQuant | None, names: Collection[str]) -> None:
        self._quant, self._names = quant, names
        self._method = "built" if quant is None else quant.method

    def parts(self, source: str) -> dict[str, str]:
        """Suffix -> tensor of the quantised weight `source`; {} if it is plain. ConfigError if incomplete."""
        if not source.endswith("weight") and self._method != "mxfp4":
            return {}
        stem, layouts_known = source.removesuffix("weight"), TENSORS[self._method]
        for needed, others in layouts_known:
            if all(stem + end in self._names for end in needed):
                found = [*needed, *(end for end in others if stem + end in self._names)]
                return {end: stem + end for end in found}
        for needed, _ in layouts_known:
            if any(stem + end in self._names for end in KEYS.intersection(needed)):
                missing = next(stem + end for end in needed if stem + end not in self._names)
                raise ConfigError(f"the checkpoint lacks {missing}, which other tensors of the layer need")
        return {}

    def names(self, source: str) -> set[str]:
        """Names of the tensors of the weight `source`, quantised or plain."""
        return set(self.parts(source).values()) or {source}

    def is_left_out(self, name: str) -> bool:
        """Scales of activations, keys and values, which are not quantised here, and spare biases."""
        return self._quant is not None and (name.endswith(UNUSED) or self.is_spare_bias(name))

    def is_spare_bias(self, name: str) -> bool:
        """Some GPTQ tools write a bias for every layer. If the model has none, it must be zero."""
        return self._method == "gptq" and name.endswith(".bias") and f"{name[:-4]}qweight" in self._names

    def read(self, source: str, columns: int, read: Callable[[str], Tensor]) -> QuantisedWeight:
        """The weight `source`, which has `parts`, or that of one expert. read: returns a tensor by name.
        Raises ConfigError that names the layer and the tensor that does not fit.
        """
        tensors = {end: read(name) for end, name in self.parts(source).items()}
        try:
            if self._quant is None:
                return layouts.built(tensors, columns)
            if self._method == "awq":
                return layouts.awq(tensors, columns)
            if self._method == "gptq":
                return layouts.gptq(tensors, columns, self._quant.zero_shift)
            if self._method == "mxfp4":
                return layouts.mxfp4(tensors["_blocks"], tensors["_scales"], columns)
            if self._method == "bitsandbytes":
                return layouts.bitsandbytes(tensors, columns)
            if "weight_packed" in tensors:
                return layouts.packed(tensors, columns)
            return layouts.scaled(tensors, columns, self._quant.block)
        except ConfigError as error:
            raise ConfigError(f"{source.removesuffix('.weight')}: {error}") from error

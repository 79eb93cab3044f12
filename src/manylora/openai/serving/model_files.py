"""ModelFiles: what the base model's files say about it, for clients that show it to their users."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from manylora.config.model import ModelConfig
from manylora.config.model_folder import weight_files
from manylora.errors import ConfigError
from manylora.gguf.folder import linked_files
from manylora.gguf.parts import read_parts

UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True)
class ModelFiles:
    """format: gguf or safetensors. num_bytes, parameters: of all weights; 0: unknown. quantization: as in
    Q4_K_M, BF16 or FP8. file_type: GGUF's number for that; None: no GGUF file.
    """

    format: str = "safetensors"
    num_bytes: int = 0
    parameters: int = 0
    quantization: str = ""
    file_type: int | None = None

    @classmethod
    def read(cls, folder: Path, model: ModelConfig) -> ModelFiles:
        """Reads headers only. Without weights, as in front of a Triton server, little is known."""
        try:
            files = weight_files(folder)
            size = sum(file.stat().st_size for file in files)
            return cls._of_gguf(size, folder) if linked_files(folder) else cls._of_files(size, files, model)
        except (ConfigError, OSError):
            return cls()

    @classmethod
    def _of_gguf(cls, size: int, folder: Path) -> ModelFiles:
        from gguf.constants import LlamaFileType  # its import takes a while

        header = read_parts(linked_files(folder)[0].resolve())
        kinds, number = Counter[str](), header.metadata.get("general.file_type", -1)
        for one in header.tensors.values():
            kinds[one.kind] += prod(one.shape)
        known = {int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType}
        quantization = known.get(number) or kinds.most_common(1)[0][0]
        return cls("gguf", size, kinds.total(), quantization, number if number in known else None)

    @classmethod
    def _of_files(cls, size: int, files: list[Path], model: ModelConfig) -> ModelFiles:
        """Values of a quantised checkpoint are packed, so their number is unknown."""
        from safetensors import safe_open

        kinds = Counter[str]()
        for file in files:
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    found = opened.get_slice(name)
                    kinds[found.get_dtype()] += prod(found.get_shape())
        if model.quant is not None:
            return cls(num_bytes=size, quantization=str(model.quant.algo.value))
        return cls(num_bytes=size, parameters=kinds.total(), quantization=kinds.most_common(1)[0][0])

    @property
    def parameter_size(self) -> str:
        """As Ollama writes it: 134.52M, 8.0B."""
        for unit, letter in UNITS:
            if self.parameters >= unit:
                digits = 2 if letter == "M" else 1
                return f"{self.parameters / unit:.{digits}f}{letter}"
        return str(self.parameters or "")

    def details(self, family: str, parent: str) -> dict[str, Any]:
        """`details` of Ollama's API."""
        return {
            "parent_model": parent,
            "format": self.format,
            "family": family,
            "families": [family],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }

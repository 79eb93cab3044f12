"""Metadata: the keys of a GGUF file's own architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manylora.errors import ConfigError, printable
from manylora.gguf.container import Header


@dataclass(frozen=True)
class Metadata:
    """kind: `general.architecture`, with which the names of the keys begin."""

    header: Header
    kind: str

    def get(self, name: str, default: Any = None) -> Any:
        """A number, a text, or a list."""
        found = self.header.metadata.get(f"{self.kind}.{name}", default)
        return found.tolist() if hasattr(found, "tolist") else found

    def number(self, name: str, default: float | None = None) -> Any:
        """Raises ConfigError unless it is one number, or the same number for every layer that has it."""
        found = self.get(name, default)
        if isinstance(found, list):
            values = set(found) - {0} or set(found)
            found = values.pop() if len(values) == 1 else "different ones for its layers"
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(
                f"{self.header.path}: metadata {self.kind}.{name} must be a number, got "
                f"{printable(str(found))}"
            )
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises ConfigError."""
        found = self.number(name, default)
        if not isinstance(found, int) or found < 1:
            raise ConfigError(
                f"{self.header.path}: metadata {self.kind}.{name} must be a whole number of at least 1, got "
                f"{found}"
            )
        return found

    def per_layer(self, name: str) -> list[Any]:
        """A list with one entry per layer. Raises ConfigError."""
        found = self.get(name)
        found = found if isinstance(found, list) else [found] * self.layers
        if len(found) < self.layers:
            raise ConfigError(
                f"{self.header.path}: metadata {self.kind}.{name} has {len(found)} entries for "
                f"{self.layers} layers"
            )
        return found[: self.layers]

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def in_any(self, name: str) -> bool:
        """Whether a layer has this tensor."""
        return any(self.has(f"blk.{layer}.{name}") for layer in range(self.layers))

    def rows(self, name: str) -> int:
        """The number of rows of this tensor, 0 without it."""
        info = self.header.tensors.get(name)
        return 0 if info is None else info.shape[0]

    @property
    def layers(self) -> int:
        """Layers for predicting several tokens, which are the last ones, are not counted."""
        count = self.count("block_count") - self.number("nextn_predict_layers", 0)
        if not 1 <= count <= len(self.header.tensors):
            raise ConfigError(
                f"{self.header.path}: metadata {self.kind}.block_count is {self.number('block_count')}, "
                "which its tensors are not"
            )
        return count

    @property
    def heads(self) -> int:
        return self.count("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // self.heads)

    @property
    def inner_size(self) -> int:
        """Of the MLP of a layer: some converters write another number than the tensors have."""
        names = (f"blk.{layer}.ffn_down.weight" for layer in range(self.layers))
        found = next((self.header.tensors[name] for name in names if self.has(name)), None)
        return found.shape[-1] if found is not None else self.number("feed_forward_length", 0)

    @property
    def rotated_share(self) -> float:
        return self.count("rope.dimension_count", self.head_dim) / self.head_dim

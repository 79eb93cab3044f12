"""Aliases: more names for adapters, and for the base model."""

from __future__ import annotations

from collections.abc import Mapping

from manylora.errors import ConfigError
from manylora.openai.api.errors import ApiError

MAX_ALIASES = 65536


class Aliases:
    """given: name -> the name that it stands for, perhaps an alias. Raises ConfigError for a circle."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._targets: dict[str, str] = {}
        for name, target in given.items():
            if self._leads_to(target, name):
                raise ConfigError(f"lora_alias: {name}={target} leads back to itself")
            self._targets[name] = target

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def items(self) -> list[tuple[str, str]]:
        """Each alias with the name that it stands for in the end."""
        return [(name, self.resolve(name)) for name in sorted(self._targets)]

    def resolve(self, name: str) -> str:
        """What a name stands for in the end; one that is no alias for itself."""
        while name in self._targets:
            name = self._targets[name]
        return name

    def set(self, name: str, target: str) -> None:
        """Raises ApiError for a circle, or too many."""
        if self._leads_to(target, name):
            raise ApiError(400, "alias_circle", f"{target!r} stands for {name!r} already", "alias_of")
        if name not in self._targets and len(self._targets) >= MAX_ALIASES:
            raise ApiError(400, "invalid_value", f"There are {MAX_ALIASES} aliases already", "alias_of")
        self._targets[name] = target

    def remove(self, name: str) -> None:
        del self._targets[name]

    def _leads_to(self, name: str, end: str) -> bool:
        while name != end and name in self._targets:
            name = self._targets[name]
        return name == end

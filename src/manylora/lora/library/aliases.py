"""Aliases: more names for adapters, and for the base model."""

from __future__ import annotations

from collections.abc import Mapping

from manylora.errors import ConfigError

MAX_ALIASES = 65536


class Aliases:
    """given: name -> the name that it stands for, perhaps an alias. Raises ConfigError for a circle."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._targets: dict[str, str] = {}
        for name, target in given.items():
            if self.leads_to(target, name):
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

    def target(self, name: str) -> str:
        """What an alias was made to stand for."""
        return self._targets[name]

    def has_room_for(self, name: str) -> bool:
        return name in self._targets or len(self._targets) < MAX_ALIASES

    def set(self, name: str, target: str) -> None:
        """Neither where the target leads to the name, nor without room for it."""
        assert self.has_room_for(name) and not self.leads_to(target, name)
        self._targets[name] = target

    def remove(self, name: str) -> None:
        del self._targets[name]

    def leads_to(self, name: str, end: str) -> bool:
        """Whether a name stands for another, or is it."""
        while name != end and name in self._targets:
            name = self._targets[name]
        return name == end

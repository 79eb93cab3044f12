"""Aliases: further names for adapters and for the base model."""

from __future__ import annotations

from collections.abc import Mapping

from manylora.errors import ConfigError

MAX_ALIASES = 65536


class Aliases:
    """given: name -> target, which may itself be an alias. Raises ConfigError for a cycle."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._targets: dict[str, str] = {}
        for name, target in given.items():
            if self.leads_to(target, name):
                raise ConfigError(f"lora_alias: {name}={target} leads back to itself")
            self._targets[name] = target

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def items(self) -> list[tuple[str, str]]:
        """Each alias with its final target."""
        return [(name, self.resolve(name)) for name in sorted(self._targets)]

    def resolve(self, name: str) -> str:
        """The final target of a name. A name that is not an alias is returned as it is."""
        while name in self._targets:
            name = self._targets[name]
        return name

    def target(self, name: str) -> str:
        """The name that an alias was defined for."""
        return self._targets[name]

    def has_room_for(self, name: str) -> bool:
        return name in self._targets or len(self._targets) < MAX_ALIASES

    def set(self, name: str, target: str) -> None:
        """The caller checks that there is room, and that the target does not lead back to the name."""
        assert self.has_room_for(name) and not self.leads_to(target, name)
        self._targets[name] = target

    def remove(self, name: str) -> None:
        del self._targets[name]

    def leads_to(self, name: str, end: str) -> bool:
        """Whether a name resolves to another, or equals it."""
        while name != end and name in self._targets:
            name = self._targets[name]
        return name == end

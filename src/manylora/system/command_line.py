"""Command lines that are forgiving in how flags are spelt, and say what to write instead of a wrong one."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

UNKNOWN = "unrecognized arguments: "  # argparse's words


class Parser(argparse.ArgumentParser):
    """Flags may be spelt with dashes or underscores. An error is one line, with the flag that was meant.

    instead: flags and commands of other programs that are not accepted, without leading dashes and with
    underscores, and what to use here.
    """

    def __init__(self, *args: Any, instead: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._instead = instead or {}

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([self._own_spelling(one) for one in given], namespace)

    def error(self, message: str) -> NoReturn:
        if command := re.search(r"invalid choice: '([\w-]+)'", message):
            other = self._instead.get(command[1].replace("-", "_"))
            message += "" if other is None else f"; {other}"
        flag = next(iter(message.partition(UNKNOWN)[2].split()), "").partition("=")[0]
        other = self._instead.get(flag.lstrip("-").replace("-", "_")) if flag.startswith("-") else None
        if other is not None:
            message = f"{flag} is not taken here: {other}"
        elif near := difflib.get_close_matches(flag, self._flags(), n=1) if flag else []:
            message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (the options: {self.prog} --help)\n")

    def _own_spelling(self, given: str) -> str:
        name, equals, value = given.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return given
        plain = name.replace("_", "-")
        same = (flag for flag in self._option_string_actions if flag.replace("_", "-") == plain)
        return next(same, name) + equals + value

    def _flags(self) -> list[str]:
        """All flags, also those of commands within this one, whose unknown flags are reported here."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found += command._flags() if isinstance(command, Parser) else []
        return found

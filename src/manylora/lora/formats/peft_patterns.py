"""Patterns of PEFT that mean modules, matched as PEFT does, in bounded time: they come with an adapter."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import cached_property

from manylora.errors import AdapterInvalidError

PLAIN = re.compile(r"\^?((?:[\w.-]|\\\.)+)\$?")  # a name, or the regular expression of one
# Repetitions and groups: where a match may go on in more than one way. Their number is the power of a name's
# length that the time of a comparison grows with. One at the front comes free: there PEFT puts one itself.
CHOICES = re.compile(r"(?<!\()[*+?{]|\(")
MAX_CHOICES = 3
FRONT = ".*"
MAX_LENGTH = 256  # characters of a pattern
MAX_NAME = 128  # of a name that is compared with one
MAX_INVOLVED = 64  # patterns that are not the name of a module
SECONDS = 1.0  # for all comparisons of one adapter


class Patterns:
    """setting: that they are given in, for errors. patterns: of which the first that matches counts.

    Names of modules are looked up, however many there are; other patterns are few and simple, or refused.
    """

    def __init__(self, setting: str, patterns: Iterable[str]) -> None:
        self._setting = setting
        self._names: dict[str, int] = {}  # name -> place among the patterns
        self._involved: list[tuple[int, str]] = []
        self._all = list(patterns)
        self._seconds = 0.0
        for place, pattern in enumerate(self._all):
            plain = PLAIN.fullmatch(pattern)
            if plain is not None:
                # A pattern that begins with ^ means whole names only.
                name = ("^" if pattern.startswith("^") else "") + plain[1].replace("\\.", ".")
                self._names.setdefault(name, place)
            else:
                self._involved.append((place, pattern))
        if len(self._involved) > MAX_INVOLVED:
            raise AdapterInvalidError(
                f"{setting} has {len(self._involved)} regular expressions, at most {MAX_INVOLVED} are matched"
            )

    def first(self, path: str) -> str | None:
        """The first pattern that means the module or parameter at `path`. Raises AdapterInvalidError."""
        name = path.removeprefix("base_model.model.")
        parts = name.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = [self._names[end] for end in (f"^{name}", *ends) if end in self._names]
        best = min(found, default=len(self._all))
        if self._involved and len(name) > MAX_NAME:
            raise AdapterInvalidError(f"{name[:80]} is too long a name to compare with {self._setting}")
        started = time.perf_counter()
        for place, pattern in self._involved:
            if place > best:
                break
            if self._expressions[pattern].match(name):
                best = place
        self._seconds += time.perf_counter() - started
        if self._seconds > SECONDS:
            raise AdapterInvalidError(f"{self._setting} takes too long to compare with the adapter's modules")
        return self._all[best] if best < len(self._all) else None

    @cached_property
    def _expressions(self) -> dict[str, re.Pattern[str]]:
        return {pattern: self._compile(pattern) for _, pattern in self._involved}

    def _compile(self, pattern: str) -> re.Pattern[str]:
        simple = (
            len(pattern) <= MAX_LENGTH
            and not re.search(r"\)[*+{]", pattern)
            and len(CHOICES.findall(pattern.removeprefix(FRONT))) <= MAX_CHOICES
        )
        if not simple:
            raise AdapterInvalidError(f"the {self._setting} {pattern[:80]} is too involved")
        try:
            return re.compile(f"({pattern})$" if pattern.startswith(FRONT) else rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterInvalidError(f"{self._setting} {pattern[:80]} is not a pattern") from error

"""Which cases `make test` runs: each test, and each value of each of its parameters, once.

`make test-all` runs every case, `make quick` the tests that need nothing and those marked `quick`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

Choice = tuple[str, int]
"""Arguments of a test, and which of their values a case takes."""


def extended(*values: object) -> list[object]:
    """Values of a parameter that only `make test-all` runs."""
    return [pytest.param(value, marks=pytest.mark.extended) for value in values]


def select(items: Sequence[pytest.Item], quick: bool) -> list[pytest.Item]:
    if quick:
        items = [item for item in items if "tests/pure/" in item.nodeid or item.get_closest_marker("quick")]
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("extended"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in tests.values() for item in each_choice(cases)}
    return [item for item in items if item in kept]


def each_choice(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few cases of one test, in which each choice of all its cases occurs: as many as the longest list of
    values has. Where several cases would do, the one is taken with more pairs of choices not seen yet.
    """
    choices = {case: list(choices_of(case)) for case in cases}
    missing = {choice for found in choices.values() for choice in found}
    pairs: set[tuple[Choice, Choice]] = set()
    kept: list[pytest.Item] = []

    def new(case: pytest.Item) -> tuple[int, int]:
        return len(missing & {*choices[case]}), len({*combinations(choices[case], 2)} - pairs)

    while missing or not kept:
        best = max(cases, key=new)
        kept.append(best)
        missing -= {*choices[best]}
        pairs |= {*combinations(choices[best], 2)}
    return kept


def choices_of(case: pytest.Item) -> Iterable[Choice]:
    """One of each `parametrize` and of each fixture with parameters."""
    callspec = getattr(case, "callspec", None)
    left = dict(callspec.params) if callspec else {}
    for mark in case.iter_markers("parametrize"):
        names = mark.kwargs.get("argnames") or mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        if all(name in left for name in names):
            yield ",".join(names), hash(tuple(id(left.pop(name)) for name in names))
    yield from ((name, id(value)) for name, value in left.items())

"""Protects `make test` from losing a case: each value of each parameter of each test is run once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from selection import each_choice, select


class Case:
    """What of a pytest.Item is asked for. marks: argument names of its `parametrize`, in any order."""

    def __init__(self, name: str, params: dict[str, Any], *marks: str, extended: bool = False) -> None:
        self.nodeid = f"{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = type("CallSpec", (), {"params": params})()
        self._marks = [pytest.mark.parametrize(names, []).mark for names in marks]
        self._extended = extended

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        yield from self._marks if name == "parametrize" else ()

    def get_closest_marker(self, name: str) -> object:
        return self._extended if name == "extended" else None


def product(name: str, **values: list[Any]) -> list[Any]:
    rows = itertools.product(*values.values())
    return [Case(name, dict(zip(values, row, strict=True)), *values) for row in rows]


def test_of_a_product_each_value_is_kept_and_few_cases_are() -> None:
    values = {"ops": ["torch", "best"], "rank": [1, 8, 64], "dtype": ["float", "half"]}
    kept = each_choice(product("t", **values))
    for name, expected in values.items():
        assert {case.callspec.params[name] for case in kept} == {*expected}
    assert len(kept) == 3
    assert len({case.callspec.params["ops"] for case in kept[:2]}) == 2


def test_values_of_one_list_stay_together() -> None:
    rows = [(1, "x"), (1, "y"), (2, "y")]
    cases: list[Any] = [Case("t", dict(zip(("a", "b"), row, strict=True)), "a, b") for row in rows]
    assert each_choice(cases) == cases


def test_tests_and_not_cases_are_counted_and_extended_ones_are_left_out() -> None:
    one, other = product("f.py::one", a=[1, 2], b=[3, 4]), product("f.py::other", a=[1])
    last: list[Any] = [Case("f.py::last", {}, extended=True)]
    kept = select([*one, *other, *last], quick=False)
    assert [case.nodeid for case in kept] == ["f.py::one[1-3]", "f.py::one[2-4]", "f.py::other[1]"]

"""Protects the table of the engine's settings: each row is read by its name at each door, its bounds are
checked there, and docs/parameters.md has it with its default."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.cli import main
from manylora.config.engine import QUANT_SETTINGS, SETTINGS, EngineConfig, LoraCacheConfig, rename
from manylora.config.repository import PARAMETERS
from manylora.config.settings import Setting, rows
from manylora.doors.python.options import ARGUMENTS
from manylora.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parameters.md"
WRONG: dict[str, Any] = {"int": "many", "float": "x", "bool": "maybe", "str": 5, "Path": 5}
NOT_ITS_OWN = {"cuda_graph_cache_size": "128"}  # 0 stands for it
DOORS = {"triton": PARAMETERS, "llm": ARGUMENTS}
NAMED = [(name, row) for names in DOORS.values() for name, row in names.items()]
ROWS = [row for kind in (EngineConfig, LoraCacheConfig) for row in rows(kind).values()]


@pytest.mark.parametrize(("name", "row"), NAMED, ids=[name for name, _ in NAMED])
def test_a_value_is_read_by_each_name_and_one_of_another_type_is_named(name: str, row: Setting) -> None:
    if row.default not in (None, ()):
        assert rename({name: row.default}, {name: row}) == {row.name: row.default}
        assert rename({name: str(row.default)}, {name: row}) == {row.name: row.default}
    wrong = WRONG.get(row.kind, 5) if not row.repeats else 5
    with pytest.raises(ConfigError, match=f"^at {re.escape(name)} must be "):
        rename({name: wrong}, {name: row}, "at ")


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_default_is_within_the_bounds_and_what_is_out_of_them_is_named(row: Setting) -> None:
    row.check(row.default)
    assert row.help
    bounds = [row.least - 1] if row.least is not None else []
    bounds += [row.most + 1] if row.most is not None else []
    bounds += [row.above] if row.above is not None else []
    for value in [*bounds, *(["other"] if row.choices else [])]:
        with pytest.raises(ConfigError, match=f"^{row.named or row.name} must be "):
            row.check(value)
        config: Any = EngineConfig(Path("m")) if row.name in rows(EngineConfig) else LoraCacheConfig()
        with pytest.raises(ConfigError):
            replace(config, **{row.name: value})


def test_no_two_rows_have_one_name_at_a_door() -> None:
    for names in ([row.parameter for row in SETTINGS], [row.llm for row in SETTINGS]):
        given = [name for name in names if name]
        assert len(given) == len(set(given))
    for door in ("serve", "bench", "build"):
        flags = [flag for row in SETTINGS for flag in getattr(row, door).split()]
        assert len(flags) == len(set(flags)), door


@pytest.mark.parametrize(
    ("door", "command"),
    [("serve", "serve"), ("serve", "fleet"), ("bench", "bench throughput"), ("build", "build")],
)
def test_every_flag_of_a_row_is_in_the_help_of_its_command(
    door: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]+)", capsys.readouterr().out)}
    assert {flag for row in SETTINGS for flag in getattr(row, door).split()} <= shown


def test_every_parameter_is_documented_with_its_default() -> None:
    documented: dict[str, str] = {}
    for names, default in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.M
    ):
        found = re.findall(r"\w+", names)
        values = (
            default.split(", ") if len(found) > 1 and default.count(", ") == len(found) - 1 else [default]
        )
        documented |= dict(zip(found, values * (len(found) if len(values) == 1 else 1), strict=True))
    for name, row in PARAMETERS.items():
        assert name in documented, name
        numeric = isinstance(row.default, int | float) and not isinstance(row.default, bool)
        if numeric and row not in QUANT_SETTINGS and name not in ("max_queue_size", *NOT_ITS_OWN):
            assert re.split("[, ]", documented[name])[0].strip("`") == str(row.default), name

"""Protects files of settings: absent they are empty, and one that holds something else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.config.values import read_settings
from manylora.errors import ConfigError


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_settings(tmp_path / "config.json") == {}
    assert read_settings(tmp_path / "modules.json", list) == []


@pytest.mark.parametrize(
    "text, words",
    [("{", "is not valid JSON"), ("[" * 100_000, "is not valid JSON"), ("[1]", "must hold a JSON object")],
)
def test_a_file_that_holds_something_else_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"config.json {words}"):
        read_settings(file)

"""Protects those whose service runs as another user than the one who saved the model: transformers writes
weights that only their owner can read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from manylora.config.model_folder import check_adapter_path, check_model_folder
from manylora.config.settings import read_settings
from manylora.errors import ConfigError
from manylora.openai.options import ServeOptions

TOLD = f"cannot be read: Permission denied; let the user of this process, uid {os.getuid()}, read it$"
LONG = Path("a" * 300)  # no disk has such a name; the system's error is any that is not expected


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's, whose files nobody may open; root may open all others."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}", encoding="utf-8")

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    return tmp_path


def test_a_file_that_may_not_be_read_is_named_with_the_user(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{folder / 'model.safetensors'} {TOLD}"):
        check_model_folder(folder)
    with pytest.raises(ConfigError, match=f"^{folder / 'config.json'} {TOLD}"):
        read_settings(folder / "config.json")


def test_any_other_reason_is_told(tmp_path: Path) -> None:
    for check in (check_model_folder, check_adapter_path):
        with pytest.raises(ConfigError, match=r"^a+.* cannot be read: File name too long$"):
            check(LONG)
    with pytest.raises(ConfigError, match=r"^a+.* cannot be read: File name too long$"):
        ServeOptions(tmp_path, lora_root=(LONG,))

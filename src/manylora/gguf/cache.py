"""How many folders of GGUF files there may be: those used longest ago are removed, unless a process has
them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from manylora.errors import ConfigError
from manylora.system import folders

SETTING, MOST_FOLDERS = "MANYLORA_GGUF_FOLDERS", 32
_held: dict[Path, int] = {}
"""Folder -> its descriptor, with a shared lock until this process ends: a server reads its folder again."""


def hold(folder: Path) -> bool:
    """Keep a folder from being removed while this process lives. False: there is none, or not all of it."""
    if folder in _held and (folder / "config.json").is_file():
        return True
    try:
        descriptor = folders.hold(folder)
    except FileNotFoundError:
        return False
    if not (folder / "config.json").is_file():  # removed before it was locked
        os.close(descriptor)
        return False
    _held[folder] = descriptor
    with suppress(OSError):  # another user's
        os.utime(folder)
    return True


def most_folders() -> int:
    """Raises ConfigError for a setting that is no number of at least 1."""
    given = os.environ.get(SETTING, "").strip()
    if not given:
        return MOST_FOLDERS
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{SETTING} must be a whole number of at least 1, got {given!r}")
    return int(given)


def remove_old(base: Path) -> None:
    """Folders in `base` beyond the most there may be, the one used longest ago first. What cannot be removed
    stays: another process has it, or it is another user's."""
    found = [(_used(one), one) for one in base.iterdir() if one.is_dir() and not one.name.startswith(".")]
    spare = len(found) - most_folders()
    for _, folder in sorted(found):
        if spare > 0:
            spare -= remove(folder)


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def remove(folder: Path) -> bool:
    """Whether it was removed: not where a process has it."""
    return folders.remove_unless_held(folder, "config.json")

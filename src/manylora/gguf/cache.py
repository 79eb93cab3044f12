"""Limits the number of folders for GGUF files: the least recently used ones are removed unless a process uses
them.
"""

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
    """Keep a folder from being removed while this process lives. Returns False if it does not exist or is
    incomplete.
    """
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
    with suppress(OSError):  # it belongs to another user
        os.utime(folder)
    return True


def most_folders() -> int:
    """Raises ConfigError for a setting that is not a number of at least 1."""
    given = os.environ.get(SETTING, "").strip()
    if not given:
        return MOST_FOLDERS
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{SETTING} must be a whole number of at least 1, got {given!r}")
    return int(given)


def remove_old(base: Path) -> None:
    """Remove folders in `base` beyond the limit, least recently used first. Folders that cannot be removed
    stay, because another process uses them or they belong to another user.
    """
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
    """Returns whether it was removed: not if a process uses it."""
    return folders.remove_unless_held(folder, "config.json")

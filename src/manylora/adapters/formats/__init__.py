"""Readers of adapters on disk. Files are untrusted: nothing is unpickled, every header is checked first."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """The text of an exception from outside this package, in one line and without a path of this machine."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__

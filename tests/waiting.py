"""Waiting for something to become true, for a limited time; and for a server to answer."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

PAUSE_S = 0.05


def wait_for(done: Callable[[], object], seconds: float = 120, what: str = "it") -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"{what} did not come about within {seconds} s"
        time.sleep(PAUSE_S)


def wait_for_named(what: str, done: Callable[[], object], seconds: float = 120) -> None:
    """The same; a failure says what was waited for."""
    wait_for(done, seconds, what)


def answers(url: str, seconds: float = 5) -> bool:
    """Whether a server answers a GET with success, now."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.status == 200
    except (OSError, HTTPException):
        return False

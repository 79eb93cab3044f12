"""Protects what the server's processes are started with."""

from __future__ import annotations

import pytest

from manylora.launcher.server import thread_settings


@pytest.mark.parametrize("said", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_spin_briefly_unless_the_environment_says_otherwise(said: dict[str, str]) -> None:
    found = thread_settings({"HOME": "/", **said})
    assert found == {"HOME": "/", **(said or {"GOMP_SPINCOUNT": "1000"})}

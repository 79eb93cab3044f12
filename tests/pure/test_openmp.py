"""Protects other work on the machine from threads that wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from manylora.system.threads import thread_settings

SAID = [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}]


@pytest.mark.parametrize("said", SAID)
def test_threads_spin_briefly_unless_the_environment_says_otherwise(said: dict[str, str]) -> None:
    found = thread_settings({"HOME": "/", **said})
    assert found == {"HOME": "/", **(said or {"GOMP_SPINCOUNT": "1000"})}


@pytest.mark.parametrize("said", SAID)
def test_the_package_says_so_to_its_process(said: dict[str, str]) -> None:
    plain = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = "import manylora, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**plain, **said}, capture_output=True, check=True
    )
    want = said.get("GOMP_SPINCOUNT") if said else "1000"
    assert done.stdout.decode().strip() == str(want)

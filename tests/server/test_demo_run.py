"""Protects the one command of the README: `make demo` answers one question three ways and leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys

from servers import ROOT, free_ports


def test_the_demo_from_end_to_end() -> None:
    flags = [
        f"--{kind}_port={port}" for kind, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/demo/run.py", "demo", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for question in ("美国的首都在哪里", "アメリカ合衆国の首都はどこですか"):
        row = rf"{question}\? \\n\S+ +Washington, D\.C\. +\d+ ms +华盛顿 +\d+ ms +ワシントンD\.C\. +\d+ ms"
        assert re.search(row, done.stdout), done.stdout
    assert "日本はアジアにある国です。日本の首都は東京です。" in done.stdout
    assert re.search(r"most distinct adapters in one engine step: \d", done.stdout)
    assert "nothing is left: no process, no port, no shared memory" in done.stdout

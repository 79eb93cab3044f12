"""Protects `make demo`, with the toy: it asks a model and its adapters, replaces and adds one while Triton
serves, asks the OpenAI server, and leaves nothing."""

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
        [sys.executable, ROOT / "examples/demo/run.py", "demo", "--offline", *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("While it serves")
    assert re.search(r"base model +chinese\n[- ]+\nWashington, D\.C\. +华盛顿\n", before), done.stdout
    assert re.search(r"japanese +chinese\n[- ]+\nワシントンD\.C\. +Washington, D\.C\.\n", after), done.stdout
    assert "nothing is left: no process, no port, no shared memory" in after
    assert "日本はアジアにある国です。日本の首都は東京です。" in after

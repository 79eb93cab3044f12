"""Protects those who install the wheel: it holds everything, and serves without the clone. It is built from
what the Dockerfiles copy, so they copy enough."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from servers import ROOT, World, free_ports
from tiny_models import reference_generate
from waiting import answers

from manylora.doors.triton.launcher.processes import why_taken
from manylora.generation.tokenizer import Tokenizer
from manylora.kernels import native
from manylora.system.compiler import LEVELS

sys.path.insert(0, str(ROOT / "tests" / "pure"))
from test_deploy import copied

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.extended)], ids=["Python", "whole"]
)
def whole(request: pytest.FixtureRequest) -> bool:
    """Or without the compiled libraries: to compile them for every level takes minutes."""
    if request.param:
        pytest.importorskip("ziglang", reason="needs a cross-compiler: pip install ziglang")
    return request.param


@pytest.fixture(scope="module")
def wheel(whole: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in copied("Dockerfile"):
        source, target = ROOT / name, path / "context" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    if whole:
        build = ["wheel", path / "context", "--no-deps", "--no-build-isolation", "-w", path]
        subprocess.run([*PIP, *build], check=True)
    else:
        build = ["-q", "build_py", "bdist_wheel", "--skip-build", "-d", path]
        subprocess.run([sys.executable, "setup.py", *build], cwd=path / "context", check=True)
    (made,) = path.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A virtual environment with the wheel, and with the packages that it needs from this one."""
    venv = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    subprocess.run([*PIP, "--python", venv / "bin" / "python", "install", "--no-deps", wheel], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # A path file in a folder that a path file names is not followed, so the clone is not found through it.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return venv


def test_the_wheel_holds_every_file_of_the_package_once(wheel: Path, whole: bool) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("manylora/")}
    src = ROOT / "src"
    files = {
        str((Path(folder) / name).relative_to(src))
        for folder, _, names in os.walk(src / "manylora", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    }
    assert {"manylora/kernels/native/lora.c", "manylora/kernels/native/lora.h"} <= files
    made = {f"manylora/kernels/native/built/{native.SOURCE.file_name(level)}" for level in LEVELS}
    if whole:
        assert made <= held, "without them the kernels are compiled at the first start"
    files = {name for name in files if not name.endswith(".so")}
    held = {name for name in held if not name.endswith(".so")}
    assert "manylora/model_repo/ensemble/1/.gitkeep" in files
    assert held == files


def test_it_serves_a_model_from_another_folder(installed: Path, world: World, tmp_path: Path) -> None:
    """One's own model and adapter, in one command; at an address of IPv6, if there is one."""
    root = tmp_path / "loras"
    for name in ("mine", "2"):
        shutil.copytree(world.adapters[2], root / name)
    ports = free_ports(3)
    flags = [f"--{kind}_port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    home = "127.0.0.1" if why_taken(ports[0], "::1") else "::1"
    flags += [f"--address={home}", "--force"]

    def run(*arguments: object) -> str:
        command = [installed / "bin" / "manylora", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(installed) in run("tool", "--help")
    lora = ["--lora-root", root, "--set", "device=cpu", "--set", "max_seq_len=96"]
    assert "ready after" in run("triton", world.model, *lora, *flags)
    host = f"[{home}]" if ":" in home else home
    try:
        assert answers(f"http://{host}:{ports[2]}/metrics", 60)
        with grpc.InferenceServerClient(f"{host}:{ports[1]}") as client:
            assert client.is_server_ready()
        ids = Tokenizer(world.model).encode("Hello")
        expected = Tokenizer(world.model).decode(reference_generate(world.model, world.adapters[2], ids, 8))
        for adapter in ({"lora_name": "mine"}, {"lora_task_id": 2}):
            body = {"text_input": "Hello", "max_tokens": 8, "exclude_input_in_output": True, **adapter}
            address = f"http://{host}:{ports[0]}/v2/models/ensemble/generate"
            with urllib.request.urlopen(address, json.dumps(body).encode(), 60) as answer:
                assert json.loads(answer.read())["text_output"] == expected
        state = json.loads(run("triton", "--status", *flags))
    finally:
        assert "stopped" in run("triton", "--stop", *flags)
    assert not Path(state["log"]).parent.exists()

"""Protects what commands print and write, with their exit status: `inspect`, `convert`, `repo`, `tool`, and
what `manylora` and `serve` refuse before they start anything."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import Replay, without
from safetensors.numpy import load_file
from workshop import make_exact_model, make_kind

import manylora
from manylora.cli import main

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
CHINESE, BASE = "{demo}/adapters/chinese", "{demo}/base"
OUT = ["-o", "{out}"]
MACHINES_OWN = re.compile(r"(weights|kv|adapter|start|verdict) .*")
"""Lines of `inspect MODEL` about this machine's memory and its usual dtype."""

COMMANDS: dict[str, list[str]] = {
    "nothing": [],
    "help": ["--help"],
    "an unknown command": ["sevre"],
    "a command of another program": ["run"],
    "an option in place of a command": ["--model", "x"],
    "inspect": ["inspect", CHINESE],
    "inspect with a base": ["inspect", CHINESE, "--base", BASE],
    "inspect tensors": ["inspect", CHINESE, "--base", BASE, "--tensors"],
    "inspect within a small rank": [
        "inspect",
        "{demo}/adapters/japanese",
        "--base",
        BASE,
        "--max-adapter-size",
        "8",
    ],
    "inspect for another base": ["inspect", "{kinds}/lora", "--base", BASE],
    "inspect a model": ["inspect", BASE],
    "inspect what is not there": ["inspect", "/no/such/folder"],
    "inspect with a base that is none": ["inspect", CHINESE, "--base", CHINESE],
    "convert": ["convert", "-i", CHINESE, *OUT],
    "convert to float32": ["convert", "-i", CHINESE, *OUT, "--storage-type", "float32"],
    "convert to bfloat16": ["convert", "-i", CHINESE, *OUT, "--storage-type", "bfloat16"],
    "convert to one file": ["convert", "-i", CHINESE, "-o", "{out}.safetensors", "--to", "llgtrt"],
    "convert scaled by the root": ["convert", "-i", "{kinds}/rslora", *OUT],
    "convert an activated one": ["convert", "-i", "{kinds}/activated", *OUT],
    "convert other modules": ["convert", "-i", "{kinds}/every-module", *OUT, "--base", "{model}"],
    "convert DoRA without its base": ["convert", "-i", "{kinds}/dora", *OUT],
    "convert biases": ["convert", "-i", "{kinds}/lora-bias", *OUT],
    "convert virtual tokens": ["convert", "-i", "{kinds}/prompt", *OUT],
    "convert what is not there": ["convert", "-i", "/no/such/folder", *OUT],
    "convert a model": ["convert", "-i", BASE, *OUT],
    "convert to an unknown form": ["convert", "-i", CHINESE, *OUT, "--to", "gguf"],
    "convert nothing": ["convert"],
    "repo": ["repo", BASE, *OUT, "--lora-root", "{demo}/adapters", "--set", "max_queue_size=5"],
    "repo of some models": ["repo", BASE, *OUT, "--models", "tensorrt_llm,vllm_model"],
    "repo with an unknown variable": ["repo", BASE, *OUT, "--set", "max_quee_size=5"],
    "repo of an unknown model": ["repo", BASE, *OUT, "--models", "tensorrt"],
    "repo of what is no model": ["repo", CHINESE, *OUT],
    "tool hf_lora_convert": ["tool", "hf_lora_convert", "-i", CHINESE, *OUT, "--storage-type", "float16"],
    "an unknown tool": ["tool", "trtllm-build"],
    "build without a model": ["build", CHINESE, *OUT],
    "serve what is no model": ["serve", CHINESE],
    "serve what is not there": ["serve", "/no/such/folder"],
    "serve with an unknown flag": ["serve", BASE, "--lora-rot", "x"],
    "serve with a flag of vLLM's": ["serve", BASE, "--speculative-config", "{}"],
    "serve with a flag without effect": ["serve", "/no/such/folder", "--disable-log-requests"],
    "serve with a port that is none": ["serve", BASE, "--port", "many"],
    "serve an unknown dtype": ["serve", BASE, "--dtype", "int3"],
    "serve adapters of a file": ["serve", BASE, "--lora-root", BASE + "/config.json"],
    "serve an adapter as a root": ["serve", BASE, "--lora-root", CHINESE],
    "serve an adapter with the base's name": ["serve", BASE, "--lora-modules", f"base={CHINESE}"],
    "triton without anything": ["triton"],
    "triton with an unknown flag": ["triton", "--model_rep", "x"],
    "fleet without replicas": ["fleet", BASE, "--replicas", "0"],
    "chat with what is no model": ["chat", CHINESE],
    "bench with what is no model": ["bench", CHINESE],
}
Run = Callable[[list[str]], Any]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its adapters, as the commands name them."""
    folder = tmp_path_factory.mktemp("replay")
    model = make_exact_model(folder / "model")
    for kind in ("lora", "rslora", "activated", "every-module", "dora", "lora-bias", "prompt"):
        make_kind(folder / "kinds", model, kind)
    return folder


@pytest.fixture
def run(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Status and texts of a command, and what it has written."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    package = Path(manylora.__file__).parent
    folders = {
        "out": tmp_path / "out",
        "here": tmp_path,
        "demo": DEMO,
        "model": shop / "model",
        "package": package,
    }
    folders["kinds"] = shop / "kinds"

    def filled(word: str) -> str:
        for name, folder in folders.items():
            word = word.replace(f"{{{name}}}", str(folder))
        return word

    def called(words: list[str]) -> Any:
        try:
            status: Any = main([filled(word) for word in words])
        except SystemExit as ended:
            status = ended.code
        out, err = (without(text, **folders).splitlines() for text in capsys.readouterr())
        if words == COMMANDS["inspect a model"]:
            out = [line for line in out if not MACHINES_OWN.fullmatch(line)]
        return {"status": status, "out": out, "err": err, "files": files(tmp_path, folders)}

    return called


def files(root: Path, folders: dict[str, Path]) -> dict[str, Any]:
    """What is in the files below a folder, by their paths."""
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): content(path, folders) for path in found}


def content(path: Path, folders: dict[str, Path]) -> Any:
    if path.suffix == ".npy":
        return array(np.load(path))
    if path.suffix == ".safetensors":
        return {name: array(one) for name, one in sorted(load_file(path).items())}
    if path.suffix == ".pbtxt":
        return parameters(without(path.read_text("utf-8"), **folders))
    return "…"


def array(values: np.ndarray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
    return f"{values.dtype} {list(values.shape)} {digest}"


def parameters(text: str) -> dict[str, str]:
    """Of a config.pbtxt, those that are filled."""
    found = re.findall(r'key: "(\w+)"\s*value:? \{\s*string_value: "([^"]*)"', text)
    return {name: value for name, value in found if value and not value.startswith("${")}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, run: Run, replay: Replay) -> None:
    replay(name, run(COMMANDS[name]))


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names([*COMMANDS])

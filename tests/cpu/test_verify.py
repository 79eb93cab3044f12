"""Protects manylora verify: right adapters pass, one that lost tensors on its way fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serving import DEMO, Running

from manylora.cli import main


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("The capital of France is Paris\n\nWhat is the capital of Japan?\n", encoding="utf-8")
    return path


def verify(prompts: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    root = ["--lora-root", str(DEMO / "adapters")]
    status = main(["verify", str(DEMO / "base"), *root, "--prompts", str(prompts), "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_what_is_served_here_agrees(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = verify(prompts, capsys, "--reference", "peft")
    assert (status, found["verdict"], found["dtype"]) == (0, "PASS", "float32")
    assert [one["name"] for one in found["results"]] == ["base model", "chinese", "japanese"]
    for one in found["results"]:
        assert one["served"]["max"] < 1e-3 and one["served"]["argmax"] == 0 and one["noise"]["max"] < 1e-3
        assert one["served"]["tokens"] > 16, "tokens that were generated count too"
    assert all(one["effect"]["mean"] > 0.1 for one in found["results"][1:])


def test_a_server_that_lost_tensors_of_an_adapter_fails(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEMO / "adapters", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "chinese" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: one for name, one in tensors.items() if "layers.1.self_attn.k_proj" not in name}, file)
    shutil.rmtree(tmp_path / "japanese")
    server = Running(lora_root=(tmp_path,))
    try:
        status, found = verify(prompts, capsys, "--url", server.url)
    finally:
        server.close()
    assert (status, found["verdict"]) == (1, "FAIL")
    assert {one["name"]: one["verdict"] for one in found["results"]} == {
        "base model": "PASS", "chinese": "FAIL", "japanese": "FAIL",
    }  # fmt: skip
    assert "'japanese' does not exist" in found["results"][2]["problem"]


def test_wrong_arguments_have_status_2(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DEMO / "base")
    for given, hint in (
        (["--lora", "chinese"], "NAME=PATH"),
        (["--lora", "chinese=/nowhere"], "NAME=PATH"),
        (["--url", "http://127.0.0.1:9/v1"], "does not answer"),
    ):
        assert main(["verify", model, *given, "--prompts", str(prompts)]) == 2
        assert hint in capsys.readouterr().err

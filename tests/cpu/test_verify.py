"""Protects manylora verify: right adapters pass, one that lost tensors on its way fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DEMO, Running

from manylora.cli import main


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("The capital of France is Paris\n\nWhat is the capital of Japan?\n", encoding="utf-8")
    return path


def verify(prompts: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", str(DEMO / "base"), "--prompts", str(prompts), "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def with_its_own_head(folder: Path) -> Path:
    """An adapter that PEFT leaves a part of in the base model."""
    shutil.copytree(DEMO / "adapters" / "chinese", folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    base = json.loads((DEMO / "base" / "config.json").read_text(encoding="utf-8"))
    head = torch.randn(base["vocab_size"], base["hidden_size"], generator=torch.Generator().manual_seed(1))
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": head}, file)
    return folder


def test_what_is_served_here_agrees(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = with_its_own_head(tmp_path / "head")
    lora = [f"head={own}", f"chinese={DEMO / 'adapters' / 'chinese'}"]
    status, found = verify(prompts, capsys, "--reference", "hf", "--lora", *lora)
    assert (status, found["verdict"], found["dtype"]) == (0, "PASS", "float32")
    assert [one["name"] for one in found["results"]] == ["base model", "head", "chinese"]
    for one in found["results"]:
        assert one["served"]["max"] < 1e-3 and one["noise"]["max"] < 1e-3
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
        root = ("--lora-root", str(DEMO / "adapters"), "--url", server.url)
        status, found = verify(prompts, capsys, *root)
        assert [one["name"] for one in verify(prompts, capsys, "--lora", "chinese", *root)[1]["results"]] == [
            "base model",
            "chinese",
        ]
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
        (["--lora", "chinese=/nowhere"], "/nowhere"),
        (["--lora-root", "/nowhere"], "/nowhere"),
        (["--url", "http://127.0.0.1:9/v1"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--device", "cpu"], "leave it out"),
        (["--model", "demo"], "give --url too"),
    ):
        assert main(["verify", model, *given, "--prompts", str(prompts)]) == 2
        assert hint in capsys.readouterr().err

"""Protects a model repository: what `manylora repo` writes is complete, what is wrong is one line; templates
that people fill with their own tool; and a machine on which the Python backend cannot run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from manylora.cli import main
from manylora.doors.triton.launcher import templates
from manylora.doors.triton.launcher.new_repository import MARK
from manylora.doors.triton.launcher.server_command import STUBS, find_tritonserver
from manylora.doors.triton.launcher.templates import check_filled, with_defaults
from manylora.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo" / "base"
ADAPTERS = ROOT / "examples" / "demo" / "adapters"
TEMPLATES = sorted(path.parent.name for path in (ROOT / "model_repo").glob("*/config.pbtxt"))


def written(folder: Path, *arguments: object) -> Path:
    assert main(["repo", str(MODEL), "-o", str(folder), *map(str, arguments)]) == 0
    return folder


def config(repo: Path, model: str) -> Any:
    text = (repo / model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(repo: Path, model: str = "tensorrt_llm") -> dict[str, str]:
    found = {key: value.string_value for key, value in config(repo, model).parameters.items()}
    return {key: value for key, value in found.items() if not value.startswith("${")}


def test_every_template_is_filled_and_whole(tmp_path: Path) -> None:
    repo = written(tmp_path / "new" / "repo", "--lora-root", ADAPTERS)
    assert sorted(path.name for path in repo.iterdir()) == sorted([*TEMPLATES, MARK])
    for model in TEMPLATES:
        check_filled(repo / model / "config.pbtxt")
        text = (templates.FOLDER / model / "config.pbtxt").read_text(encoding="utf-8")
        assert config(repo, model).max_batch_size == (64 if "triton_max_batch_size" in text else 0)
        theirs = sorted(
            path.relative_to(templates.FOLDER / model)
            for path in (templates.FOLDER / model).rglob("*")
            if "__pycache__" not in path.parts
        )
        assert sorted(path.relative_to(repo / model) for path in (repo / model).rglob("*")) == theirs
    assert with_defaults(repo, tmp_path / "run") == repo
    assert parameters(repo)["gpt_model_path"] == str(MODEL)
    assert parameters(repo)["lora_catalog_dir"] == str(ADAPTERS)
    assert "lora_prefetch_dir" not in parameters(repo)
    shutil.copytree(ADAPTERS / "chinese", tmp_path / "loras" / "17")
    numbered = written(tmp_path / "numbered", "--lora-root", tmp_path / "loras")
    assert parameters(numbered)["lora_prefetch_dir"] == str(tmp_path / "loras"), "numbers are task ids"
    assert "max_num_sequences" not in parameters(repo)


def test_it_is_what_the_five_lines_of_upstream_write(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "triton_server.md").read_text(encoding="utf-8")
    lines = re.findall(r"\$F -i repo/(\w+)/config\.pbtxt (\S+)", text)
    assert len(lines) == 5
    shutil.copytree(ROOT / "model_repo", tmp_path / "theirs")
    for model, values in lines:
        command = [sys.executable, ROOT / "tools/fill_template.py", "-i"]
        values = values.replace("$M", str(MODEL))
        subprocess.run([*command, tmp_path / "theirs" / model / "config.pbtxt", values], check=True)
    names = [model for model, _ in lines]
    more = ["--set", "triton_max_batch_size=8", "--set", "lora_prefetch_dir=converted"]
    ours = written(tmp_path / "ours", "--models", ",".join(names), *more)
    for model in names:
        assert parameters(ours, model).items() >= parameters(tmp_path / "theirs", model).items()
        found, expected = config(ours, model), config(tmp_path / "theirs", model)
        for one in (found, expected):
            one.parameters.clear()
        assert found == expected


def test_values_reach_every_model_that_has_them(tmp_path: Path) -> None:
    given = {
        "max_queue_size": "5",
        "lora_weights_data_type": "TYPE_FP32",
        "max_loras": "3",
        "decoupled_mode": "false",
    }
    repo = written(tmp_path / "repo", *[word for pair in given.items() for word in ("--set", "=".join(pair))])
    assert parameters(repo)["max_loras"] == "3"
    assert parameters(repo)["max_queue_size"] == "5"
    assert config(repo, "preprocessing").dynamic_batching.default_queue_policy.max_queue_size == 5
    for model in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls"):
        types = {one.name: one.data_type for one in config(repo, model).input}
        assert types["lora_weights"] == model_config_pb2.TYPE_FP32
    assert not config(repo, "tensorrt_llm_bls").model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--set max_num_sequences=many", "parameter max_num_sequences must be a whole number, got 'many'"),
        ("--set triton_max_batch_size=", "the variable triton_max_batch_size needs a value: --set"),
        ("--set logits_datatype=FP32", "logits_datatype must be one of TYPE_FP16, TYPE_BF16, TYPE_FP32"),
        ("""--set 'dtype=a"b'""", "dtype must not contain quotes"),
        ("--lora-root /nowhere", "--lora-root /nowhere is not a directory"),
        (f"--lora-root {ADAPTERS}/chinese", f"is an adapter: name the folder that holds it, {ADAPTERS}"),
        ("--set engine_dir=", "engine_dir. must name the model directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: str, words: str
) -> None:
    assert main(["repo", str(MODEL), "-o", str(tmp_path / "repo"), *shlex.split(arguments)]) == 1
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert said.count("\n") == 1
    assert not (tmp_path / "repo").exists()


def test_templates_that_were_filled_in_place_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the model that was given would be ignored."""
    monkeypatch.setattr(templates, "FOLDER", shutil.copytree(templates.FOLDER, tmp_path / "model_repo"))
    file = tmp_path / "model_repo" / "tensorrt_llm" / "config.pbtxt"
    file.write_text(file.read_text(encoding="utf-8").replace("${engine_dir}", "/other"), encoding="utf-8")
    assert main(["repo", str(MODEL), "-o", str(tmp_path / "repo")]) == 1
    assert f"{file} is filled already: put the template back" in capsys.readouterr().err


def test_only_what_it_wrote_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    repo = written(tmp_path / "repo")
    written(repo, "--models", "tensorrt_llm", "--set", "max_seq_len=64")
    assert sorted(path.name for path in repo.iterdir()) == [MARK, "tensorrt_llm"]
    assert json.loads((repo / MARK).read_text(encoding="utf-8"))["values"]["max_seq_len"] == "64"
    (repo / "mine").mkdir()
    assert main(["repo", str(MODEL), "-o", str(repo)]) == 1
    assert "holds mine, which manylora repo did not write" in capsys.readouterr().err
    theirs = tmp_path / "theirs"
    shutil.copytree(templates.FOLDER, theirs)
    assert main(["repo", str(MODEL), "-o", str(theirs)]) == 1
    assert "did not write" in capsys.readouterr().err
    (theirs / MARK).write_text('{"models": ["../repo"]}', encoding="utf-8")
    assert main(["repo", str(MODEL), "-o", str(theirs)]) == 1
    assert (repo / "tensorrt_llm").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give MODEL, or --model_repo=DIR"),
        ("--lora-root x", "--lora-root is for a repository that is written: give MODEL too"),
        ("base --model_repo=x", "--model_repo is a repository that is filled already"),
    ],
)
def test_triton_says_which_flags_go_together(
    capsys: pytest.CaptureFixture, arguments: str, words: str
) -> None:
    assert main(["triton", *shlex.split(arguments)]) == 1
    assert words in capsys.readouterr().err


def test_every_script_is_listed_and_an_unknown_one_named(capsys: pytest.CaptureFixture) -> None:
    assert main(["tool", "--help"]) == 0
    listed = capsys.readouterr().out
    for path in (*(ROOT / "tools").glob("*.py"), *(ROOT / "client").glob("*.py")):
        assert path.stem in listed
    assert main(["tool", "nothing"]) == 2
    assert "there is no script 'nothing'" in capsys.readouterr().err


TEXT = """name: "m" # ${comment}
max_batch_size: 4
data_type: ${lora_weights_data_type}
value: "${max_beam_width}"
"""


def repository(path: Path, text: str) -> Path:
    (path / "m" / "1").mkdir(parents=True)
    (path / "m" / "1" / "model.py").write_text("pass\n", encoding="utf-8")
    (path / "m" / "config.pbtxt").write_text(text, encoding="utf-8")
    return path


def test_defaults_are_filled_beside_the_repository(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT)
    check_filled(repo / "m" / "config.pbtxt")
    served = with_defaults(repo, tmp_path / "run")
    assert (served / "m" / "config.pbtxt").read_text(encoding="utf-8") == TEXT.replace(
        "${lora_weights_data_type}", "TYPE_FP16"
    )
    assert (served / "m" / "1" / "model.py").read_text(encoding="utf-8") == "pass\n"
    assert (repo / "m" / "config.pbtxt").read_text(encoding="utf-8") == TEXT


def test_a_filled_repository_is_served_as_it_is(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT.replace("${lora_weights_data_type}", "TYPE_FP16"))
    assert with_defaults(repo, tmp_path / "run") == repo


def test_a_template_filled_for_the_cpp_backend_is_served_by_the_python_one(tmp_path: Path) -> None:
    """triton_backend:tensorrtllm stands in every fill line of TensorRT-LLM's users."""
    repo = repository(
        tmp_path / "repo", 'name: "m"\nbackend: "tensorrtllm"\nvalue: "backends/tensorrtllm/x"\n'
    )
    served = with_defaults(repo, tmp_path / "run")
    assert (served / "m" / "config.pbtxt").read_text(encoding="utf-8") == (
        'name: "m"\nbackend: "python"\nvalue: "backends/tensorrtllm/x"\n'
    )
    assert (served / "m" / "1" / "model.py").is_file()


def test_what_has_no_default_is_named(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT.replace("4", "${triton_max_batch_size}"))
    with pytest.raises(ConfigError, match=r"fill_template.py with triton_max_batch_size:<value>"):
        check_filled(repo / "m" / "config.pbtxt")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """In a wheel's folder."""
    server = tmp_path / "pytriton" / "tritonserver"
    stub = (
        server / STUBS / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub"
    )
    for path in (stub, server / "bin" / "tritonserver"):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(0o755)
    return stub


def test_a_folder_without_execution_is_named(stub: Path, tmp_path: Path) -> None:
    """A file that may not be executed stands for a disk mounted with noexec: the system's answer is equal."""
    stub.chmod(0o644)
    server, run_dir = str(stub.parents[2] / "bin" / "tritonserver"), tmp_path / "run"
    with pytest.raises(ConfigError, match=f"^{run_dir} is on a disk .*noexec.*: set TMPDIR to a folder"):
        find_tritonserver(server, run_dir)

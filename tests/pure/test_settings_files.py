"""Protects files of settings: absent they are empty, and one that holds something else is named; and the
names under which a base model is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.config.model_folder import check_model_folder
from manylora.config.settings import read_settings
from manylora.errors import ConfigError
from manylora.openai.arguments import parse_options


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_settings(tmp_path / "config.json") == {}
    assert read_settings(tmp_path / "modules.json", list) == []


@pytest.mark.parametrize(
    "text, words",
    [("{", "is not valid JSON"), ("[" * 100_000, "is not valid JSON"), ("[1]", "must hold a JSON object")],
)
def test_a_file_that_holds_something_else_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"config.json {words}"):
        read_settings(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lora_config: {max_lora_rank: many}", "max_lora_rank must be a whole number, got 'many'"),
        ("kv_cache_config: {free_gpu_memory_fraction: x}", "gpu_memory_fraction must be a number, got 'x'"),
        ("max_num_seqs: many", "max_batch_size must be a whole number, got 'many'"),
        ("override_generation_config: [1]", "override_generation_config must be a JSON object"),
    ],
)  # fmt: skip
def test_a_text_where_a_number_belongs_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as found:
        parse_options([str(tmp_path), "--config", str(file)])
    assert isinstance(found.value, ValueError) and str(file) in str(found.value)
    file.write_text(
        "lora_config: {max_lora_rank: '8'}\noverride_generation_config: {top_k: 4}", encoding="utf-8"
    )
    made = parse_options([str(tmp_path), "--config", str(file)])
    assert made.sections["lora_config"].max_lora_rank == 8
    assert made.override_generation_config == {"top_k": 4}


def test_a_gguf_file_is_served_under_its_name_and_found_under_its_path(tmp_path: Path) -> None:
    for file, name in (
        ("Smol LM2-Q4_K_M.gguf", "Smol-LM2-Q4_K_M"),
        ("big-00002-of-00003.gguf", "big"),
        ("v1.5-f16.gguf", "v1.5-f16"),
    ):
        path = tmp_path / file
        path.touch()
        options = parse_options([str(path)])
        assert options.bases == (name,)
        assert {file, str(path)} <= set(options.paths)
    assert parse_options([str(path), "--served-model-name", "a", "b"]).bases == ("a", "b")
    assert parse_options([str(tmp_path)]).bases == (tmp_path.name,)
    with pytest.raises(
        ConfigError, match=r"^the file .*v1.5-q8.gguf does not exist \(did you mean .*v1.5-f16.gguf"
    ):
        check_model_folder(tmp_path / "v1.5-q8.gguf")

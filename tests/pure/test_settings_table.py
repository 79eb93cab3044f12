"""Protects the table of the engine's settings: each row is read by its name at each door, its bounds are
checked there, and docs/parameters.md has it with its default; files of settings and of models, which are
named if they are absent or of something else; and where generation defaults come from."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.cli import main
from manylora.config.engine import QUANT_SETTINGS, SETTINGS, EngineConfig, LoraCacheConfig, rename
from manylora.config.model_folder import check_adapter_path, check_model_folder
from manylora.config.repository import PARAMETERS
from manylora.config.settings import Setting, read_settings, rows
from manylora.doors.http.arguments import parse_options
from manylora.doors.http.options import ServeOptions
from manylora.doors.python.options import ARGUMENTS
from manylora.errors import ConfigError
from manylora.generation.defaults import LLAMA_CPP, model_defaults

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parameters.md"
WRONG: dict[str, Any] = {"int": "many", "float": "x", "bool": "maybe", "str": 5, "Path": 5}
NOT_ITS_OWN = {"cuda_graph_cache_size": "128"}  # 0 stands for it
DOORS = {"triton": PARAMETERS, "llm": ARGUMENTS}
NAMED = [(name, row) for names in DOORS.values() for name, row in names.items()]
ROWS = [row for kind in (EngineConfig, LoraCacheConfig) for row in rows(kind).values()]


@pytest.mark.parametrize(("name", "row"), NAMED, ids=[name for name, _ in NAMED])
def test_a_value_is_read_by_each_name_and_one_of_another_type_is_named(name: str, row: Setting) -> None:
    if row.default not in (None, ()):
        assert rename({name: row.default}, {name: row}) == {row.name: row.default}
        assert rename({name: str(row.default)}, {name: row}) == {row.name: row.default}
    wrong = WRONG.get(row.kind, 5) if not row.repeats else 5
    with pytest.raises(ConfigError, match=f"^at {re.escape(name)} must be "):
        rename({name: wrong}, {name: row}, "at ")


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_default_is_within_the_bounds_and_what_is_out_of_them_is_named(row: Setting) -> None:
    row.check(row.default)
    assert row.help
    bounds = [row.least - 1] if row.least is not None else []
    bounds += [row.most + 1] if row.most is not None else []
    bounds += [row.above] if row.above is not None else []
    for value in [*bounds, *(["other"] if row.choices else [])]:
        with pytest.raises(ConfigError, match=f"^{row.named or row.name} must be "):
            row.check(value)
        config: Any = EngineConfig(Path("m")) if row.name in rows(EngineConfig) else LoraCacheConfig()
        with pytest.raises(ConfigError):
            replace(config, **{row.name: value})


def test_no_two_rows_have_one_name_at_a_door() -> None:
    for names in ([row.parameter for row in SETTINGS], [row.llm for row in SETTINGS]):
        given = [name for name in names if name]
        assert len(given) == len(set(given))
    for door in ("serve", "bench", "build"):
        flags = [flag for row in SETTINGS for flag in getattr(row, door).split()]
        assert len(flags) == len(set(flags)), door


@pytest.mark.parametrize(
    ("door", "command"),
    [("serve", "serve"), ("serve", "fleet"), ("bench", "bench throughput"), ("build", "build")],
)
def test_every_flag_of_a_row_is_in_the_help_of_its_command(
    door: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]+)", capsys.readouterr().out)}
    assert {flag for row in SETTINGS for flag in getattr(row, door).split()} <= shown


def test_every_parameter_is_documented_with_its_default() -> None:
    documented: dict[str, str] = {}
    for names, default in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.M
    ):
        found = re.findall(r"\w+", names)
        values = (
            default.split(", ") if len(found) > 1 and default.count(", ") == len(found) - 1 else [default]
        )
        documented |= dict(zip(found, values * (len(found) if len(values) == 1 else 1), strict=True))
    for name, row in PARAMETERS.items():
        assert name in documented, name
        numeric = isinstance(row.default, int | float) and not isinstance(row.default, bool)
        if numeric and row not in QUANT_SETTINGS and name not in ("max_queue_size", *NOT_ITS_OWN):
            assert re.split("[, ]", documented[name])[0].strip("`") == str(row.default), name


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


TOLD = f"cannot be read: Permission denied; let the user of this process, uid {os.getuid()}, read it$"
LONG = Path("a" * 300)  # no disk has such a name; the system's error is any that is not expected


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's, whose files nobody may open; root may open all others."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}", encoding="utf-8")

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    return tmp_path


def test_a_file_that_may_not_be_read_is_named_with_the_user(unreadable: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{unreadable / 'model.safetensors'} {TOLD}"):
        check_model_folder(unreadable)
    with pytest.raises(ConfigError, match=f"^{unreadable / 'config.json'} {TOLD}"):
        read_settings(unreadable / "config.json")


def test_any_other_reason_is_told(tmp_path: Path) -> None:
    for check in (check_model_folder, check_adapter_path):
        with pytest.raises(ConfigError, match=r"^a+.* cannot be read: File name too long$"):
            check(LONG)
    with pytest.raises(ConfigError, match=r"^a+.* cannot be read: File name too long$"):
        ServeOptions(tmp_path, lora_root=(LONG,))


def folder(path: Path, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def test_the_models_own_file_counts_as_far_as_it_is_supported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert model_defaults(tmp_path, 100).fields == {}
    own = folder(tmp_path / "m", temperature=0.6, top_k=20, top_p=1.5, num_beams=4, eos_token_id=[7, 900])
    found = model_defaults(own, 100)
    assert (found.fields, found.end_ids) == ({"temperature": 0.6, "top_k": 20}, None)
    told = [record.message for record in caplog.records]
    assert ["top_p" in told[0], "num_beams" in told[1], "900" in told[2], len(told)] == [True, True, True, 3]
    assert model_defaults(own, 100, "vllm").fields == {}
    assert model_defaults(own, 1000).end_ids == (7, 900)


def test_what_the_operator_says_replaces_it(tmp_path: Path) -> None:
    own, other = folder(tmp_path / "m", do_sample=False, top_k=20), folder(tmp_path / "o", top_p=0.5)
    assert model_defaults(own, 100).fields == {"top_k": 20, "temperature": 0.0}
    assert model_defaults(own, 100, "auto", {"temperature": 0.3}).fields == {"top_k": 20, "temperature": 0.3}
    assert model_defaults(own, 100, "vllm", {"max_new_tokens": 9}).max_tokens == 9
    assert model_defaults(own, 100, str(other)).fields == {"top_p": 0.5}
    for source, override, words in (
        (str(tmp_path), {}, "has no generation_config.json: give auto, vllm, or a folder"),
        (str(folder(tmp_path / "b", top_p=3)), {}, "top_p must be a number from 0 to 1"),
        ("auto", {"temprature": 1}, "override_generation_config: temprature is not supported"),
        ("auto", {"temperature": "1"}, "override_generation_config: temperature must be a number"),
    ):
        with pytest.raises(ConfigError, match=words):
            model_defaults(own, 100, source, override)


def test_a_gguf_file_without_defaults_gets_llama_cpps(tmp_path: Path) -> None:
    own = folder(tmp_path / "m", eos_token_id=[3])
    (own / "model.gguf").touch()
    assert model_defaults(own, 100).fields == LLAMA_CPP
    assert model_defaults(own, 100, "vllm").fields == {}
    assert model_defaults(own, 100, "auto", {"top_k": -1}).fields == {**LLAMA_CPP, "top_k": -1}
    folder(own, temperature=0.1)
    assert model_defaults(own, 100).fields == {"temperature": 0.1}

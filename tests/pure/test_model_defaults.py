"""Protects the base model's generation defaults: where they come from, and what replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manylora.errors import ConfigError
from manylora.generation.defaults import LLAMA_CPP, model_defaults


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

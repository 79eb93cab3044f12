"""Protects the reading of config.json: what it leaves out is what transformers takes for that class."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import decoder_of
from safetensors.torch import load_file, save_file
from tiny_configs import COMMON, ENCODER_DECODER_FAMILIES, FAMILIES, MOE_FAMILIES
from tiny_models import make_model

from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.families import gemma

VARIANTS = {**FAMILIES, **MOE_FAMILIES, **ENCODER_DECODER_FAMILIES}
MULTIMODAL = "Gemma3ForConditionalGeneration"
WITHOUT_CLASS = {"InternLM2ForCausalLM"}


@lru_cache
def classes() -> dict[str, Any]:
    """Our architectures, and the configuration classes of transformers."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )  # fmt: skip
    kinds = {one: kind for table in tables for kind, one in table.items() if one in ARCHITECTURES}
    kinds["InternLM3ForCausalLM"] = "internlm3"
    return {architecture: type(AutoConfig.for_model(kind)) for architecture, kind in kinds.items()}


@lru_cache
def variants() -> dict[str, dict[str, Any]]:
    """Of each class the variant with the most settings: its name, and these settings."""
    richest = {
        kind: (name, settings)
        for name, (kind, settings) in sorted(VARIANTS.items(), key=lambda item: len(item[1][1]))
    }
    return dict(richest.values())


def config_of(name: str, settings: dict[str, Any], old: bool) -> dict[str, Any]:
    """Every key of a config.json."""
    from transformers import AutoConfig

    kind = VARIANTS[name][0]
    common = COMMON
    if name in ENCODER_DECODER_FAMILIES:
        common = {key: value for key, value in COMMON.items() if not key.startswith(("num_", "hidden"))}
    made = AutoConfig.for_model(kind, **{**common, **settings})
    raw = made.to_dict()
    raw["architectures"] = [one for one, cls in classes().items() if cls is type(made)]
    rope = raw.pop("rope_parameters", None)
    if not old:
        return raw if rope is None else {**raw, "rope_parameters": rope}
    if "full_attention" in (rope or {}):
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        share = rope.pop("partial_rotary_factor", None)
        raw["rotary_emb_base" if kind == "gpt_neox" else "rope_theta"] = rope.pop("rope_theta")
        if share is not None:
            raw["rotary_pct" if kind == "gpt_neox" else "partial_rotary_factor"] = share
        raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return raw


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig | str:
    """Without the ids that end a sequence: these are of generation, and have no defaults."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    try:
        return replace(read_model_config(folder), eos_token_ids=())
    except ConfigError as error:
        return str(error).replace(str(folder), "")


def completed(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The same with all that transformers takes in place of what is missing. None: it refuses it."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.for_model(**json.loads(json.dumps(raw))).to_dict()
    except Exception:
        return None
    return json.loads(json.dumps({**found, "architectures": raw["architectures"]}, default=str))


def test_defaults_are_those_of_the_class() -> None:
    for architecture in sorted(ARCHITECTURES.keys() - WITHOUT_CLASS):
        kind = classes()[architecture]
        theirs = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
        ours = dict(ARCHITECTURES[architecture].defaults)
        if theirs.get("rope_parameters", 0) is None and "rotary_pct" not in ours:
            theta = kind.default_theta
            assert ours["rope_theta"] == (theta["global"] if isinstance(theta, dict) else theta), architecture
        different = {key: (value, theirs.get(key)) for key, value in ours.items() if theirs.get(key) != value}
        assert set(different).isdisjoint(theirs), architecture  # keys that the class lacks have no effect
    assert ARCHITECTURES["Gemma3ForCausalLM"].defaults == gemma.GEMMA3


@pytest.mark.parametrize(
    ("old", "every"), [(False, True), (True, False), pytest.param(True, True, marks=pytest.mark.extended)]
)
def test_a_missing_key_is_what_transformers_takes(old: bool, every: bool, tmp_path: Path) -> None:
    """Every key of the class, one after the other; and all of them at once. old: in a config.json as before
    transformers 5, of which the keys that are the same now need not be left out again."""
    for name, settings in variants().items():
        if old and "gemma4" in name:  # it came with transformers 5
            continue
        raw = config_of(name, settings, old)
        now = {} if every else config_of(name, settings, old=False)
        least = {key: raw[key] for key in ("architectures", "model_type")}
        left_out = [key for key in raw.keys() - least.keys() if key not in now or raw[key] != now[key]]
        files = [raw, least, *({k: v for k, v in raw.items() if k != key} for key in left_out)]
        compared, wholes = 0, dict[str, ModelConfig | str]()
        for file in files:
            whole = completed(file)
            if whole is None:
                continue
            text, found = json.dumps(whole), read(tmp_path / "ours", file)
            if text not in wholes:
                wholes[text] = read(tmp_path / "whole", whole)
            assert found == wholes[text], (name, sorted(raw.keys() - file.keys()))
            compared += isinstance(found, ModelConfig)
        assert compared > 0.6 * len(files), name


LISTS = {
    "layer_types": ["linear_attention"] * 31 + ["full_attention"],
    "layers_block_type": ["full_attention", "mlp"],
}
NEEDED = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 2}}  # keys without a default


def test_a_key_under_its_other_name(tmp_path: Path) -> None:
    for architecture in sorted(ARCHITECTURES.keys() - WITHOUT_CLASS):
        kind, defaults = classes()[architecture], ARCHITECTURES[architecture].defaults
        needed = {"model_type": kind.model_type, **NEEDED.get(architecture, {})}
        raw = {"architectures": [architecture], **needed}
        for alias, name in kind.attribute_map.items():
            if name in defaults:
                default = defaults[name]
                other = not default if isinstance(default, bool) else LISTS.get(name) or 2 * default
                found, case = read(tmp_path, {**raw, alias: other}), (architecture, alias)
                assert found == read(tmp_path, {**raw, name: other}) != read(tmp_path, raw), case


def test_the_text_of_a_multimodal_model_that_says_little(tmp_path: Path) -> None:
    raw = {"architectures": [MULTIMODAL], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    for text in ({}, {"num_hidden_layers": 3, "torch_dtype": "float32", "eos_token_id": [1, 106]}):
        file = {**raw, "text_config": text}
        whole = completed(file)
        assert whole is not None
        found = read(tmp_path / "ours", file)
        assert isinstance(found, ModelConfig) and found == read(tmp_path / "whole", whole)
        assert found.dtype == "bfloat16"
    assert read_model_config(tmp_path / "ours").eos_token_ids == (1, 106)


def test_the_ids_that_end_a_sequence(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    generation = model / "generation_config.json"
    for said, expected in (
        (None, (257,)),
        ({"eos_token_id": [5, 6]}, (5, 6)),
        ({"eos_token_id": 7}, (7,)),
        ({"bos_token_id": 1}, (257,)),
    ):
        generation.unlink(missing_ok=True)
        if said is not None:
            generation.write_text(json.dumps(said), encoding="utf-8")
        assert read_model_config(model).eos_token_ids == expected


def test_the_dtype_that_config_json_does_not_say_is_that_of_the_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    weights = load_file(model / "model.safetensors")
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    raw = {key: value for key, value in raw.items() if "dtype" not in key}
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        stored = {name: weight.to(kind) for name, weight in weights.items()}
        save_file(stored, model / "model.safetensors", {"format": "pt"})
        for said in ({}, {"torch_dtype": None}):
            (model / "config.json").write_text(json.dumps({**raw, **said}), encoding="utf-8")
            assert read_model_config(model).dtype == str(kind).removeprefix("torch.")
    (model / "config.json").write_text(json.dumps({**raw, "dtype": "float16", "torch_dtype": "float32"}))
    assert read_model_config(model).dtype == "float16"


def test_a_head_that_differs_is_used_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    weights = load_file(model / "model.safetensors")
    path = model / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))

    def head(**settings: Any) -> torch.Tensor:
        path.write_text(json.dumps({**raw, **settings}), encoding="utf-8")
        decoder = decoder_of(model)
        assert decoder.config.tie_word_embeddings == torch.equal(
            weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        )
        return decoder._ops.linear(torch.eye(64), decoder._head, None).T

    torch.testing.assert_close(head(tie_word_embeddings=True), weights["lm_head.weight"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(head(tie_word_embeddings=True), weights["lm_head.weight"])
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    del raw["tie_word_embeddings"]
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks lm_head.weight .*must have tie_word_embeddings true"):
        decoder_of(model)

"""Protects that adapter_config.json is taken at its word or refused: values of another type, numbers that are
none, what is too large or too deep, and how training began."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_cases import CONFIG, edited
from driver import Driver, agree, decoder_of
from tiny_models import (
    make_adapter,
    make_kind,
    make_model,
    reference_logits,
)

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft.settings import SETTING_TYPES
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora, read_whole
from manylora.adapters.modules import lora_modules
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config

IDS = [random.Random(5).randrange(3, 250) for _ in range(20)]
NAMES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("settings") / "model", "llama", seed=4)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "plain", model, 1, 4, NAMES)


@pytest.fixture(scope="module")
def options(model: Path) -> ReadOptions:
    return ReadOptions(lora_modules(read_model_config(model)), BaseWeights(model), num_layers=2)


def refused(adapter: Path, options: ReadOptions) -> str:
    """The reason. It comes within two seconds of this thread's time."""
    began = time.thread_time()
    with pytest.raises(AdapterInvalidError) as error:
        read_whole(find_source(adapter), options)
    assert time.thread_time() - began < 2
    assert len(str(error.value)) < 500
    return str(error.value)


DEEP: Any = json.loads("[" * 400 + "]" * 400)
NAN, INF = float("nan"), float("inf")
# Values of another type than the one that the key's row in SETTING_TYPES names.
WRONG: dict[str, list[Any]] = {
    "true or false": ["no", "false", 1, 0, [], {}, NAN],
    "a count": ["many", "8", -1, 8.0, True, NAN, INF, 2**31, 10**40, [8], {}, DEEP],
    "a number": ["8", NAN, INF, -INF, 10**400, True, [1], {}, DEEP],
    "a name,": [3, True, {}, {"q_proj": 1}, [1], ["q_proj", None], [["q_proj"]], DEEP, NAN],
    "the number of a layer": ["1", -1, 1.0, [0, "1"], {}, {"1": 2}, [[1]], DEEP, NAN],
    "a text": [3, True, ["x"], {}, DEEP, NAN],
    "an object": [3, True, ["x"], "x", DEEP, NAN],
}  # fmt: skip


@pytest.mark.parametrize(("what", "_", "names"), SETTING_TYPES)
def test_a_value_of_another_type_is_refused_by_its_key(
    what: str, _: object, names: str, adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    wrong = max((start for start in WRONG if what.startswith(start)), key=len)
    settings = json.loads((adapter / CONFIG).read_text())
    folder = edited(adapter, tmp_path / "a")
    for name in names.split():
        for value in WRONG[wrong]:
            if name == "peft_type":
                continue  # which is judged first, as a kind
            (folder / CONFIG).write_text(json.dumps(settings | {name: value}))
            assert f"{CONFIG}: {name} must be {what}, got " in refused(folder, options), (name, value)
        (folder / CONFIG).write_text(json.dumps(settings | {name: None}))
        if name not in ("lora_alpha", "r", "peft_type", "target_modules"):
            read_whole(find_source(folder), options)


@pytest.mark.parametrize(
    ("name", "what", "values"),
    [
        (
            "rank_pattern",
            "an integer from 1 to",
            ["many", 0, -4, 4.0, NAN, 2**31, 10**40, None, [4], True, DEEP],
        ),
        ("alpha_pattern", "a number", ["8", NAN, -INF, 10**400, True, None, {"a": {}}, DEEP]),
    ],
)
def test_what_a_pattern_gives_its_modules_is_judged_also_where_it_means_none(
    name: str, what: str, values: list[Any], adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    folder = edited(adapter, tmp_path / "a")
    settings = json.loads((folder / CONFIG).read_text())
    for value in values:
        for module in ("q_proj", "nowhere"):
            (folder / CONFIG).write_text(json.dumps(settings | {name: {module: value}}))
            assert f"{CONFIG}: {name} of {module} must be {what}" in refused(folder, options), value


def test_a_list_of_very_many_names_takes_no_time(adapter: Path, options: ReadOptions, tmp_path: Path) -> None:
    many = edited(adapter, tmp_path / "many", target_modules=["x" * (1 + n % 5) for n in range(200_000)])
    began = time.thread_time()
    read_whole(find_source(many), options)
    assert time.thread_time() - began < 2
    most = edited(adapter, tmp_path / "most", target_modules=["q_proj"] * 10**6)
    assert "too large" in refused(most, options) or "at most" in refused(most, options)


@pytest.mark.parametrize("text", ['{"a":' * 10**5, "[" * 10**5 + "]" * 10**5])
def test_what_is_nested_very_deeply_is_no_configuration(
    text: str, adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    folder = edited(adapter, tmp_path / "a")
    (folder / CONFIG).write_text(text)
    assert "is not readable JSON" in refused(folder, options)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(.*a){25}", "(.*)*.*(.*)*x", "(q|q_|q_p)*!", ".*.*.*.*.*.*x", "(", "a{9999999999}"]
)
def test_expressions_that_never_end_are_refused(
    name: str, pattern: str, adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    reason = refused(edited(adapter, tmp_path / "a", **{name: {pattern: 4}}), options)
    assert name in reason and ("is too involved" in reason or "is not a pattern" in reason)


def test_an_expression_that_selects_modules_is_never_run(
    adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    """The file's matrices say which they are."""
    for n, name in enumerate(("target_modules", "exclude_modules")):
        folder = edited(adapter, tmp_path / str(n), **{name: "(.*.*.*.*)*!" * 9})
        began = time.thread_time()
        read_whole(find_source(folder), options)
        assert time.thread_time() - began < 2


def logits(model: Path, adapter: Path, options: ReadOptions) -> torch.Tensor:
    [found] = Driver(decoder_of(model), [IDS], [read_lora(find_source(adapter), 0, options)]).run()
    return found


@pytest.mark.parametrize("start", [False, "gaussian", "lora_ga"])
def test_beginnings_that_leave_the_base_as_it_is(
    start: object, model: Path, adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    """To PEFT, that of LoRA-GA is such a one once training is over."""
    folder = edited(adapter, tmp_path / "a", init_lora_weights=start)
    assert agree(logits(model, folder, options), reference_logits(model, folder, IDS))


def test_an_unconverted_lora_ga_is_told(adapter: Path, options: ReadOptions, tmp_path: Path) -> None:
    told: list[str] = []
    folder = edited(adapter, tmp_path / "a", init_lora_weights="lora_ga")
    read_whole(find_source(folder), replace(options, tell=told.append))
    assert [line for line in told if "a base that LoRA-GA had changed" in line]


@pytest.mark.parametrize(
    ("start", "advice"),
    [
        ("corda", "path_initial_model_for_weight_conversion"),
        ("pissa_niter_4", "path_initial_model_for_weight_conversion"),
        ("loftq", "say so by init_lora_weights true"),
    ],
)
def test_beginnings_that_need_another_base_say_what_to_do(
    start: str, advice: str, adapter: Path, options: ReadOptions, tmp_path: Path
) -> None:
    reason = refused(edited(adapter, tmp_path / "a", init_lora_weights=start), options)
    assert "needs a changed base model" in reason and advice in reason


def test_trainable_tokens_of_embedding_and_head(model: Path, options: ReadOptions, tmp_path: Path) -> None:
    tables = ["embed_tokens", "lm_head"]
    config = peft.TrainableTokensConfig(token_indices=sorted(set(IDS))[:5], target_modules=tables)
    folder = make_kind(tmp_path / "a", model, config, 1, 0.5)
    assert agree(logits(model, folder, options), reference_logits(model, folder, IDS))
    assert not agree(reference_logits(model, folder, IDS), reference_logits(model, None, IDS))

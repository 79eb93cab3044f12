"""Protects the first reading of an adapter: rows that compiled code takes from a file are what they were,
with the digest that others take; an adapter with a known layout is not judged again, and what is wrong with
it is still told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from row_files import RowFile
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model

from manylora.adapters.formats.peft_folder import read_peft_whole
from manylora.adapters.formats.read_options import KnownLayouts, ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.tensors import AdapterRow
from manylora.errors import AdapterInvalidError
from manylora.kernels import loading, native
from manylora.model.checkpoint import read_model_config

WEIGHTS = "adapter_model.safetensors"
# rank, in, out: many of them together, and some that are more than that alone
SHAPES = [
    (1, 1, 1), (1, 5, 3), (1, 100, 153), (1, 100, 154), (1, 127, 129), (2, 300, 200), (5, 333, 77),
    (16, 64, 128), (8, 768, 256), (16, 300, 783), *((1, n, n + 1) for n in range(600, 4000, 371)),
]  # fmt: skip


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReadOptions, list[Path]]:
    folder = tmp_path_factory.mktemp("alike")
    model = make_model(folder / "model", seed=1)
    adapters = [make_adapter(folder / f"made{seed}", model, seed=seed) for seed in (1, 2)]
    return ReadOptions(lora_modules(read_model_config(model), ()), digest=True), adapters


@pytest.fixture(autouse=True)
def loaded() -> None:
    if native.load() is None:
        pytest.skip("needs compiled kernels")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_rows_are_taken_with_their_digests(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, threads: int
) -> None:
    monkeypatch.setattr(loading, "TOGETHER", 0)
    monkeypatch.setattr(loading, "IN_CACHE", 20_000)
    made = RowFile(tmp_path / "rows", SHAPES, source, target, lambda a, b: np.concatenate((a, b), None))

    def take(descriptor: int) -> list[bytes] | None:
        digest = lambda numbers: blake3(numbers).digest()  # noqa: E731
        return loading.take_rows(descriptor, made.table, target, source, threads, digest)

    digests = made.read(take)
    assert digests == [blake3(b"float32\0" + numbers.tobytes()).digest() for numbers in made.numbers]
    made.check_memory()
    assert all(made.read(take, content) is None for content in made.broken(every=7))
    assert made.read(take) is not None


def rows_of(folder: Path, options: ReadOptions) -> list[AdapterRow]:
    content = read_peft_whole(folder, options)
    assert not content.extras
    return content.rows


def with_layouts(options: ReadOptions) -> ReadOptions:
    return ReadOptions(options.modules, digest=True, layouts=KnownLayouts())


@pytest.mark.parametrize("target", ["q_proj", "v_proj"])
def test_what_is_wrong_with_one_of_them_is_told(
    workshop: tuple[ReadOptions, list[Path]], tmp_path: Path, target: str
) -> None:
    options = with_layouts(workshop[0])
    rows_of(workshop[1][0], options)
    shutil.copytree(workshop[1][1], tmp_path / "bad")
    file = tmp_path / "bad" / WEIGHTS
    values = load_file(file)
    key = next(name for name in values if target in name and "lora_B" in name)
    values[key][-1, -1] = float("nan")
    save_file(values, file, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=f"{key}.*holds a NaN"):
        rows_of(tmp_path / "bad", options)


def test_those_that_differ_are_judged(workshop: tuple[ReadOptions, list[Path]], tmp_path: Path) -> None:
    """Another scaling, a tensor of another name or type, a longer file; but not the order of a set."""
    options = with_layouts(workshop[0])
    first = rows_of(workshop[1][0], options)
    shutil.copytree(workshop[1][0], tmp_path / "other")
    file, config = tmp_path / "other" / WEIGHTS, tmp_path / "other" / "adapter_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"lora_alpha": 1}), encoding="utf-8")
    other = rows_of(tmp_path / "other", options)
    assert all(one.content != two.content for one, two in zip(first, other, strict=True))
    config.write_text(json.dumps(settings | {"use_unheard_of": 1}), encoding="utf-8")
    with pytest.raises(AdapterInvalidError, match="use_unheard_of"):
        rows_of(tmp_path / "other", options)
    names = settings["target_modules"][::-1]
    config.write_text(json.dumps(settings | {"target_modules": names}), encoding="utf-8")
    rows_of(tmp_path / "other", options)
    kept = file.read_bytes()
    file.write_bytes(kept + b"0000")
    with pytest.raises(AdapterInvalidError, match="bytes, by its header"):
        rows_of(tmp_path / "other", options)
    file.write_bytes(kept.replace(b"v_proj.lora_A", b"v_prox.lora_A", 1))
    with pytest.raises(AdapterInvalidError, match="v_prox"):
        rows_of(tmp_path / "other", options)
    save_file(
        {key: tensor.to(torch.float16) for key, tensor in load_file(workshop[1][0] / WEIGHTS).items()}, file
    )
    assert rows_of(tmp_path / "other", options)


def test_one_of_which_something_was_told_is_told_of_again(
    workshop: tuple[ReadOptions, list[Path]], tmp_path: Path
) -> None:
    told: list[str] = []
    options = ReadOptions(workshop[0].modules, digest=True, layouts=KnownLayouts(), tell=told.append)
    shutil.copytree(workshop[1][0], tmp_path / "odd")
    config = tmp_path / "odd" / "adapter_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"strange": 1}), encoding="utf-8")
    for count in (1, 2):
        rows_of(tmp_path / "odd", options)
        assert len(told) == count

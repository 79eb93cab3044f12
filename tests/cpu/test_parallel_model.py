"""Protects what several ranks compute together: the logits of one process, for every family, way of sharing
and kind of adapter. The processes of a group start once, and run all cases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import Case, read_adapters, write_cases

from manylora.kernels.device import open_device
from manylora.lora.tensors import lora_input
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.testing.driver import Driver, agree
from manylora.testing.parity import KINDS, make_kind
from manylora.testing.tiny_models import make_model

LIMIT_S = 240.0  # for a group; it takes a tenth of that
WORKER = Path(__file__).with_name("rank_worker.py")
FEW = ("LoRA", "DoRA", "bias")

TP2, TP4, PP2, BOTH = {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}
SOME, FEW = ("LoRA", "rank 64", "DoRA", "bias", "both + DoRA", "norms saved"), ("DoRA + bias",)
Row = tuple[str, dict[str, int], tuple[str, ...], str | None]
# Name of the case: family, ranks, kinds of adapters, quant_algo. llama has fewer key heads than 4 ranks.
CASES: dict[str, Row] = {
    "llama tp2": ("llama", TP2, tuple(KINDS), None),
    "llama tp4": ("llama", TP4, SOME, None),
    "llama pp2": ("llama", PP2, tuple(KINDS), None),
    "llama both": ("llama", BOTH, SOME, None),
    **{f"{family} tp2": (family, TP2, FEW, None) for family in (
        "llama-mha-tied", "llama-biases", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt-neox", "olmo2",
        "cohere", "stablelm-parallel", "falcon", "falcon-new", "granite", "opt", "starcoder2",
    )},
    **{f"{family} tp4": (family, TP4, FEW, None) for family in ("olmo2", "gemma2", "falcon", "cohere")},
    **{f"{family} both": (family, BOTH, SOME, None) for family in ("gemma2", "gpt2")},
    "smollm3 pp2": ("smollm3", PP2, FEW, None),
    **{f"llama {algo}": ("llama", TP2, ("LoRA",), algo) for algo in ("W8A16", "FP8", "W8A8")},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@cache
def model_of(folder: Path, family: str) -> Path:
    return make_model(folder / family, family, seed=3)


@cache
def adapter_of(folder: Path, family: str, kind: str) -> Path:
    path = folder / f"{family}-{list(KINDS).index(kind)}"
    return make_kind(path, model_of(folder, family), kind, seed=list(KINDS).index(kind))


def case_of(folder: Path, name: str) -> Case:
    family, ranks, kinds, quant = CASES[name]
    adapters = ("", *(str(adapter_of(folder, family, kind)) for kind in kinds))
    return Case(
        name.replace(" ", "-"), str(model_of(folder, family)), **ranks, adapters=adapters, quant=quant
    )


def run_group(folder: Path, world: int, cases: list[Case]) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by case."""
    write_cases(folder / f"cases-{world}.json", cases)
    common = [str(world), str(folder / f"store-{world}"), str(folder / f"cases-{world}.json"), str(folder)]
    ranks = [subprocess.Popen([sys.executable, str(WORKER), str(rank), *common]) for rank in range(world)]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {case.name: [torch.load(folder / f"{case.name}.{r}.pt") for r in range(world)] for case in cases}


@pytest.fixture(scope="module")
def groups(folder: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (2, 4):
        mine = [case_of(folder, name) for name, (_, ranks, _, _) in CASES.items() if size_of(ranks) == world]
        if mine:
            found |= run_group(folder, world, mine)
    yield found


def size_of(ranks: dict[str, int]) -> int:
    return ranks.get("tp", 1) * ranks.get("pp", 1)


def one_process(case: Case) -> tuple[list[torch.Tensor], int]:
    """Logits of each sequence, and the bytes of the weights."""
    model = read_model_config(Path(case.model))
    cpu = open_device("cpu")
    decoder = load_decoder(Path(case.model), model, torch.float32, cpu, quant=case.quant_config)
    adapters = [a and lora_input(1, a.rows, a.extras) for a in read_adapters(case, model)]
    return Driver(decoder, case.sequences(), adapters).run(), decoder.weight_bytes


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(name: str, folder: Path, groups: dict[str, Any]) -> None:
    case = case_of(folder, name)
    ranks = groups[case.name]
    assert "error" not in ranks[0], ranks[0]["error"]
    expected, _ = one_process(case)
    kinds = ("base", *CASES[name][2])
    for kind, found, wanted in zip(kinds, ranks[0]["logits"], expected, strict=True):
        assert agree(found, wanted), kind

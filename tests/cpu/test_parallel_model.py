"""Protects what several ranks compute together: the logits of one process, for every family, way of sharing
and kind of adapter. The processes of a group start once, and run all cases."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from driver import Driver, agree
from forked import ForkServer
from rank_worker import Case, adapters_of, write_cases
from tiny_models import make_adapter, make_model, make_tuned

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.tensors import lora_input
from manylora.checkpoints.quant.config import SERVED, QuantAlgo
from manylora.config.engine import LoraCacheConfig
from manylora.errors import AdapterInvalidError
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.ranks.adapters import AdapterSlicer
from manylora.ranks.mapping import Mapping
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_S = 240.0  # for a group; it takes a tenth of that

TP2, TP4, PP2, BOTH = {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}
EP2, TP4_EP2 = {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}
ALL, FEW = ("base", "lora", "dora", "fused", "extras"), ("dora", "extras")
# Each way to divide something, once: family, ranks, kinds of adapters, quant_algo. llama has fewer key heads
# than 4 ranks.
CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...], str | None]] = {
    "llama tp2": ("llama", TP2, ALL, None),
    "llama tp4": ("llama", TP4, ALL, None),
    "llama both": ("llama", BOTH, ALL, None),
    **{f"{family} tp2": (family, TP2, FEW, None) for family in (
        "llama-biases", "phi3", "gpt2", "gpt-neox", "falcon-new",
    )},
    "olmo2 tp4": ("olmo2", TP4, FEW, None),
    "mixtral tp4 ep2": ("mixtral", TP4_EP2, ALL[:3], None),
    "qwen2-moe tp2": ("qwen2-moe", TP2, ALL[:3], None),
    "gpt-oss tp2": ("gpt-oss", TP2, ALL[:3], None),
    "deepseek-v3 tp2": ("deepseek-v3", TP2, ALL[:3], None),
    "deepseek-v2 ep2": ("deepseek-v2", EP2, ALL[:3], None),
    "llama4 ep2": ("llama4", EP2, ALL[:3], None),
    "qwen3-next tp2": ("qwen3-next", TP2, ALL[:4], None),
    "lfm2 tp2": ("lfm2", TP2, ALL, None),
    "t5 tp2": ("t5", TP2, ALL, None),
    "bart tp2": ("bart", TP2, ALL, None),
    "t5 pp2": ("t5-wide", PP2, ALL, None),
    "bart both": ("bart", BOTH, ALL, None),
    "t5 pp2 W8A16": ("t5", PP2, ("lora", "dora"), "W8A16"),
    "gemma4 tp2": ("gemma4", TP2, ALL, None),
    "gemma4 moe tp2": ("gemma4-moe-wide", TP2, ALL[:4], None),
    "gemma4 shared pp2": ("gemma4-shared-8", PP2, ALL, None),
    "gemma4 shared pp4": ("gemma4-shared-8", {"pp": 4}, ALL, None),
    "gemma4 moe ep2": ("gemma4-moe-4", EP2, ALL[:4], None),
    "gemma3n tp2": ("gemma3n-wide", TP2, ALL, None),
    "gemma3n pp2": ("gemma3n", PP2, ALL, None),
    "granite4 tp2": ("granite4", TP2, ALL, None),
    "granite4 both": ("granite4-4", BOTH, ALL, None),
    "falcon-h1 tp2": ("falcon-h1-normed", TP2, ALL[:2], None),
    "nemotron-h latent tp2": ("nemotron-h-moe-latent", TP2, ALL, None),
    "nemotron-h latent pp2": ("nemotron-h-latent-6", PP2, ALL, None),
    "opt-350m tp2": ("opt-350m-wide", TP2, ALL, None),
    "opt-350m both": ("opt-350m", BOTH, ALL, None),
    "mixtral W8A16": ("mixtral", EP2, ("lora",), "W8A16"),
    **{f"llama-128 {algo}": ("llama-128", TP2, ("lora", "dora"), algo) for algo in SERVED},
    **{f"{family} {QuantAlgo.W4A16}": (f"{family}-128", TP2, ("lora", "dora"), QuantAlgo.W4A16)
       for family in ("gemma4-shared", "gemma4-moe", "granite4")},
}  # fmt: skip

MIXED = ["linear_attention", "full_attention"] * 2
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-moe-4": ("gemma4-moe", {"num_experts": 4}),
    # The second of four stages passes on what only the last one reads.
    "gemma4-shared-8": (
        "gemma4-shared",
        {
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                *["sliding_attention"] * 4,
                *["full_attention"] * 2,
            ],
        },
    ),
    "granite4-4": (
        "granite4",
        {"num_hidden_layers": 4, "layer_types": MIXED, "mamba_n_groups": 1},
    ),
    "gemma4-moe-wide": ("gemma4-moe", {"hidden_size": 128}),
    "gemma3n-wide": ("gemma3n", {"hidden_size": 128, "intermediate_size": 1024}),
    "opt-350m-wide": (
        "opt-350m",
        {"hidden_size": 128, "ffn_dim": 512, "max_position_embeddings": 64},
    ),
    "nemotron-h-latent-6": (
        "nemotron-h-moe-latent",
        {"layers_block_type": ["linear_attention", "full_attention", "moe"] * 2},
    ),
    "t5-wide": ("t5", {"d_model": 128, "d_ff": 512}),
}
# Whose halves of each row are whole groups of 4 bits.
MAMBA = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
NEMOTRON = {"mamba_head_dim": 32, "head_dim": 32, "moe_intermediate_size": 64, "moe_latent_size": 32}
GEMMA = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64, "intermediate_size": 128}
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 128},
    "gemma4-shared": {**GEMMA, "intermediate_size": 256},
    "gemma4-moe": {**GEMMA, "moe_intermediate_size": 64},
    "gemma3n": {"hidden_size": 128, "head_dim": 32, "intermediate_size": 1024},
    "granite4": {**MAMBA, "mamba_expand": 1, "shared_intermediate_size": 128},
    "nemotron-h-moe-latent": {**NEMOTRON, "moe_shared_expert_intermediate_size": 64},
}
CHANGED |= {f"{family}-128": (family, settings) for family, settings in WIDE.items()}


# Models on two ranks whose weights are like a large model's: most are in what ranks divide.
SIZED = [
    "llama tp2", "gemma4 moe tp2", "gemma3n tp2", "falcon-h1 tp2", "opt-350m tp2", "t5 pp2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@cache
def model_of(folder: Path, family: str) -> Path:
    if family in CHANGED:
        of, settings = CHANGED[family]
        return make_model(folder / family, of, seed=3, **settings)
    return make_model(folder / family, family, seed=3)


def case_of(folder: Path, name: str) -> Case:
    family, ranks, kinds, quant = CASES[name]
    model = str(model_of(folder, family))
    return Case(name.replace(" ", "-"), model, **ranks, kinds=kinds, quant=quant)


def run_group(
    forks: ForkServer, folder: Path, world: int, cases: list[Case]
) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by case."""
    write_cases(folder / f"cases-{world}.json", cases)
    common = [str(world), str(folder / f"store-{world}"), str(folder / f"cases-{world}.json"), str(folder)]
    ranks = [forks.start("rank_worker", [str(rank), *common]) for rank in range(world)]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    return {case.name: [torch.load(folder / f"{case.name}.{r}.pt") for r in range(world)] for case in cases}


@pytest.fixture(scope="module")
def groups(
    folder: Path, forks: ForkServer, request: pytest.FixtureRequest
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Of the cases that are to run."""
    found: dict[str, list[dict[str, Any]]] = {}
    to_run = [item for item in request.session.items if not item.get_closest_marker("skip")]
    chosen = [getattr(item, "callspec", None) for item in to_run]
    names = {call.params["name"] for call in chosen if call is not None and "name" in call.params}
    for world in (2, 4):
        mine = [
            case_of(folder, name)
            for name, (_, ranks, _, _) in CASES.items()
            if size_of(ranks) == world and name in names
        ]
        if mine:
            found |= run_group(forks, folder, world, mine)
    yield found


def size_of(ranks: dict[str, int]) -> int:
    return ranks.get("tp", 1) * ranks.get("pp", 1)


def one_process(case: Case) -> tuple[list[torch.Tensor], int]:
    """Logits of each sequence, and the bytes of the weights."""
    model = read_model_config(Path(case.model))
    cpu = open_device("cpu")
    decoder = load_decoder(Path(case.model), model, torch.float32, cpu, quant=case.quant_config)
    adapters = [a and lora_input(1, a.rows, a.extras) for a in adapters_of(case, model)]
    driver = Driver(decoder, case.sequences(), adapters, case.texts(model))  # type: ignore[arg-type]
    return driver.run(), decoder.weight_bytes


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(name: str, folder: Path, groups: dict[str, Any]) -> None:
    case = case_of(folder, name)
    ranks = groups[case.name]
    assert "error" not in ranks[0], ranks[0]["error"]
    expected, _ = one_process(case)
    for kind, found, wanted in zip(case.kinds, ranks[0]["logits"], expected, strict=True):
        assert agree(found, wanted), kind


@pytest.mark.parametrize("name", SIZED)
def test_a_rank_reads_and_holds_about_its_share_of_the_weights(
    name: str, groups: dict[str, Any], folder: Path
) -> None:
    case = case_of(folder, name)
    _, held = one_process(case)
    stored = (Path(case.model) / "model.safetensors").stat().st_size
    for rank in groups[case.name]:
        assert rank["held"] <= 0.56 * held  # norms and routers are on each
        assert rank["read"] <= 0.55 * stored


def test_one_that_cannot_be_divided_is_skipped_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among those that are loaded at start; a request for it is told why."""
    model = make_model(tmp_path / "model", "qwen2")
    turned = peft.RoadConfig(variant="road_1", group_size=32, target_modules=["k_proj"])
    make_tuned(tmp_path / "adapters" / "1", model, turned)
    make_adapter(tmp_path / "adapters" / "2", model)
    config = read_model_config(model)
    cache = LoraCacheConfig(gpu_memory_bytes=2**24, prefetch_dir=tmp_path / "adapters")
    slicer, cpu = AdapterSlicer(config, Mapping(4, 0, 2, 2)), torch.device("cpu")
    store = AdapterStore(config, cache, cpu, torch.float32, 2**30, slicer=slicer)
    assert (store.resident(1), store.resident(2)) == (False, True)
    assert "lora task 1 is skipped: attn_k: each rank has 16 outputs" in caplog.text
    with pytest.raises(AdapterInvalidError, match="cuts groups of 32 apart"):
        store.acquire(LoraInput(1), store.prepare(LoraInput(1)))
    store.close()

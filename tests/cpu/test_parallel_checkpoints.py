"""Protects quantised checkpoints on several ranks: the logits of one process, or an error that names the
layer whose groups would be cut."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from driver import agree
from forked import ForkServer
from gguf_files import Kind, make_gguf
from quantised_checkpoints import KINDS, make_pair
from rank_worker import Case
from selection import extended
from test_bitsandbytes import LINEARS as ATTENTION_AND_MLP
from test_bitsandbytes import quantised as made_by_bitsandbytes
from test_parallel_model import model_of, one_process, run_group
from tiny_models import make_model

from manylora.config.model_folder import local_model

PACKED = (
    "awq", "gptq 8", "packed 4 zero points", "packed 8", "int8", "fp8 by tensor", "fbgemm", "awq experts",
)  # fmt: skip
GGUF = {"Q8_0": Kind.Q8_0, "Q4_K": Kind.Q4_K}
REFUSED = {
    "gptq in order": "layers.0.self_attn.o_proj: the inputs of a weight that is stored in another order",
    "fp8 by block": "layers.0.mlp.down_proj: .* in groups of 32 inputs cannot be shared by 48 of its 96",
    "plain W4A16": "layers.0.mlp.down_proj: .* by 48 of its 96 inputs: only so many ranks .* its 3 groups",
}
# Families of which other layers than attention and MLPs are quantised, and how.
FAMILIES = ("gemma4-shared-128", "gemma3n-128", "granite4-128", "nemotron-h-moe-latent-128")
LAYOUTS = ("int8", "fp8 by block", "bitsandbytes True", "bitsandbytes False")
LINEARS = (*ATTENTION_AND_MLP, "in_proj", "out_proj", "per_layer_input_gate", "per_layer_projection",
           "linear_left", "linear_right", "fc1_latent_proj", "fc2_latent_proj")  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}  # halves are whole blocks of K types


def made(folder: Path, name: str) -> Path:
    if name in KINDS:
        return make_pair(folder, KINDS[name])[0]
    if name in GGUF:
        file = folder / f"{name}.gguf"
        make_gguf(file, make_model(folder / name, "llama", **WIDE), GGUF[name], Kind.Q8_0)
        return local_model(file)
    if name == "plain W4A16":
        return make_model(folder / "plain")
    family, _, layout = name.partition(" ")
    if family in FAMILIES:
        return quantised_in_all_layers(model_of(folder, family), folder, layout)
    model = make_model(folder / "model", seed=2, intermediate_size=128)
    return made_by_bitsandbytes(model, folder, layout == "True")[0]


def quantised_in_all_layers(model: Path, folder: Path, layout: str) -> Path:
    if layout.startswith("bitsandbytes"):
        return made_by_bitsandbytes(model, folder, layout.endswith("True"), LINEARS)[0]
    ends = tuple(f".{name}.weight" for name in LINEARS)
    return make_pair(folder, KINDS[layout], wide=model, linear=ends)[0]


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, forks: ForkServer, request: pytest.FixtureRequest
) -> dict[str, tuple[Case, list[dict[str, Any]]]]:
    """By name of the checkpoint, the case and what each rank found; of those that are to run."""
    folder = tmp_path_factory.mktemp("checkpoints")
    chosen = {call.params.get("name") for item in request.session.items if (call := callspec(item))}
    names = [name for name in (*NAMES, *REFUSED) if name in chosen]
    cases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name in names:
            own = folder / name.replace(" ", "-")
            own.mkdir()
            quant = "W4A16" if name.startswith("plain") else None
            cases.append(Case(name, str(made(own, name)), tp=2, kinds=("base", "lora", "dora"), quant=quant))
        found = run_group(forks, folder, 2, cases)
    return {case.name: (case, found[case.name]) for case in cases}


def callspec(item: pytest.Item) -> Any:
    return getattr(item, "callspec", None)


FIRST = (  # each family and each layout, once
    *PACKED, "bitsandbytes True", "bitsandbytes False", *GGUF,
    *(f"{family} {layout}" for family, layout in zip(FAMILIES, LAYOUTS, strict=True)),
)  # fmt: skip
NAMES = (*FIRST, *(n for n in map(" ".join, product(FAMILIES, LAYOUTS)) if n not in FIRST))


@pytest.mark.parametrize("name", [*FIRST, *extended(*NAMES[len(FIRST) :])])
def test_ranks_compute_what_one_process_does(name: str, cases: dict[str, Any]) -> None:
    case, ranks = cases[name]
    assert "error" not in ranks[0], ranks[0]["error"]
    expected, held = one_process(case)
    for kind, found, wanted in zip(case.kinds, ranks[0]["logits"], expected, strict=True):
        assert agree(found, wanted), kind
    assert all(rank["held"] < 0.65 * held for rank in ranks)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_cut_is_named(name: str, cases: dict[str, Any]) -> None:
    for rank in cases[name][1]:
        assert re.search(REFUSED[name], rank["error"])

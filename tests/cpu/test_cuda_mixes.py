"""Protects mixes and activated LoRA on the kernels of a GPU, under the interpreter where there is none: in
one batch, and in prompts that an adapter reaches halfway, they give the tokens of a CPU, which are compared
with PEFT elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import read, run
from test_graphs import CPU, open_engine
from tiny_models import make_adapter, make_model

from manylora.engine.engine import Engine
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.request import LoraInput, LoraMix, Request, SamplingConfig, mix

INVOKE = (7, 8)
PLAIN = {
    1: (8, ("q_proj", "v_proj")),
    2: (20, ("q_proj", "down_proj")),
    3: (3, ("q_proj", "o_proj", "gate_proj")),
}
Lora = LoraInput | LoraMix | None


class World:
    def __init__(self, path: Path) -> None:
        self.model = make_model(path / "model", seed=1, num_hidden_layers=1)
        self.loras: dict[int, LoraInput] = {}
        for number, (rank, modules) in PLAIN.items():
            folder = make_adapter(path / str(number), self.model, seed=number, rank=rank, modules=modules)
            self.loras[number] = read(folder, self.model, number)
        options = {"alora_invocation_tokens": list(INVOKE), "task_type": "CAUSAL_LM"}
        modules = ("q_proj", "k_proj", "v_proj", "up_proj")
        folder = make_adapter(path / "activated", self.model, seed=4, rank=5, modules=modules, **options)
        self.activated = read(folder, self.model, 4)

    def mixed(self, *members: tuple[int, float]) -> Lora:
        return mix([(self.loras[number], scale) for number, scale in members])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("cuda_mixes"))


def answers(engine: Engine, asked: list[tuple[tuple[int, ...], Lora]]) -> list[list[int]]:
    requests = [Request(prompt, SamplingConfig(max_tokens=3), lora) for prompt, lora in asked]
    found = run(engine, *requests)
    assert all(events[-1].error is None for events in found)
    engine.check()
    return [[token for event in events for token in event.token_ids] for events in found]


def requests_of(world: World) -> list[tuple[tuple[int, ...], Lora]]:
    """Mixes of several ranks and an adapter of each kind, under prompts of which one has no invocation, one
    has it at its start, and the others have it within a tile of rows or behind one."""
    prompt = tuple(range(30, 52))
    return [
        (prompt, world.mixed((1, 0.5), (2, -1.25), (3, 2.0))),
        ((*prompt[:17], *INVOKE, 3), world.activated),
        (prompt[:5], world.mixed((2, 0.7))),
        (prompt, world.activated),
        ((*INVOKE, *prompt[:3]), world.activated),
        ((*prompt[:3], *INVOKE, *prompt[3:9]), world.loras[1]),
        (prompt[:9], None),
    ]


@pytest.mark.extended
def test_a_batch_of_them_answers_as_on_a_cpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests_of(world)
    options = {"max_batch_size": len(asked)}
    plain = open_engine(world.model, monkeypatch, None, **options)
    device = Device(CPU, CudaOps(part_keys=32), "interpreted")
    made = open_engine(world.model, monkeypatch, device, **options)
    want = answers(plain, asked)
    assert answers(made, asked) == want
    assert answers(made, asked[::-1]) == want[::-1], "with what the first ones left in the KV cache"
    without = answers(plain, [(prompt, None) for prompt, _ in asked])
    changed = [one != other for one, other in zip(want, without, strict=True)]
    assert changed[3] is False, "no invocation: the base model"
    assert changed[0] and changed[1] and changed[4]

"""Protects how adapters are read: of each kind what `manylora inspect` says, with digest and pages, and what
the model answers with it; what is refused, with which words; and other model families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import Replay, without
from tiny_models import make_adapter, make_model
from workshop import INVOCATION, KINDS, make_exact_model, make_kind

from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, SamplingParams
from manylora.doors.cli.inspect import main as inspect
from manylora.errors import ManyloraError

PROMPT = [72, 101, 108, 108, *INVOCATION, 33]
NEW, LEAST_GAP = 8, 2e-3
COMPUTED = ("dora", "oft")
"""Kinds whose values are computed from the file's, and rounded."""
FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn", "c_proj"),
    "gemma3": ("q_proj", "down_proj"),
    "qwen3": ("q_proj", "up_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "t5": ("q", "v"),
}
Change = Callable[[Path], None]


def settings(**values: Any) -> Change:
    """Change adapter_config.json."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Change:
    """Change adapter_model.safetensors."""
    from safetensors.numpy import load_file, save_file

    def changed(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return changed


def put(name: str, value: np.ndarray) -> Change:
    return tensors(lambda found: found.update({name: value}))


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, Change] = {
    "no settings": lambda folder: (folder / "adapter_config.json").unlink(),
    "no weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "settings that are no JSON": lambda folder: _write(folder / "adapter_config.json", b"{"),
    "weights that are rubbish": lambda folder: _write(folder / "adapter_model.safetensors", b"rubbish"),
    "weights cut short": lambda folder: _write(
        folder / "adapter_model.safetensors", (folder / "adapter_model.safetensors").read_bytes()[:-8]
    ),
    "an unknown kind": settings(peft_type="TELEPATHY"),
    "a rank of 0": settings(r=0),
    "a rank that is a text": settings(r="four"),
    "another rank than the tensors'": settings(r=5),
    "an alpha that is no number": settings(lora_alpha="big"),
    "replicated layers": settings(layer_replication=[[0, 1], [0, 1]]),
    "a NaN": put(Q_A, np.full((4, 64), np.nan, np.float32)),
    "an infinite value": put(Q_A, np.full((4, 64), np.inf, np.float32)),
    "a matrix of another width": put(Q_A, np.zeros((4, 63), np.float32)),
    "a matrix of integers": put(Q_A, np.zeros((4, 64), np.int32)),
    "A without B": tensors(lambda found: found.pop(Q_A.replace("lora_A", "lora_B"))),
    "a layer too many": put(Q_A.replace("layers.0", "layers.7"), np.zeros((4, 64), np.float32)),
    "an unknown module": put(Q_A.replace("q_proj", "x_proj"), np.zeros((4, 64), np.float32)),
    "an unknown tensor": put("magic", np.zeros(4, np.float32)),
    "no tensors": tensors(lambda found: found.clear()),
    "zeros": tensors(lambda found: [one.fill(0) for one in found.values()] and None),
}
SCENARIOS = [
    *(f"kind: {kind}" for kind in KINDS),
    *(f"refused: {name}" for name in REFUSED),
    *(f"family: {name}" for name in FAMILIES),
]


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


class Shop:
    """The tiny model, an LLM of it, and its adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_exact_model(folder / "model")
        self.llm = open_llm(self.model)

    def kind(self, kind: str, capsys: pytest.CaptureFixture[str]) -> Any:
        path = make_kind(self.folder / "kinds", self.model, kind)
        status = inspect([str(path), "--base", str(self.model)])
        lines = without(capsys.readouterr().out, folder=self.folder).splitlines()
        if kind in COMPUTED:
            lines = [line for line in lines if not line.startswith("digest")]
        return {
            "status": status,
            "inspect": lines,
            "answer": ask(self.llm, lora(path, 1 + KINDS.index(kind))),
        }

    def refused(self, name: str, capsys: pytest.CaptureFixture[str]) -> Any:
        path = self.folder / f"refused-{[*REFUSED].index(name)}"
        shutil.copytree(make_kind(self.folder / "kinds", self.model, "lora"), path)
        REFUSED[name](path)
        status = inspect([str(path), "--base", str(self.model)])
        told = without(capsys.readouterr().out.splitlines()[-1], folder=path)
        try:
            answer = ask(self.llm, lora(path, 100 + [*REFUSED].index(name)))
        except ManyloraError as error:
            answer = f"{type(error).__name__}: {without(str(error), folder=path)}"
        return {"status": status, "inspect": told, "answer": answer}

    def family(self, name: str) -> Any:
        model = make_model(self.folder / name, name, seed=5)
        adapter = make_adapter(self.folder / f"{name}-adapter", model, 3, 4, FAMILIES[name])
        with open_llm(model) as llm:
            return {"base": ask(llm), "adapter": ask(llm, lora(adapter, 1))}


def open_llm(model: Path) -> LLM:
    sizes = KvCacheConfig(max_tokens=512)
    return LLM(model, lora_config=LoraConfig(max_lora_rank=16), device="cpu", dtype="float32", max_seq_len=64,
               kv_cache_config=sizes)  # fmt: skip


def lora(path: Path, number: int) -> LoRARequest:
    return LoRARequest(path.name, number, str(path))


def ask(llm: LLM, chosen: LoRARequest | None = None) -> Any:
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, return_generation_logits=True)
    [made] = llm.generate([PROMPT], params, chosen, False)  # type: ignore[misc]
    found = made.outputs[0]
    second, first = np.sort(found.generation_logits, axis=-1)[:, -2:].T
    assert (first - second).min() > LEAST_GAP, (
        "another instruction set may take another token: choose another seed"
    )
    return {"tokens": found.token_ids, "logits": found.generation_logits}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("replay"))
    yield made
    made.llm.shutdown()


@pytest.mark.parametrize("name", SCENARIOS)
def test_adapters(name: str, shop: Shop, replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    what, _, case = name.partition(": ")
    if what == "family":
        replay(name, shop.family(case))
    else:
        replay(name, (shop.kind if what == "kind" else shop.refused)(case, capsys))


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names(SCENARIOS)

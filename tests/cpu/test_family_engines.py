"""Protects the engine on families that differ in what it touches: names, fused rows, windows, sizes of heads,
positions, chunks, latents, states and experts. Tokens are those of transformers + PEFT for the base and its
adapters in one step, in parts, with their blocks known, alone, after preemption, and as beams.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import linear_names
from running import ServedModel, answers, check_beams, request_of, tokens
from selection import extended
from test_moe import EXPERTS, in_block
from tiny_models import make_adapter, make_model

from manylora.config.model import ModelConfig
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.model.checkpoint import read_model_config

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    "falcon-new", "gemma3", "gpt-neox", "gpt2", "olmo2", "phi3", "gemma3n", "cohere2", "ministral3", "opt",
    "opt-350m", "gpt-oss", "gemma4", "gemma4-moe", "gemma4-shared", "llama4", "llama4-interleaved",
    "deepseek-v2-lite", "deepseek-v3", "glm4-moe", "qwen3-next-dense", "qwen3.5", "qwen3-next",
    "qwen3.5-moe", "lfm2", "granite4", "granite4-moe", "nemotron-h", "nemotron-h-moe",
    "nemotron-h-moe-latent", "falcon-h1",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "llama4": {"tokens_per_block": 12},  # chunks end within a block
    "qwen3.5": {"enable_overlap": True},
}
PLAIN = ("gate_proj", "up_proj", "down_proj")
OF_QWEN = (*(f"shared_expert.{name}" for name in PLAIN), "shared_expert_gate")
SHARED_EXPERTS = {
    "qwen3-next": OF_QWEN, "qwen3.5-moe": OF_QWEN, "llama4": ("shared_expert.up_proj",),
    "granite4-moe": ("shared_mlp.input_linear", "shared_mlp.output_linear"),
    "nemotron-h-moe": ("shared_experts.up_proj", "shared_experts.down_proj"),
    "nemotron-h-moe-latent": ("shared_experts.up_proj", "fc1_latent_proj", "fc2_latent_proj"),
}  # fmt: skip
COUNT = 8  # tokens of an answer
request = partial(request_of, count=COUNT)


class Served(ServedModel):
    """A model, and two adapters on all of its linear layers, made once."""

    def __init__(self, folder: Path, family: str, count: int = COUNT) -> None:
        super().__init__(folder / "model", folder / "prefetch", count)
        self.adapters += self.prefetch / "1", self.prefetch / "2"
        if folder.exists():
            return
        config = read_model_config(make_model(self.model, family, seed=5))
        modules = {"modules": linear_names(config).linears, **experts_of(config, family)}
        make_adapter(self.prefetch / "1", self.model, 1, rank=4, **modules)
        make_adapter(self.prefetch / "2", self.model, 2, rank=7, use_dora=config.moe is None, **modules)


def experts_of(config: ModelConfig, family: str) -> dict[str, Any]:
    if config.moe is None:
        return {}
    linears = [name for name in linear_names(config).linears if name not in PLAIN]
    shared = SHARED_EXPERTS.get(family, ())
    return {"modules": (*linears, *shared), **in_block({"target_parameters": EXPERTS}, family)}


@pytest.fixture
def served(workshop: Path) -> Any:
    return lambda family: Served(workshop / family, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch(family: str, served: Any) -> None:
    """Prompts of unequal lengths, some in parts of 16 and 32 tokens; again, from the cache; and alone."""
    model = served(family)
    engine = model.engine(max_num_tokens=40, **SETTINGS.get(family, {}))
    wanted = [(tokens(length, length), number % 3) for number, length in enumerate((21, 60, 33, 5, 48, 1))]
    found = answers(engine, *(request(*one) for one in wanted))
    model.check(found, wanted)
    assert answers(engine, *(request(*one) for one in wanted)) == found
    assert engine.stats().kv_tokens_reused
    assert [answers(engine, request(*one))[0] for one in wanted[:3]] == found[:3]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3.5", "granite4", "gemma3n", "gemma4-shared", "deepseek-v3"])
def test_preempted_sequences_go_on_as_before(family: str, served: Any) -> None:
    model = served(family)
    engine = model.engine(batch_scheduler_policy="max_utilization", max_tokens_in_paged_kv_cache=96)
    wanted = [(tokens(26, seed), seed % 3) for seed in range(5)]
    found = answers(engine, *(request(*one) for one in wanted))
    assert engine.stats().preemptions
    engine.close()
    model.check(found, wanted)


@pytest.mark.parametrize(
    "family", ["deepseek-v3", "llama4", "gpt-oss", "gemma4", "qwen3.5", *extended("gemma4-moe", "granite4")]
)
def test_beams(family: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(family)
    engine = model.engine(max_beam_width=3, **SETTINGS.get(family, {}))
    check_beams(engine, request(tokens(50, 1), 1), model.model, model.adapters[1], monkeypatch)
    engine.close()


@pytest.mark.parametrize("family", ["deepseek-v3", *extended("gemma3n")])
def test_the_path_of_a_gpu(family: str, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, or their interpreter; nothing is recorded."""
    device = Device(torch.device("cpu"), CudaOps(), "interpreted", None)
    monkeypatch.setattr("manylora.engine.build.open_device", lambda name: device)
    model = served(family)
    engine = model.engine(max_batch_size=2, max_seq_len=32, enable_cuda_graph=False)
    wanted = [(tokens(12 - number, number), number) for number in (0, 1)]
    found = answers(engine, *(request(*one, count=2) for one in wanted))
    engine.close()
    assert found == [model.expected(*one)[:2] for one in wanted]

"""Protects DoRA on routed experts: tokens and log probabilities are those of PEFT on experts that are linear
layers, in one batch with other adapters, in a mix, with and without compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_cases import check_answer
from running import tokens
from tiny_models import load_transformers, make_model
from torch import Tensor, nn

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.kernels import native

NAMES = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "o_proj")
PROMPTS, NEW = [tokens(9, 1), tokens(31, 2)], 5


class Apart(nn.ModuleList):
    """The experts of a layer as linear layers, as transformers had them before it stacked their weights."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True):
            expert = nn.Module()
            for name, weight in zip(NAMES, (*gate_up.chunk(2), down), strict=True):
                linear = nn.Linear(*weight.T.shape, bias=False)
                linear.weight = nn.Parameter(weight.detach().clone())
                setattr(expert, name, linear)
            self.append(expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rows, place = torch.where(top_k_index == number)
            x = hidden_states[rows]
            y = expert.down_proj(nn.functional.silu(expert.gate_proj(x)) * expert.up_proj(x))
            found.index_add_(0, rows, y * top_k_weights[rows, place, None])
        return found


def adapted(model: Path, **options: Any) -> peft.PeftModel:
    made = load_transformers(model)
    for layer in made.model.layers:
        layer.mlp.experts = Apart(layer.mlp.experts)
    config = peft.LoraConfig(lora_alpha=7, target_modules=[*ATTENTION, *NAMES], **options)
    torch.manual_seed(options["r"])
    found = peft.get_peft_model(made, config).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3-moe", seed=3)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_answers_are_those_of_peft(
    is_compiled: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(native, "loaded", lambda: None)
    many = {"a": adapted(model, r=4, use_dora=True), "b": adapted(model, r=3, use_dora=True)}
    many["c"] = adapted(model, r=5)
    for name, one in many.items():
        one.save_pretrained(tmp_path / name)
    requests: list[Any] = [LoRARequest(name, n, str(tmp_path / name)) for n, name in enumerate(many, 1)]
    requests.append([(requests[0], 0.7), (requests[1], 0.5), (requests[2], 0.4)])
    base = adapted(model, r=1).unload()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    wholes = [one.merge_and_unload() for one in many.values()]
    for whole, scale in zip(wholes, (0.7, 0.5, 0.4), strict=True):
        for name, value in whole.state_dict().items():
            weights[name] += scale * (value - base.state_dict()[name])
    mixed = adapted(model, r=1).unload()
    mixed.load_state_dict(weights)
    params = SamplingParams(max_tokens=NEW, logprobs=1, ignore_eos=True)
    asked = [(prompt, n) for prompt in PROMPTS for n in range(len(requests))]
    with LLM(model, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in asked], params, [requests[n] for _, n in asked], False
        )
        for (prompt, number), output in zip(asked, outputs, strict=True):  # type: ignore[arg-type]
            made = output.outputs[0]
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *made.token_ids]])
                logits = [*wholes, mixed][number](ids).logits[0]
            check_answer(made, logits[len(prompt) - 1 : -1])

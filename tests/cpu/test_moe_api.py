"""Protects the Python API for mixtures of experts: TensorRT-LLM's snippets run with one word changed, and the
example's answers are those of its own adapters."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from tiny_models import make_adapter, make_model, reference_generate

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora._torch.peft.lora.moe_layout import make_per_expert_lora, reference_moe_lora_delta
from manylora.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe-api") / "base", "qwen3-moe", seed=2)


def config(**options: object) -> LoraConfig:
    targets = ["attn_q", "attn_k", "attn_v", "moe_gate", "moe_4h_to_h", "moe_h_to_4h"]
    settings = {"lora_target_modules": targets, "max_lora_rank": 16, "max_loras": 8, "max_cpu_loras": 8}
    return LoraConfig(**{**settings, **options})  # type: ignore[arg-type]


def test_adapters_of_experts_are_served_as_any_others(base: Path, tmp_path: Path) -> None:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = [
        make_adapter(tmp_path / "a", base, 1, rank=4, target_parameters=experts),
        make_adapter(tmp_path / "b", base, 2, rank=16, target_parameters=experts[1:], modules=("v_proj",)),
    ]
    named = {"moe_h_to_4h": "mlp.experts.gate_proj", "moe_4h_to_h": ["down_proj", "w2"]}
    with LLM(
        model=str(base), lora_config=config(trtllm_modules_to_hf_modules=named), moe_backend="CUTLASS"
    ) as llm:
        requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters))]
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        outputs = llm.generate(["one prompt"] * 3, params, lora_request=requests, use_tqdm=False)
    for output, adapter in zip(outputs, [None, *adapters], strict=True):
        expected = reference_generate(base, adapter, output.prompt_token_ids, 12)
        assert output.outputs[0].token_ids == expected


def test_targets_are_inferred_from_an_adapter(base: Path, tmp_path: Path) -> None:
    experts = ["mlp.experts.gate_up_proj"]
    adapter = make_adapter(tmp_path / "a", base, 1, rank=4, target_parameters=experts, modules=())
    with LLM(base, lora_config=config(lora_target_modules=[], lora_dir=[str(adapter)])) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        output = llm.generate("x", params, LoRARequest("a", 1, str(adapter)), use_tqdm=False)
    expected = reference_generate(base, adapter, output.prompt_token_ids, 6)
    assert output.outputs[0].token_ids == expected


def test_other_backends_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="Routed-expert MoE LoRA requires moe_backend='CUTLASS'; got "):
        LLM(base, lora_config=config(), moe_backend="TRITON")
    with pytest.raises(ConfigError, match="moe_backend must be 'CUTLASS' or left out"):
        LLM(base, moe_backend="TRITON")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "llm_api" / "moe_adapters.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["base", "first", "second"]
    assert len({line.partition(":")[2] for line in lines}) == 3


def test_synthetic_adapters() -> None:
    made = make_per_expert_lora(num_experts=8, rank=16, in_dim=2048, out_dim=5632, dtype=torch.bfloat16)
    assert made["A"].shape == (8, 16, 2048) and made["B"].shape == (8, 5632, 16)
    assert made["A"].dtype == torch.bfloat16
    small = make_per_expert_lora(4, 8, 64, 128, shared_side="A", seed=3, dtype=torch.float32)
    again = make_per_expert_lora(4, 8, 64, 128, shared_side="A", seed=3, dtype=torch.float32)
    assert all(torch.equal(small[side], again[side]) for side in "AB")
    assert all(torch.equal(small["A"][e], small["A"][0]) for e in range(4))
    assert not torch.equal(small["B"][1], small["B"][0])
    with pytest.raises(ValueError, match="shared_side"):
        make_per_expert_lora(4, 8, 64, 128, shared_side="C")
    x, chosen = torch.randn(5, 64), torch.tensor([0, 1, 2, 0, 1])
    delta = reference_moe_lora_delta(small["A"], small["B"], x, chosen)
    for t, e in enumerate(chosen.tolist()):
        torch.testing.assert_close(delta[t], small["B"][e] @ (small["A"][e] @ x[t]), rtol=1e-4, atol=1e-4)
    doubled = reference_moe_lora_delta(small["A"], small["B"], x, chosen, scale=2)
    torch.testing.assert_close(doubled, 2 * delta)

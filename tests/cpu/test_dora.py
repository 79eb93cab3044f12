"""Protects DoRA where PEFT itself has none. On quantised bases a magnitude is divided by the norms of the
weights that the layer multiplies with, so logits equal those of PEFT on the wide values, for each kind of
checkpoint and each way to round a plain one. On routed experts answers are those of PEFT on experts that are
linear layers, in one batch with other adapters, in a mix, with and without compiled kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapter_cases import check_answer
from driver import Driver, agree, decoder_of
from parity import linear_names, make_kind
from quantised_checkpoints import KINDS, make_pair
from running import answers, check_greedy, tokens
from safetensors.torch import load_file, save_file
from tiny_models import (
    load_transformers,
    make_adapter,
    make_model,
    make_wide,
    reference_generate,
    reference_logits,
)
from torch import Tensor, nn

from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, QuantConfig, SamplingParams
from manylora.adapters.convert import normalize_dora
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.cli import main
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.kernels import native
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import EffectiveWeights
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = [name for name in KINDS if "experts" not in name]


def read(adapter: Path, model: Path, quant: QuantConfig | None = None) -> LoraInput:
    config = read_model_config(model)
    base = BaseWeights(model, EffectiveWeights(config, quant))
    return read_lora(find_source(adapter), 0, ReadOptions(modules=lora_modules(config), base=base))


def check(model: Path, wide: Path, adapters: list[Path], quant: QuantConfig | None = None) -> None:
    """In one batch, logits are those of transformers and PEFT with the wide values."""
    decoder = decoder_of(model, max_seq_len=64, quant=quant)
    sequences = [tokens(30, seed) for seed in range(len(adapters))]
    found = Driver(decoder, sequences, [read(adapter, model, quant) for adapter in adapters]).run()
    for adapter, ids, logits in zip(adapters, sequences, found, strict=True):
        assert agree(logits, reference_logits(wide, adapter, ids)), adapter


@pytest.mark.parametrize("name", DENSE)
def test_every_kind_of_checkpoint(name: str, tmp_path: Path) -> None:
    """As it came, and built; PEFT runs on the wide values, as its own layers for some of these kinds have no
    DoRA, and those that do normalise with the values made wide."""
    quantised, wide = make_pair(tmp_path, KINDS[name])
    adapter = make_kind(tmp_path / "adapter", wide, "DoRA", 1)
    check(quantised, wide, [adapter])
    built = tmp_path / "built"
    assert main(["build", "--model_dir", str(quantised), "--output_dir", str(built)]) == 0
    check(built, wide, [adapter])


@pytest.mark.parametrize("kind", [KINDS["awq"], KINDS["gptq in order"], KINDS["fp8 by tensor"]])
def test_layers_that_were_left_plain(kind: object, tmp_path: Path) -> None:
    quantised, wide = make_pair(tmp_path, kind, plain=(".v_proj.weight", ".1.mlp.down_proj.weight"))
    kinds = ("DoRA + rsLoRA + patterns", "DoRA + bias", "both + DoRA")
    check(quantised, wide, [make_kind(tmp_path / str(i), wide, k, i) for i, k in enumerate(kinds)])


def test_a_head_that_is_quantised(tmp_path: Path) -> None:
    kind = KINDS["packed 8"]
    quantised, wide = make_pair(tmp_path, kind)
    weights, stored = (load_file(path / "model.safetensors") for path in (wide, quantised))
    made, values = kind.pack(np.random.default_rng(3), *weights["lm_head.weight"].shape)
    weights["lm_head.weight"] = torch.from_numpy(values)
    del stored["lm_head.weight"]
    stored |= {f"lm_head.{end}": part.contiguous() for end, part in made.items()}
    save_file(weights, wide / "model.safetensors", {"format": "pt"})
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    kinds = ("lm_head", "both + DoRA", "modules_to_save")
    check(quantised, wide, [make_kind(tmp_path / str(i), wide, k, i) for i, k in enumerate(kinds)])


def made_wide(model: Path, folder: Path, quant: QuantConfig) -> Path:
    return make_wide(folder, model, quant, linear_names(read_model_config(model))[0])


@pytest.mark.parametrize(
    ("family", "algo"), [("llama", "W8A16"), ("phi3", "FP8"), ("gpt2", "W4A16"), ("gpt-neox", "W4A16")]
)
def test_plain_checkpoints_that_are_rounded_at_start(algo: str, family: str, tmp_path: Path) -> None:
    model, quant = make_model(tmp_path / "model", family, seed=4), QuantConfig(algo)
    wide = made_wide(model, tmp_path / "wide", quant)
    kinds = ("DoRA", "DoRA + bias")
    adapters = [make_kind(tmp_path / str(i), model, kind, i) for i, kind in enumerate(kinds)]
    check(model, wide, adapters, quant)
    plain, rounded = (read(adapters[0], model, q).weights for q in (None, quant))
    assert not np.allclose(plain, rounded, rtol=1e-4), "rounding hardly matters here: this proves nothing"


def test_what_is_excluded_with_one_of_a_fused_layer_is_read_as_it_is(tmp_path: Path) -> None:
    model, quant = make_model(tmp_path / "model", seed=4), QuantConfig("W4A16", exclude_modules=["*q_proj"])
    attention = ["*q_proj", "*k_proj", "*v_proj"]
    wide = made_wide(model, tmp_path / "wide", QuantConfig("W4A16", exclude_modules=attention))
    check(model, wide, [make_kind(tmp_path / "adapter", model, "DoRA", 1)], quant)


def test_every_door_normalises_with_what_it_holds(tmp_path: Path) -> None:
    model, quant = make_model(tmp_path / "model", "llama", seed=5), QuantConfig("W4A16")
    wide = made_wide(model, tmp_path / "wide", quant)
    adapter, prompt = make_kind(tmp_path / "prefetch" / "3", model, "DoRA", 1), tokens(12)
    expected = reference_generate(wide, adapter, prompt, 10)
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_config": KvCacheConfig(max_tokens=128)}
    lora = LoraConfig(lora_dir=[str(adapter)], max_lora_rank=8)
    with LLM(model, quant_config=quant, lora_config=lora, **options) as llm:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        [output] = llm.generate([prompt], params, [LoRARequest("dora", 1, str(adapter))], False)
    assert list(output.outputs[0].token_ids) == expected
    cache = LoraCacheConfig(host_memory_bytes=2**22, prefetch_dir=tmp_path / "prefetch")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, quant=quant, lora=cache))
    request = Request(tuple(prompt), SamplingConfig(max_tokens=10), LoraInput(3))
    assert answers(engine, request) == [expected]
    engine.close()


def test_the_normaliser_and_the_converter_take_a_quantised_base(tmp_path: Path) -> None:
    quantised, wide = make_pair(tmp_path, KINDS["gptq in order"])
    adapter = make_kind(tmp_path / "adapter", wide, "DoRA", 1)
    assert normalize_dora(adapter, quantised, tmp_path / "normal") == 14
    expected = read(adapter, wide).weights
    np.testing.assert_allclose(read(tmp_path / "normal", quantised).weights, expected, rtol=1e-5)
    out = tmp_path / "npy"
    assert main(["convert", "-i", str(adapter), "-o", str(out), "--base", str(quantised)]) == 0
    np.testing.assert_allclose(read(out, quantised).weights, expected, rtol=1e-5)


def test_adapters_on_experts_that_are_held_in_fp8(tmp_path: Path) -> None:
    """Rounded at start, from the checkpoint, and built; other algorithms leave experts out."""
    model, quant = make_model(tmp_path / "model", "mixtral", seed=4), QuantConfig("FP8")
    linears = (*linear_names(read_model_config(model))[0], ".w1", ".w2", ".w3")
    wide = make_wide(tmp_path / "wide", model, quant, linears)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = make_adapter(tmp_path / "adapter", wide, 1, 4, ("q_proj", "o_proj"), target_parameters=experts)
    expected = reference_generate(wide, adapter, tokens(12), 8)
    built = tmp_path / "built"
    command = ["build", "--model_dir", str(model), "--output_dir", str(built), "--quant_algo"]
    assert main([*command, "FP8"]) == 0
    for held, asked in ((model, quant), (built, None)):
        assert answer(held, asked, read(adapter, held, asked)) == expected
    kind = replace(KINDS["fp8 by tensor"], family="mixtral")
    quantised, wide = make_pair(tmp_path / "came so", kind)
    adapter = make_adapter(tmp_path / "second", wide, 1, 4, ("q_proj",), target_parameters=experts)
    found = answer(quantised, None, read(adapter, quantised))
    check_greedy(found, 8, wide, adapter, tokens(12))
    with pytest.raises(RequestError, match="moe_h_to_4h not enabled"):
        answer(model, QuantConfig("W8A16"), read(adapter, model, QuantConfig("W8A16")))


def answer(model: Path, quant: QuantConfig | None, lora: LoraInput) -> list[int]:
    """Eight tokens of the engine, with the adapter's tensors along."""
    cache = LoraCacheConfig(gpu_memory_bytes=2**25, host_memory_bytes=2**25)
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, quant=quant, lora=cache))
    request = Request(tuple(tokens(12)), SamplingConfig(max_tokens=8), replace(lora, task_id=3))
    try:
        return answers(engine, request)[0]
    finally:
        engine.close()


NAMES = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "o_proj")
PROMPTS, COUNT = [tokens(9, 1), tokens(31, 2)], 5


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
    params = SamplingParams(max_tokens=COUNT, logprobs=1, ignore_eos=True)
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

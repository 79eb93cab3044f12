"""Protects DoRA on quantised bases: a magnitude of PEFT is divided by the norms of the weights that the layer
multiplies with, so logits equal those of PEFT on the wide values, for each kind of checkpoint and each way to
round a plain one; in memory there is one matrix at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from driver import Driver, agree
from parity import linear_names, make_kind
from quantised_checkpoints import KINDS, make_pair
from running import answers, check_greedy, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, make_wide, reference_generate, reference_logits

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
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.quant import EffectiveWeights
from manylora.model.weights import load_decoder
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = [name for name in KINDS if "experts" not in name]


def read(adapter: Path, model: Path, quant: QuantConfig | None = None) -> LoraInput:
    config = read_model_config(model)
    base = BaseWeights(model, EffectiveWeights(config, quant))
    return read_lora(find_source(adapter), 0, ReadOptions(modules=lora_modules(config), base=base))


def check(model: Path, wide: Path, adapters: list[Path], quant: QuantConfig | None = None) -> None:
    """In one batch, logits are those of transformers and PEFT with the wide values."""
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"), 64, quant)
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

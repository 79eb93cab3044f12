"""Protects LoRA and DoRA in one engine, from every source: greedy tokens equal PEFT's; pages of another type
than the model's; and DoRA that cannot be normalised. Of every kind: test_family_engines.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from adapter_cases import edited
from running import answers, check_greedy, run, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_logits

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.npy import write_llgtrt, write_npy
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.request import LoraInput, Request, SamplingConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LARGEST = 512


def mixed_logits(model: Path, inputs: Sequence[LoraInput | None]) -> list[torch.Tensor]:
    """One prompt of 20 tokens for each input, in one step of an engine; logits [20, vocab] of each."""
    cache = LoraCacheConfig(max_adapter_size=LARGEST, gpu_memory_bytes=2**25)
    engine = Engine(EngineConfig(model, device="cpu", dtype="float32", max_seq_len=32, lora=cache))
    params = SamplingConfig(max_tokens=1, return_context_logits=True)
    requests = [Request(tuple(tokens(20, s)), params, lora) for s, lora in enumerate(inputs)]
    logits = [events[0].context_logits for events in run(engine, *requests)]
    engine.close()
    return [torch.from_numpy(one) for one in logits if one is not None]


def open_store(config: ModelConfig, **options: object) -> AdapterStore:
    cache = LoraCacheConfig(max_adapter_size=LARGEST, gpu_memory_bytes=2**25, **options)  # type: ignore[arg-type]
    return AdapterStore(config, cache, torch.device("cpu"), torch.float32, 2**30)


def test_greedy_tokens_of_lora_dora_and_base_in_one_engine(workshop: Path) -> None:
    """DoRA as a PEFT directory of the prefetch directory and as tensors of a request."""
    model = make_model(workshop / "engine", "llama-biases", seed=10)
    lora = make_adapter(workshop / "prefetch" / "1", model, 1, rank=4, modules=ALL)
    dora = make_adapter(workshop / "prefetch" / "2", model, 2, rank=4, modules=ALL, use_dora=True)
    sent = make_adapter(workshop / "sent", model, 3, rank=9, modules=ALL, use_dora=True)
    write_npy(workshop / "prefetch" / "4", *read_adapter_folder(sent, BaseWeights(model)))
    write_llgtrt(workshop / "prefetch" / "5" / "a.safetensors", *read_adapter_folder(lora))
    cache = LoraCacheConfig(gpu_memory_bytes=2**22, prefetch_dir=workshop / "prefetch")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, lora=cache))
    assert engine.adapters.stats().host_adapters == 3  # 1 and 5 have the same content
    tensors = LoraInput(9, *read_adapter_folder(sent, BaseWeights(model)))
    wanted = [(None, None), (LoraInput(5), lora), (LoraInput(2), dora), (LoraInput(4), sent), (tensors, sent)]
    params = SamplingConfig(max_tokens=16)
    found = answers(engine, *(Request(tuple(tokens(9, i)), params, one) for i, (one, _) in enumerate(wanted)))
    for i, (answer, (_, adapter)) in enumerate(zip(found, wanted, strict=True)):
        check_greedy(answer, 16, model, adapter, tokens(9, i))
    engine.close()


def test_pages_in_float32_keep_adapters_of_a_bfloat16_model_as_they_were_saved(workshop: Path) -> None:
    model = make_model(workshop / "narrow", seed=12)
    weights = {name: one.bfloat16() for name, one in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")
    adapter = make_adapter(workshop / "wide", model, 5, rank=64, modules=ALL)
    ids = tokens(20, 6)
    want, given = reference_logits(model, adapter, ids), LoraInput(1, *read_adapter_folder(adapter))
    farthest = {}
    for dtype in ("float32", "bfloat16", "float16"):
        cache = LoraCacheConfig(gpu_memory_bytes=2**22, lora_adapter_dtype=dtype)
        engine = Engine(EngineConfig(model, device="cpu", dtype="float32", max_seq_len=64, lora=cache))
        params = SamplingConfig(max_tokens=1, return_context_logits=True)
        [[event]] = run(engine, Request(tuple(ids), params, lora=given))
        engine.close()
        farthest[dtype] = float((torch.from_numpy(event.context_logits) - want).abs().max())
    assert farthest["float32"] < 1e-4 * float(want.abs().max())
    assert farthest["bfloat16"] > 20 * farthest["float32"], "nothing was rounded"
    assert farthest["float16"] < farthest["bfloat16"]
    narrow = EngineConfig(
        model, device="cpu", dtype="float16", lora=LoraCacheConfig(lora_adapter_dtype="float32")
    )
    with pytest.raises(ConfigError, match="lora_adapter_dtype must be auto or float16, the compute dtype"):
        Engine(narrow)


def test_dora_that_cannot_be_normalised_is_refused(workshop: Path) -> None:
    model = make_model(workshop / "small", seed=11)
    good = make_adapter(workshop / "good", model, 4, rank=2, modules=("q_proj",), use_dora=True)
    with pytest.raises(AdapterInvalidError, match="use_dora: DoRA magnitudes are divided"):
        read_adapter_folder(good)
    with pytest.raises(AdapterInvalidError, match="base model's weights cannot be read for this"):
        read_adapter_folder(good, BaseWeights(workshop / "nowhere"))
    wide = make_model(workshop / "wide", seed=11, hidden_size=128)
    with pytest.raises(AdapterInvalidError, match=r"q_proj is F32 \[128, 128\] in the base model"):
        read_adapter_folder(good, BaseWeights(wide))
    key = next(key for key in load_file(good / "adapter_model.safetensors") if "magnitude" in key)
    for name, value, reason in [
        ("without", None, "q_proj is missing its DoRA magnitude"),
        ("short", torch.ones(5), "has 64 rows and a DoRA magnitude of 5"),
        ("nan", torch.full((64,), torch.nan), "NaN or an infinity"),
    ]:
        with pytest.raises(AdapterInvalidError, match=reason):
            read_adapter_folder(edited(good, workshop / name, {key: value}), BaseWeights(model))

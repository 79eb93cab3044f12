"""Protects the decoder: each family's logits equal transformers (+ PEFT), chunked, packed, adapters mixed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, agree, decoder_of
from parity import KINDS, linear_names, make_kind, read_from
from running import check_bfloat16, tokens
from safetensors.torch import load_file, save_file
from selection import extended
from tiny_configs import ENCODER_DECODER_FAMILIES, FAMILIES, MOE_FAMILIES
from tiny_models import (
    make_adapter,
    make_model,
    make_nemo,
    make_wide,
    read_adapter_folder,
    reference_logits,
)

from manylora.adapters.convert import main as hf_lora_convert
from manylora.adapters.convert import write_runtime_tensors
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import SERVED, QuantConfig
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.quant import EffectiveWeights
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")

# Of each layout of q, k and v one: apart, as one matrix, turned, and by groups of heads.
NEMO_FAMILIES = ("llama", "phi3", "gpt2", "gpt-neox", "falcon-new")
MORE_NEMO_FAMILIES = ("gemma3", "olmo2", "cohere2", "ministral3", "opt", "opt-350m", "qwen2")
# Families in whose blocks something else is rounded: norms, gates, scales, caps, recurrent layers.
ROUNDED = ("llama", "gemma2", "gemma3n", "gemma4", "gpt-neox", "nemotron", "qwen3.5", "lfm2", "falcon-h1")
ROUNDED_EXPERTS = ("mixtral", "gpt-oss", "deepseek-v3", "llama4", "gemma4-moe", "qwen3-next")


def test_every_architecture_has_a_tiny_model() -> None:
    from transformers.models.auto import modeling_auto as auto

    made = {auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind, _ in (FAMILIES | MOE_FAMILIES).values()}
    pairs = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    made |= {pairs[kind] for kind, _ in ENCODER_DECODER_FAMILIES.values()}
    others = {f"Gemma{kind}ForConditionalGeneration" for kind in ("3", "3n")}
    others |= {"Mistral3ForConditionalGeneration"}
    others |= {"InternLM2ForCausalLM", "InternLM3ForCausalLM", "Llama4ForConditionalGeneration"}
    others |= {f"Qwen{kind}ForConditionalGeneration" for kind in ("2VL", "2_5_VL", "3VL", "3VLMoe")}
    others |= {"LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"}
    others |= {"BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel", "Gemma3TextModel"}
    others |= {"CamembertModel", "MPNetModel", "ElectraModel", "DistilBertModel", "NomicBertModel"}
    others |= {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"}
    others |= {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
    assert made | others == set(ARCHITECTURES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_the_reference(family: str, workshop: Path) -> None:
    """The base, LoRA and DoRA, of unequal lengths in one batch."""
    model = make_model(workshop / family, family, seed=3, sharded=family == "llama")
    kinds = {None: tokens(1, 1), "patterns": tokens(37, 37), "DoRA + rsLoRA + patterns": tokens(60, 60)}
    adapters = [
        kind and make_kind(workshop / f"{family}-{n}", model, kind, n) for n, kind in enumerate(kinds)
    ]
    tensors = [adapter and read_from(adapter, model) for adapter in adapters]
    found = Driver(decoder_of(model, 60), list(kinds.values()), tensors).run()
    for (kind, ids), adapter, logits in zip(kinds.items(), adapters, found, strict=True):
        assert agree(logits, reference_logits(model, adapter, ids)), kind


QUANTISED = {f"llama {algo}": QuantConfig(algo) for algo in SERVED}
# Of recurrent layers only the matrices may be trained, and norms of each head, or rows of a table that is
# another one in each stack, not at all.
RECURRENT = {"bias", "DoRA + bias", "norms saved"}
REFUSED = {"stablelm-parallel": {"norms saved"}, "bart-scaled-untied": {"token indices"}}


@pytest.mark.extended
@pytest.mark.parametrize("variant", [*FAMILIES, *MOE_FAMILIES, *ENCODER_DECODER_FAMILIES, *QUANTISED])
def test_every_kind_of_adapter(variant: str, tmp_path: Path) -> None:
    """On all linear layers. A model that is quantised as it is loaded is compared with its rounded values."""
    quant = QUANTISED.get(variant)
    model = wide = make_model(tmp_path / "model", variant.partition(" ")[0], seed=3)
    config = read_model_config(model)
    if quant is not None:
        wide = make_wide(tmp_path / "wide", model, quant, linear_names(config).linears)
    asked: list[tuple[str, Path | None, LoraInput | None]] = [("base", None, None)]
    options = ReadOptions(lora_modules(config), BaseWeights(model, EffectiveWeights(config, quant)))
    refused = REFUSED.get(variant, set()) | (RECURRENT if config.recurrent else set())
    for seed, kind in enumerate(KINDS):
        adapter = make_kind(tmp_path / str(seed), wide, kind, seed)
        try:
            asked.append((kind, adapter, read_lora(find_source(adapter), 0, options)))
        except AdapterInvalidError as error:
            assert kind in refused, error
    ids, text = tokens(60), tokens(37, 5) if config.encoder else []
    decoder = decoder_of(model, len(ids), quant=quant)
    for first in range(0, len(asked), 8):
        part = asked[first : first + 8]
        texts = [text] * len(part) if text else ()
        found = Driver(decoder, [ids] * len(part), [lora for *_, lora in part], texts).run()
        for (kind, adapter, _), logits in zip(part, found, strict=True):
            assert agree(logits, reference_logits(wide, adapter, ids, encoder_ids=text)), kind


@pytest.mark.parametrize("family", [*NEMO_FAMILIES, *extended(*MORE_NEMO_FAMILIES)])
def test_a_nemo_archive_is_its_fused_matrices(family: str, workshop: Path) -> None:
    """As it is and converted, for q, k and v apart, fused, and fused by groups of heads."""
    model = make_model(workshop / f"nemo-{family}", family, seed=7)
    archive, peft = make_nemo(workshop / f"nemo-{family}-a", model, 7)
    modules, converted = lora_modules(read_model_config(model)), archive.with_suffix(".npy")
    write_runtime_tensors(archive, converted, "float32")
    tensors = [read_adapter_folder(archive, modules=modules), read_adapter_folder(converted)]
    expected = reference_logits(model, peft, tokens(30))
    for found in Driver(decoder_of(model), [tokens(30)] * 2, tensors).run():
        assert agree(found, expected)


def change_config(model: Path, **settings: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def as_internlm2(model: Path, adapter: Path, path: Path) -> tuple[Path, Path]:
    """A Llama and its adapter in the layout of InternLM 2: q, k and v as one matrix, by groups of heads."""
    config = read_model_config(model)
    groups, dim = config.num_kv_heads, config.head_dim
    own = {"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
           "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj":
           "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm":
           "ffn_norm"}  # fmt: skip

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, value in tensors.items():
            for theirs, ours in own.items():
                name = name.replace(theirs, ours)
            if "_proj" not in name:
                found[name] = value
            elif "q_proj" in name and "lora_A" in name:  # the three have the same one
                found[name.replace("self_attn.q_proj", "attention.wqkv")] = value
            elif "q_proj" in name:
                parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                stacks = [part.unflatten(0, (groups, -1, dim)) for part in parts]
                rows = torch.cat(stacks, dim=1).flatten(0, 2).contiguous()
                found[name.replace("self_attn.q_proj", "attention.wqkv")] = rows
        return found

    for source, file in ((model, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        shutil.copytree(source, path / source.name)
        save_file(renamed(load_file(source / file)), path / source.name / file, {"format": "pt"})
    change_config(path / model.name, architectures=["InternLM2ForCausalLM"], model_type="internlm2")
    return path / model.name, path / adapter.name


def test_internlm2_is_a_llama_in_another_layout(workshop: Path) -> None:
    model = make_model(workshop / "as-llama", "llama", seed=4)
    change_config(model, bias=False)
    adapter = make_kind(workshop / "as-llama-a", model, "LoRA", 2)
    weights = load_file(adapter / "adapter_model.safetensors")
    for name in weights:  # of one fused matrix
        if re.search("[kv]_proj.lora_A", name):
            weights[name] = weights[re.sub("[kv]_proj", "q_proj", name)].clone()
    save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    theirs, lora = as_internlm2(model, adapter, workshop / "internlm2")
    tensors = read_from(lora, theirs)
    decoder = decoder_of(theirs)
    found = Driver(decoder, [tokens(30)] * 2, [None, tensors]).run()
    assert agree(found[0], reference_logits(model, None, tokens(30)))
    assert agree(found[1], reference_logits(model, adapter, tokens(30)))
    out = workshop / "internlm2-c"
    arguments = ["-i", str(lora), "-o", str(out), "--base", str(theirs), "--storage-type", "float32"]
    assert hf_lora_convert(arguments) == 0
    np.testing.assert_array_equal(read_adapter_folder(out)[0], tensors[0])
    with pytest.raises(AdapterInvalidError, match="wqkv: the order of its rows depends"):
        read_adapter_folder(lora)


def test_internlm3_as_it_was_released(workshop: Path) -> None:
    """With a class and names of its own, where transformers has Llama's."""
    model = make_model(workshop / "internlm3-r", "internlm3", seed=4)
    expected, now = reference_logits(model, None, tokens(20)), read_model_config(model)
    raw = json.loads((model / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("attention_bias", "mlp_bias")}
    (model / "config.json").write_text(json.dumps(raw))
    change_config(model, architectures=["InternLM3ForCausalLM"], qkv_bias=True, bias=True)
    then = read_model_config(model)
    assert replace(then, architecture=now.architecture) == now
    [found] = Driver(decoder_of(model), [tokens(20)], [None]).run()
    assert agree(found, expected)


def test_gpt2_as_it_was_released(workshop: Path) -> None:
    """Without the root of its names, with causal masks among the weights."""
    model = make_model(workshop / "released", "gpt2", seed=4)
    expected = reference_logits(model, None, tokens(20))
    weights = load_file(model / "model.safetensors")
    stripped = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    stripped["h.0.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
    save_file(stripped, model / "model.safetensors")
    [found] = Driver(decoder_of(model), [tokens(20)], [None]).run()
    assert agree(found, expected)


def test_gemma3_with_the_settings_of_its_first_release(workshop: Path) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make_model(workshop / "first-gemma3", "gemma3", num_hidden_layers=3, layer_types=layers)
    now = read_model_config(model)
    raw = json.loads((model / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        raw.pop(name, None)
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2, "rope_scaling": None}
    (model / "config.json").write_text(json.dumps(raw))
    then = read_model_config(model)
    assert then.sliding_windows == (9, None, 9)
    assert (then.rope_theta, then.rope_local_theta) == (now.rope_theta, now.rope_local_theta) == (1e6, 1e4)
    assert then.tie_word_embeddings


@pytest.mark.parametrize("family", ["falcon", "falcon-new", "falcon-sequential", "gpt-neox"])
def test_hf_lora_convert_orders_grouped_rows(family: str, workshop: Path, capsys: Any) -> None:
    """By --base, the base that the adapter names, or a config.json beside it; else it says what to do."""
    folder = workshop / f"hf-{family}"
    model = make_model(folder / "model", family)
    adapter = make_adapter(folder / "a", model, rank=2, modules=("query_key_value", "dense"))
    wanted = read_from(adapter, model)
    settings = json.loads((adapter / "adapter_config.json").read_text())

    def convert_to(out: Path, *flags: object) -> int:
        arguments = ["-i", adapter, "-o", out, "--storage-type", "float32", *flags]
        return hf_lora_convert([str(argument) for argument in arguments])

    assert Path(settings["base_model_name_or_path"]) == model
    assert convert_to(folder / "named") == 0
    settings["base_model_name_or_path"] = "tiiuae/falcon-7b"
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert convert_to(folder / "none") == 1
    assert "query_key_value: the order of its rows depends" in capsys.readouterr().err
    assert convert_to(folder / "given", "--base", model) == 0
    shutil.copy(model / "config.json", adapter)
    assert convert_to(folder / "beside") == 0
    heads = json.loads((model / "config.json").read_text())["num_attention_heads"]
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_head": heads}  # groups its rows as GPT-NeoX does
    (adapter / "config.json").write_text(json.dumps(bloom))
    assert convert_to(folder / "bloom") == (0 if read_model_config(model).num_kv_heads == heads else 1)
    assert family != "gpt-neox" or (folder / "bloom").is_dir()
    for out in ("named", "given", "beside", *(["bloom"] if family == "gpt-neox" else [])):
        weights, config = read_adapter_folder(folder / out)
        np.testing.assert_array_equal(config, wanted[1])
        np.testing.assert_array_equal(weights, wanted[0])


ONE_OF_EACH = {kind: name for name, (kind, _) in reversed({**FAMILIES, **MOE_FAMILIES}.items())}
USUAL = (*ROUNDED, *ROUNDED_EXPERTS, "t5", "bart")
OTHERS = sorted({*ONE_OF_EACH.values(), *ENCODER_DECODER_FAMILIES} - {*USUAL})


@pytest.mark.parametrize("family", [*USUAL, *extended(*OTHERS)])
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(family: str, workshop: Path) -> None:
    """With an adapter, but for experts: where rounding gives a token another one, it says little."""
    model = make_model(workshop / f"bf16-{family}", family, seed=6)
    experts, text = family in MOE_FAMILIES, tokens(37, 5) if family in ENCODER_DECODER_FAMILIES else []
    adapter = None if experts else make_kind(workshop / f"bf16-{family}-a", model, "LoRA", 6)
    check_bfloat16(model, adapter, text)

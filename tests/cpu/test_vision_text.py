"""Protects the text models of models that see images: their answers to text equal transformers', the vision
tower is not read, and an adapter that trained it is refused unless its text part is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, agree, decoder_of
from parity import read_from
from running import tokens
from safetensors.torch import load_file, save_file
from tiny_models import auto_class, make_adapter, make_model, reference_logits

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.convert import main as hf_lora_convert
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.config.engine import LoraCacheConfig
from manylora.doors.cli.convert import main as convert
from manylora.doors.cli.inspect import main as inspect
from manylora.errors import AdapterInvalidError
from manylora.model.checkpoint import read_model_config

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
CLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP |= {"image_size": 28, "patch_size": 14}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
# The model, the variant of its text model, and its vision tower.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2", {"rope_parameters": MROPE}, {**QWEN_VISION, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        "qwen2",
        {"rope_parameters": MROPE, "tie_word_embeddings": True},
        {**QWEN_VISION, "intermediate_size": 32, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "qwen3",
        {"rope_parameters": {**MROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True}},
        {**QWEN_VISION, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "gemma4": (
        "gemma4",
        {},
        {**CLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    ),
    "gemma4_unified": ("gemma4-unified", {}, {}),
    "llava": ("llama", {}, {**CLIP, "model_type": "clip_vision_model"}),
    "llava-mistral": ("mistral", {}, {**CLIP, "model_type": "clip_vision_model"}),
    "llava_next": ("qwen2", {}, {**CLIP, "model_type": "clip_vision_model"}),
    "gemma3": ("gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16}, SIGLIP),
    "mistral3": ("mistral", {}, {**CLIP, "model_type": "pixtral"}),
    "mistral3-ministral3": ("ministral3", {}, {**CLIP, "model_type": "pixtral"}),
    "qwen3_vl_moe": (
        "qwen3-moe",
        {"rope_parameters": {**MROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True}},
        {**QWEN_VISION, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "llama4": (
        "llama4",
        {},
        {**CLIP, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}


def make(path: Path, name: str, original: bool = True, **more: Any) -> Path:
    from transformers import AutoConfig

    family, settings, vision = MODELS[name]
    text = json.loads((make_model(path / "text", family, **settings, **more) / "config.json").read_text())
    text = {key: value for key, value in text.items() if key != "architectures"}
    if not name.startswith(("llava", "mistral3")):
        text.pop("model_type")
    torch.manual_seed(4)
    kind = name.partition("-")[0]
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    config.tie_word_embeddings = bool(text.get("tie_word_embeddings"))
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path / "model", save_original_format=original)
    return path / "model"


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_text_of_a_model_that_sees(name: str, original: bool, tmp_path: Path) -> None:
    """In the names of its release, and in those of transformers 5."""
    model = make(tmp_path, name, original)
    config = read_model_config(model)
    targets = r".*language_model.*\.(q_proj|o_proj|up_proj)"
    adapter = make_adapter(tmp_path / "a", model, 1, rank=3, target_modules=targets)
    decoder = decoder_of(model)
    found = Driver(decoder, [tokens(30)] * 2, [None, read_from(adapter, model)]).run()
    assert agree(found[0], reference_logits(model, None, tokens(30)))
    assert agree(found[1], reference_logits(model, adapter, tokens(30)))
    assert not agree(found[0], found[1])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tower = "visual.blocks.0.attn.qkv" if name.startswith("qwen") else "vision_tower.layers.0.q_proj"
    for side in "AB":
        tensors[f"base_model.model.model.{tower}.lora_{side}.weight"] = torch.ones(3, 3)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=f"{tower}.* set lora_text_only"):
        read_from(adapter, model)
    text_part = read_lora(find_source(adapter), 0, ReadOptions(lora_modules(config), text_only=True))
    [again] = Driver(decoder, [tokens(30)], [text_part]).run()
    assert agree(again, found[1])


# Where a checkpoint may have the text model and its head, and what PEFT's names begin with on each.
LAYOUTS = {
    "release": ("language_model.model.", "language_model.lm_head."),
    "transformers 5": ("model.language_model.", "lm_head."),
    "head apart": ("language_model.model.", "lm_head."),
    "inner model": ("language_model.", "lm_head."),
    "plain": ("model.", "lm_head."),
}


@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl_moe"])
def test_every_layout_of_names(name: str, tmp_path: Path) -> None:
    """Of checkpoints, and of adapters trained on any of them."""
    model = make(tmp_path, name, original=False)
    tensors = load_file(model / "model.safetensors")
    targets = r".*language_model.*\.(q_proj|o_proj)"
    adapter = make_adapter(tmp_path / "a", model, 1, rank=3, target_modules=targets)
    rows = load_file(adapter / "adapter_model.safetensors")
    wanted = Driver(decoder_of(model), [tokens(12)] * 2, [None, read_from(adapter, model)]).run()
    for root, head in LAYOUTS.values():
        head = "lm_head." if name.startswith("qwen") else head  # never elsewhere
        moved = {
            key.replace("model.language_model.", root, 1).replace("lm_head.", head, 1)
            if not key.startswith(("model.vision", "model.visual", "model.multi", "model.image"))
            else key: value
            for key, value in tensors.items()
        }
        save_file(moved, model / "model.safetensors", {"format": "pt"})
        own = {f"base_model.model.{key[17:].replace('model.language_model.', root, 1)}": v
               for key, v in rows.items()}  # fmt: skip
        save_file(own, adapter / "adapter_model.safetensors", {"format": "pt"})
        found = Driver(decoder_of(model), [tokens(12)] * 2, [None, read_from(adapter, model)]).run()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_square_stack_of_experts_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Where [in, out] and [out, in] look alike, it takes them for [out, in]."""
    model = make(tmp_path, "qwen3_vl_moe", original=True, moe_intermediate_size=64)
    [found] = Driver(decoder_of(model), [tokens(12)], [None]).run()
    assert agree(found, reference_logits(model, None, tokens(12)))


def test_adapters_on_experts_beside_a_vision_tower(tmp_path: Path) -> None:
    """Whichever way the checkpoint has the experts."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for original in (True, False):
        path = tmp_path / str(original)
        model = make(path, "qwen3_vl_moe", original)
        options = {"target_modules": r".*language_model.*\.q_proj", "target_parameters": names}
        adapter = make_adapter(path / "a", model, 1, rank=2, **options)
        [found] = Driver(decoder_of(model), [tokens(20)], [read_from(adapter, model)]).run()
        assert agree(found, reference_logits(model, adapter, tokens(20)))


def test_keys_of_the_text_model_beside_those_of_the_vision_tower(tmp_path: Path) -> None:
    """As the first Qwen 2.5-VL were released."""
    model = make(tmp_path, "qwen2_5_vl")
    now = read_model_config(model)
    raw = json.loads((model / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat = {**text, **raw, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(flat))
    assert read_model_config(model) == now


def test_commands_and_the_cache_take_the_text_part_where_it_is_asked_for(tmp_path: Path) -> None:
    model = make(tmp_path, "gemma3")
    adapter = make_adapter(tmp_path / "a", model, 1, rank=3, modules=("q_proj",))
    with pytest.raises(AdapterInvalidError, match=r"vision_tower.*other tensors.* set lora_text_only"):
        read_from(adapter, model)
    arguments = ["-i", str(adapter), "-o", str(tmp_path / "out"), "--base", str(model)]
    arguments += ["--storage-type", "float32"]
    assert convert(arguments) == 1
    assert convert([*arguments, "--lora-text-only"]) == 0
    assert hf_lora_convert([*arguments, "--lora-text-only"]) == 0
    assert inspect([str(adapter), "--base", str(model)]) == 1
    assert inspect([str(adapter), "--base", str(model), "--lora-text-only"]) == 0
    cache = LoraCacheConfig(gpu_memory_bytes=2**22, text_only=True)
    store = AdapterStore(read_model_config(model), cache, torch.device("cpu"), torch.float32, 2**30)
    assert store.reader(store.modules).read(adapter).facts.rank == 3

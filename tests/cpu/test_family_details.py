"""Protects what single families have beside the others, each as in transformers + PEFT: DeepSeek's and GLM's
latents and groups of experts, gpt-oss's sinks and MXFP4 experts, the towers, shared keys and values of
Gemma 3n and 4; and settings that few models and adapters have, which are served so or refused by name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import WEIGHTS, edited
from driver import Driver, agree, decoder_of
from levels import PARAMS, open_library
from parity import read_from
from running import read, tokens
from safetensors.torch import load_file, save_file
from test_family_engines import Served
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, make_tuned, read_adapter_folder, reference_logits

from manylora import LoraConfig
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import MODULE_NAMES, LoraModuleId, lora_modules
from manylora.adapters.report import BaseModel, inspect_adapter
from manylora.adapters.rules import AdapterRules
from manylora.checkpoints.quant.layouts import mxfp4
from manylora.config.engine import LoraCacheConfig
from manylora.doors.cli.build import main as build
from manylora.doors.python.options import modules_to_read
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.compiled import FORMS
from manylora.kernels.panels import PanelsLinear, to_panels
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NORMS = ["q_a_layernorm", "kv_a_layernorm"]
KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"rank": 5, "modules": LATENT, "use_dora": True},
    "DoRA + rsLoRA": {"rank": 3, "modules": LATENT[3:], "use_dora": True, "use_rslora": True},
    "biases": {"rank": 4, "modules": LATENT, "lora_bias": True},
    "norms": {"rank": 4, "modules": LATENT[:1], "modules_to_save": NORMS},
    "kv_b_proj": {"rank": 64, "modules": ("kv_b_proj",)},
    "patterns": {"rank": 4, "modules": LATENT, "rank_pattern": {"layers.1.self_attn.kv_b_proj": 9}},
}


def logits_of(model: Path, ids: list[list[int]], adapters: list[LoraInput | None]) -> list[torch.Tensor]:
    decoder = decoder_of(model)
    return Driver(decoder, ids, adapters).run()


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3-plain"])
def test_kinds_of_adapters_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=21)
    adapters = [
        make_adapter(workshop / f"{family}-{i}", model, i, **options)
        for i, options in enumerate(KINDS.values())
    ]
    ids = [tokens(20 + 3 * i, i) for i in range(len(KINDS) + 1)]
    found = logits_of(model, ids, [None, *(read(adapter, model) for adapter in adapters)])
    for kind, adapter, one, logits in zip(["base", *KINDS], [None, *adapters], ids, found, strict=True):
        assert agree(logits, reference_logits(model, adapter, one)), kind
        assert adapter is None or not agree(logits, reference_logits(model, None, one)), kind


NAMES = {
    "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj", "mlp_gate": "mlp.up_proj", "mlp_4h_to_h": "mlp.down_proj",
    "moe_router": "mlp.gate", "shared_expert_h_to_4h": "mlp.shared_experts.gate_proj",
    "shared_expert_gate": "mlp.shared_experts.up_proj",
    "shared_expert_4h_to_h": "mlp.shared_experts.down_proj",
    "moe_h_to_4h": "mlp.experts.{}.gate_proj", "moe_gate": "mlp.experts.{}.up_proj",
    "moe_4h_to_h": "mlp.experts.{}.down_proj",
}  # fmt: skip


def directory_and_merged(model: Path, path: Path, root: str) -> tuple[Path, Path]:
    """An adapter on every linear layer, by the names of the checkpoint, which PEFT cannot train all; and the
    model with it added to its weights. root: of the names."""
    modules, random = lora_modules(read_model_config(model)), np.random.default_rng(4)
    weights, tensors = load_file(model / "model.safetensors"), {}
    for layer in range(read_model_config(model).num_layers):
        for module in modules.values():
            if module.name not in NAMES or (module.layers is not None and layer not in module.layers):
                continue
            for expert in range(module.experts):
                name = f"layers.{layer}.{NAMES[module.name].format(expert)}"
                weight = weights[f"model.{name}.weight"]
                a, b = (
                    torch.from_numpy(random.normal(size=size, scale=0.2).astype(np.float32))
                    for size in ((3, weight.shape[1]), (weight.shape[0], 3))
                )
                tensors[f"{root}{name}.lora_A.weight"], tensors[f"{root}{name}.lora_B.weight"] = a, b
                weight += 2 * b @ a
    shutil.copytree(model, path / "merged")
    save_file(weights, path / "merged" / "model.safetensors", {"format": "pt"})
    (path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    return path / "adapter", path / "merged"


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3", "glm4-moe", "glm4-moe-lite"])
def test_every_linear_layer_by_its_name(family: str, workshop: Path) -> None:
    """With the keys of PEFT and unsloth, and those of axolotl's merges of wrapped models."""
    model = make_model(workshop / f"all-{family}", family, seed=6)
    for number, root in enumerate(("base_model.model.model.", "base_model.model.base_model.model.model.")):
        adapter, merged = directory_and_merged(model, workshop / f"all-{family}-{number}", root)
        [found] = mixed_logits(model, [read(adapter, model)])
        assert agree(found, reference_logits(merged, None, tokens(20, 0)))
    known = {MODULE_NAMES[i] for i in lora_modules(read_model_config(model))}
    assert known - NAMES.keys() <= {"attn_qkv", "mlp_gate_up", "shared_expert_gate_up"}


def test_layers_that_predict_further_tokens_are_left_out(workshop: Path) -> None:
    model = make_model(workshop / "mtp", "deepseek-v3", seed=6)
    expected, weights = reference_logits(model, None, tokens(20)), load_file(model / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert agree(logits_of(model, [tokens(20)], [None])[0], expected)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "gpt-oss", seed=6, hidden_size=64, intermediate_size=32)


@pytest.fixture(scope="module")
def adapter(model: Path, workshop: Path) -> Path:
    parts = [*EXPERTS, "mlp.router.weight"]
    return make_adapter(workshop / "adapters" / "1", model, 1, 4, ATTENTION, target_parameters=parts)


@pytest.fixture(scope="module")
def as_released(model: Path, workshop: Path) -> tuple[Path, Path]:
    """The model with MXFP4 experts, and the same values as plain weights, made wide by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, plain = (shutil.copytree(model, workshop / name) for name in ("mxfp4", "widened"))
    weights = load_file(model / "model.safetensors")
    wide, torch_seed = dict(weights), torch.Generator().manual_seed(3)
    for name, stack in wide.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = stack.shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=torch_seed)
            scales = torch.randint(122, 126, (count, outputs, inputs // 32), generator=torch_seed)
            blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
            wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            del weights[name]
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, packed / "model.safetensors", {"format": "pt"})
    save_file(wide, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("level", PARAMS)
def test_products_of_4_bits_have_the_bits_of_those_of_8(level: str) -> None:
    """MXFP4 stays in 4 bits where the kernels are compiled, for few and many rows, and for each form of
    products that the processor has."""
    library = open_library(level)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (101, 34, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (101, 34), generator=generator, dtype=torch.uint8)
    four = mxfp4(blocks, scales, 1088)
    eight = four.without_codes()
    assert isinstance(eight, QuantisedWeight) and eight.values.dtype == torch.int8
    assert torch.equal(four.wide(), eight.wide())
    multiply = PanelsLinear(library)
    small, large = (to_panels(one, multiply.width, multiply.block) for one in (four, eight))
    assert small is not None and large is not None
    # 4 bits and 8, and a float32 for each 32 inputs.
    assert four.nbytes - 64 == 101 * 1088 * 0.625 and eight.nbytes == 101 * 1088 * 1.125
    assert small.nbytes / large.nbytes == 0.625 / 1.125
    forms = [0, *(form for form in FORMS if library.bfloat16_forms() >> form & 1)]
    for rows in (1, 2, 5, 19, 70):
        x = torch.randn(rows, 1088, generator=generator)
        for form in forms:
            found = multiply(x, small.rounding(form), None)
            assert torch.equal(found, multiply(x, large.rounding(form), None))
            near = torch.nn.functional.linear(x.double(), four.wide().double()).float()
            assert torch.allclose(found, near, rtol=0.05 if form else 1e-4, atol=1.0 if form else 1e-2)


def test_mxfp4_values_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(3).view(6, 8, 16)
    scales = torch.tensor([0, 1, 2, 100, 127, 128, 200, 246], dtype=torch.uint8).repeat(6, 1)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
        found = mxfp4(blocks, scales, 256).to(dtype).wide()
        assert torch.equal(found, wanted)
    with pytest.raises(ConfigError, match=r"_blocks must be uint8 \(6, 4, 16\)"):
        mxfp4(blocks, scales, 128)


def test_mxfp4_experts_answer_as_their_values_do(
    as_released: tuple[Path, Path], adapter: Path, tmp_path: Path
) -> None:
    packed, plain = as_released
    found = mixed_logits(packed, [None, read(adapter, packed, 1)])
    for seed, (logits, lora) in enumerate(zip(found, (None, adapter), strict=True)):
        assert agree(logits, reference_logits(plain, lora, tokens(20, seed)))
    decoder = decoder_of(packed)
    wide = decoder_of(plain)
    assert decoder.has_quantised_experts and decoder.weight_bytes < wide.weight_bytes
    assert build(["--model_dir", str(packed), "--output_dir", str(tmp_path / "built")]) != 0


def test_experts_in_lists_are_the_stacked_ones(model: Path, adapter: Path, workshop: Path) -> None:
    """As Unsloth names them, whose linear layers of a projection are a list."""
    found: dict[str, torch.Tensor | None] = {}
    for key, value in load_file(adapter / WEIGHTS).items():
        head, experts, tail = key.partition(".experts.")
        if not experts:
            continue
        found[key] = None
        name = "gate_up_projs" if "base_layer" in tail else "down_projs"
        side = "lora_A" if "lora_A" in tail else "lora_B"
        each = (
            value.unflatten(0, (-1, 4)) if side == "lora_A" else value.unflatten(1, (4, -1)).permute(2, 0, 1)
        )
        for number, matrix in enumerate(each):
            found[f"{head}.experts.{name}.{number}.{side}.weight"] = matrix.contiguous()
    listed = edited(adapter, workshop / "lists", found)
    one, other = mixed_logits(model, [read(adapter, model, 1), read(listed, model, 2)])[:2]
    assert torch.equal(one, mixed_logits(model, [read(listed, model, 2)])[0])
    assert agree(other, reference_logits(model, adapter, tokens(20, 1)))


def test_stacked_rows_are_not_guessed(adapter: Path, tmp_path: Path) -> None:
    copy = edited(adapter, tmp_path / "a", base_model_name_or_path="unsloth/gpt-oss-20b")
    with pytest.raises(AdapterInvalidError, match=r"in which order the rows .* \(--base\)"):
        read_adapter_folder(copy)


@pytest.fixture(scope="module")
def served(workshop: Path) -> Served:
    return Served(workshop / "gemma3n", "gemma3n")


def test_the_text_tower_of_a_model_that_sees_and_hears(served: Served, tmp_path: Path) -> None:
    """In the names of its release, with keys and values that layers do not use."""
    model = tmp_path / "model"
    shutil.copytree(served.model, model)
    raw = json.loads((model / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": raw,
    }
    (model / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(model / "model.safetensors").items()
    }
    for tower in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d"):
        tensors[f"model.{tower}.weight"] = torch.ones(3)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.5.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config, ids = read_model_config(model), tokens(30)
    adapter = tmp_path / "adapter"
    path = adapter / WEIGHTS
    decoder = decoder_of(model)
    for given in (served.adapters[2], served.adapters[1]):  # the first has magnitudes, relative to the base
        assert given is not None
        shutil.copytree(given, adapter, dirs_exist_ok=True)
        matrices = {
            name.replace("model.model.", "model.model.language_model."): value
            for name, value in load_file(path).items()
        }
        save_file(matrices, path, {"format": "pt"})
        # Beside a base of the text alone, too, whose names have no language_model.
        tensors = [read_from(adapter, base) for base in (model, served.model)]
        found = Driver(decoder, [ids] * 3, [None, *tensors]).run()
        assert agree(found[0], reference_logits(served.model, None, ids))
        for one in found[1:]:
            assert agree(one, reference_logits(served.model, given, ids))
    key = "base_model.model.model.audio_tower.conformer.0.attention.attn.q_proj.lora_A.weight"
    save_file({**matrices, key: torch.ones(3, 3)}, path, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=r"audio_tower.* set lora_text_only"):
        read_from(adapter, model)
    text = read_lora(find_source(adapter), 0, ReadOptions(lora_modules(config), text_only=True))
    [again] = Driver(decoder, [ids], [text]).run()
    assert agree(again, found[1])


def test_what_adapters_may_not_have(served: Served, tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    config = read_model_config(served.model)
    modules = lora_modules(config)
    assert modules[LoraModuleId.ALTUP_PROJECTIONS].layers == {0, 1}
    keys = modules[LoraModuleId.ATTN_K]
    assert keys.layers == {0, 1, 2}
    row = np.ones((1, 1, keys.in_dim + keys.out_dim), np.float32)
    rules = AdapterRules(modules, config.num_layers, 8)
    rules.check(LoraInput(1, row, np.array([[[keys.module_id, 2, 1]]], np.int32)))
    with pytest.raises(AdapterInvalidError, match="does not exist in layer 3 of this model"):
        rules.check(LoraInput(1, row, np.array([[[keys.module_id, 3, 1]]], np.int32)))
    table = make_adapter(tmp_path / "table", served.model, 1, rank=2, modules=["embed_tokens_per_layer"])
    with pytest.raises(AdapterInvalidError, match="the table of per-layer embeddings are not supported"):
        read_lora(find_source(table), 0, ReadOptions(modules))
    prompt = make_tuned(
        tmp_path / "prompt", served.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(AdapterInvalidError, match="not supported on models with per-layer embeddings"):
        read_lora(find_source(prompt), 0, ReadOptions(modules))


def test_an_adapter_of_values_that_are_keys_is_refused(workshop: Path, tmp_path: Path) -> None:
    model = make_model(workshop / "gemma4", "gemma4", seed=6)
    adapter = make_adapter(tmp_path / "a", model, 1, 4, ("q_proj", "k_proj", "down_proj"))
    weights = load_file(adapter / WEIGHTS)
    values = {
        key.replace("k_proj", "v_proj"): v for key, v in weights.items() if "layers.1.self_attn.k_proj" in key
    }
    folder = edited(adapter, tmp_path / "7", values)
    base = BaseModel(model, read_model_config(model), LoraCacheConfig())
    assert inspect_adapter(adapter, base).problem is None
    problem = inspect_adapter(folder, base).problem
    assert problem is not None and "layer 1 of this model has no module attn_v" in problem


def test_the_keys_of_the_first_gemma4(workshop: Path, tmp_path: Path) -> None:
    """`global_head_dim` where transformers writes `per_layer_config`."""
    model = make_model(workshop / "gemma4-keys", "gemma4")
    raw = json.loads((model / "config.json").read_text())
    raw.pop("per_layer_config")
    raw |= {"global_head_dim": 40, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).layer_shapes == read_model_config(model).layer_shapes


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3 ignores the cap on attention": ("gemma3", {"attn_logit_softcapping": 0.1}),
    "Bamba's share": ("bamba", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}),
    "Bamba's share is half": ("bamba", {"rope_parameters": PLAIN}),
    "GPT-2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "Phi": ("phi", {"qk_layernorm": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = SETTINGS[name]
    model = make_model(tmp_path / "model", family, seed=5, **settings)
    [found] = logits_of(model, [tokens(24, 1)], [None])
    assert agree(found, reference_logits(model, None, tokens(24, 1)))


def test_norms_of_olmo2_are_exact_in_bfloat16(tmp_path: Path) -> None:
    """The weight is multiplied before the values are rounded."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    model = make_model(tmp_path / "model", "olmo2", seed=5)
    decoder = decoder_of(model, 24, torch.bfloat16)
    ours, theirs = decoder._final_norm, Olmo2RMSNorm(decoder.config.hidden_size, decoder.config.norm_eps)
    ours.weight.copy_(torch.randn(len(ours.weight)).bfloat16())
    theirs.weight.data = ours.weight.bfloat16()
    x = torch.randn(50, len(ours.weight)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(ours(x, None), theirs(x))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen") / "model", "qwen2", seed=5)


def test_qalora_on_a_plain_base_is_without_effect(qwen: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "own", qwen, use_qalora=True, qalora_group_size=8)
    plain = edited(adapter, tmp_path / "plain", use_qalora=False)
    ours, theirs = read(adapter, qwen, 1), read(plain, qwen, 1)
    assert torch.equal(reference_logits(qwen, adapter, [5, 6]), reference_logits(qwen, plain, [5, 6]))
    assert (ours.weights == theirs.weights).all() and (ours.config == theirs.config).all()


def test_no_target_modules_are_those_that_peft_takes(qwen: Path, tmp_path: Path) -> None:
    made = [
        make_adapter(tmp_path / f"made {name}", qwen, modules=("q_proj", name))
        for name in ("v_proj", "up_proj")
    ]
    few, more = (edited(one, tmp_path / f"null {n}", target_modules=None) for n, one in enumerate(made))
    assert read(few, qwen, 1).config is not None
    with pytest.raises(AdapterInvalidError, match=r"null, which is q_proj and v_proj for qwen2.*up_proj"):
        read(more, qwen, 1)


def test_an_adapter_in_several_files(qwen: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "own", qwen)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model-00001-of-00001.safetensors")
    (adapter / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(AdapterInvalidError, match=r"index\.json: an adapter in several files is not read"):
        read(adapter, qwen, 1)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_halves_that_were_swapped_beforehand(options: dict, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "phi3", seed=3)
    modules = ("qkv_proj", "gate_up_proj", "down_proj")
    adapter = make_adapter(tmp_path / "made", model, 1, 4, modules, **options)
    found = load_file(adapter / WEIGHTS)
    keys = [key for key in found if "gate_up_proj" in key and "lora_A" not in key]
    halves = {key: found[key].roll(len(found[key]) // 2, 0) for key in keys}
    swapped = edited(adapter, tmp_path / "swapped", halves)
    known, base = lora_modules(read_model_config(model)), BaseWeights(model)
    as_is = modules_to_read(known, LoraConfig(swap_gate_up_proj_lora_b_weight=False))
    one = read_lora(find_source(adapter), 0, ReadOptions(modules=known, base=base))
    other = read_lora(find_source(swapped), 0, ReadOptions(modules=as_is, base=base))
    wrong = read_lora(find_source(swapped), 0, ReadOptions(modules=known, base=base))
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-6)
    assert not np.allclose(one.weights, wrong.weights)
    for ours, theirs in zip(one.extras, other.extras, strict=True):
        np.testing.assert_array_equal(ours.values, theirs.values)

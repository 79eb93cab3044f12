"""Protects gpt-oss: engines that decode with sinks beside windows, MXFP4 experts value for value, adapters by
each name that trainers write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from driver import agree
from levels import PARAMS, open_library
from running import read, tokens
from safetensors.torch import load_file, save_file
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_logits

from manylora.checkpoints.quant.layouts import mxfp4
from manylora.doors.cli.build import main as build
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.compiled import FORMS
from manylora.kernels.device import open_device
from manylora.kernels.panels import PanelsLinear, to_panels
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS = "adapter_model.safetensors"


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
    decoder = load_decoder(packed, read_model_config(packed), torch.float32, open_device("cpu"))
    wide = load_decoder(plain, read_model_config(plain), torch.float32, open_device("cpu"))
    assert decoder.has_quantised_experts and decoder.weight_bytes < wide.weight_bytes
    assert build(["--model_dir", str(packed), "--output_dir", str(tmp_path / "built")]) != 0


def test_experts_in_lists_are_the_stacked_ones(model: Path, adapter: Path, workshop: Path) -> None:
    """As Unsloth names them, whose linear layers of a projection are a list."""
    listed = shutil.copytree(adapter, workshop / "lists")
    found = {}
    for key, value in load_file(adapter / WEIGHTS).items():
        head, experts, tail = key.partition(".experts.")
        if not experts:
            found[key] = value
            continue
        name = "gate_up_projs" if "base_layer" in tail else "down_projs"
        side = "lora_A" if "lora_A" in tail else "lora_B"
        each = (
            value.unflatten(0, (-1, 4)) if side == "lora_A" else value.unflatten(1, (4, -1)).permute(2, 0, 1)
        )
        for number, matrix in enumerate(each):
            found[f"{head}.experts.{name}.{number}.{side}.weight"] = matrix.contiguous()
    save_file(found, listed / WEIGHTS)
    one, other = mixed_logits(model, [read(adapter, model, 1), read(listed, model, 2)])[:2]
    assert torch.equal(one, mixed_logits(model, [read(listed, model, 2)])[0])
    assert agree(other, reference_logits(model, adapter, tokens(20, 1)))


def test_stacked_rows_are_not_guessed(adapter: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(adapter, tmp_path / "a")
    config = json.loads((copy / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "unsloth/gpt-oss-20b"
    (copy / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterInvalidError, match=r"in which order the rows .* \(--base\)"):
        read_adapter_folder(copy)

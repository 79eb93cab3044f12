"""Protects weights in fewer bits: each is the nearest that the bits can say, every way to multiply is as
exact as making the weight wide first, and the engine answers with adapters on such a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model

from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, QuantConfig, SamplingParams
from manylora.errors import ConfigError
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.device import open_device
from manylora.kernels.panels import Panels
from manylora.kernels.quantised import PackedInt4, QuantisedWeight
from manylora.kernels.reference import ReferenceOps
from manylora.model.quant import quantise

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
ALGOS = ("W8A16", "W4A16", "FP8")
OPS = {type(ops).__name__: ops for ops in (open_device("cpu").ops, CpuOps(), ReferenceOps())}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_of(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(rows + columns)
    made = torch.randn(rows, columns) * torch.rand(rows, 1) + 0.1
    made[3] = 0
    return made.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_are_the_nearest_there_are(dtype: torch.dtype) -> None:
    weight = weight_of(48, 96, dtype)
    made = quantise(weight, QuantConfig("W8A16"))
    assert made.values.dtype == torch.int8 and made.scales.shape == (48, 1) and made.offsets is None
    nearest = made.scales.float() * (weight.float() / made.scales.float()).round().clamp(-127, 127)
    assert torch.equal(made.values.float() * made.scales.float(), nearest)
    assert (nearest - weight.float()).abs().max() <= 0.51 * made.scales.float().max()
    assert made.shape == (48, 96) and made.nbytes == 48 * 96 + 48 * dtype.itemsize
    assert not made.wide()[3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "wanted", "group"), [(256, 128, 128), (192, 128, 64), (96, 256, 32)])
def test_four_bits_are_the_nearest_there_are(
    dtype: torch.dtype, columns: int, wanted: int, group: int
) -> None:
    weight = weight_of(32, columns, dtype)
    made = quantise(weight, QuantConfig("W4A16", group_size=wanted))
    assert made.group_size == group and made.values.shape == (32, columns // 2)
    levels = torch.arange(-8, 8).float()
    scales, offsets = made.scales.float()[..., None], made.offsets.float()[..., None]  # type: ignore[union-attr]
    choices = scales[..., None] * levels + offsets[..., None]  # [N, groups, 1, 16]
    distance = (weight.float().view(32, -1, group)[..., None] - choices).abs()
    exact = scales * (made.halves().float().view(32, -1, group) - 8) + offsets
    found = (exact - weight.float().view(32, -1, group)).abs()
    assert torch.allclose(found, distance.amin(-1), atol=1e-6)
    assert not made.wide(3, 4).any() and torch.equal(made.wide(8, 16), made.wide()[8:16])
    assert made.nbytes <= 0.75 * 32 * columns


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_products_are_as_exact_as_of_wide_weights(
    ops: ReferenceOps, dtype: torch.dtype, algo: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora.kernels.quantised.WIDE_ELEMENTS", 2000)  # several pieces
    made = quantise(weight_of(80, 192, dtype), QuantConfig(algo))
    x, bias = torch.randn(tokens, 192).to(dtype), torch.randn(80).to(dtype)
    truth = x.double() @ _exact(made).T + bias.double()
    summed = x.double().abs() @ _exact(made).abs().T  # rounding is in proportion to this, whoever adds up
    wide = made.wide()
    worst = max(_distance(y, truth) for y in (F.linear(x, wide, bias), ops.linear(x, ops.pack(wide), bias)))
    packed = ops.pack(made)
    assert isinstance(packed, PackedInt4) == (
        algo == "W4A16" and dtype == torch.bfloat16 and isinstance(ops, CpuOps)
    )
    found = ops.linear(x, packed, bias)
    assert found.dtype == dtype and found.shape == (tokens, 80)
    assert _distance(found, truth) <= 1.05 * worst + 2**-24 * float(summed.mean())
    plain = ops.linear(x[:, :], packed, None)
    assert torch.allclose(plain + bias, found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("columns", "group", "offsets"),
    [
        (32, 32, True),
        (192, 64, False),
        (512, 256, True),
        (1024, 512, True),
        (320, 320, True),
        (4096, 2048, True),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_panels_of_integers_are_exact_and_rows_keep_their_bits(
    compiled: Any, bits: int, columns: int, group: int, offsets: bool
) -> None:
    """Any group that a checkpoint may have, and rows that fill no panel; each row alone and in company."""
    torch.manual_seed(columns)
    ops, groups = CompiledOps(compiled), columns // group
    values = torch.randint(-127, 128, (53, columns), dtype=torch.int8)
    if bits == 4:
        values = torch.randint(0, 256, (53, columns // 2), dtype=torch.uint8)
    shift = torch.randn(53, groups) if offsets else None
    weight = QuantisedWeight(values, torch.rand(53, groups), shift)
    packed, x, bias = ops.pack(weight), torch.randn(21, columns), torch.randn(53)
    assert isinstance(packed, Panels)
    found = ops.linear(x, packed, bias)
    want = x.double() @ _exact(weight).T + bias
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
    for count in (1, 2, 5, 8, 17):
        assert torch.equal(ops.linear(x[:count], packed, bias), found[:count]), count


def _exact(weight) -> torch.Tensor:
    four = weight.values.dtype == torch.uint8
    values = (weight.halves().double() - 8) if four else weight.values.double()
    groups = values.view(len(values), weight.scales.shape[1], -1) * weight.scales.double()[..., None]
    if weight.offsets is not None:
        groups = groups + weight.offsets.double()[..., None]
    return groups.view(len(values), -1)


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_engine_answers_with_adapters_on_a_quantised_base(algo: str, dtype: str) -> None:
    prompt = "Where is the capital of Egypt? \\nAnswer:"
    lora = LoraConfig(lora_target_modules=["attn_q"], max_lora_rank=16)
    adapters = [LoRARequest(n, i, str(DEMO / "adapters" / n)) for i, n in enumerate(("chinese", "japanese"))]
    quant = QuantConfig(algo)
    with LLM(DEMO / "base", device="cpu", dtype=dtype, quant_config=quant, lora_config=lora) as llm:
        outputs = llm.generate([prompt] * 3, SamplingParams(max_tokens=8), [None, *adapters], False)
        assert [o.outputs[0].text.strip() for o in outputs] == ["Cairo", "开罗", "カイロ"]
        alone = llm.generate(prompt, SamplingParams(max_tokens=8), adapters[1], False)
        assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"quant_algo": "NVFP4"},
            "quant_algo NVFP4 is not supported: activations are quantised here with W8A8 and W4A8",
        ),
        ({"quant_algo": "W3A16"}, "quant_algo must be one of W8A16, W4A16"),
        ({"quant_algo": "W4A16", "group_size": 100}, "group_size must be 32, 64, 128 or 256"),
        ({"smoothquant_val": 0.7}, "smoothquant_val is not supported, got 0.7"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as error:
        QuantConfig(**fields)  # type: ignore[arg-type]
    assert text in str(error.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_the_nearest_there_is(dtype: torch.dtype) -> None:
    weight = weight_of(48, 96, dtype)
    made = quantise(weight, QuantConfig("FP8"))
    assert made.values.dtype == torch.float8_e4m3fn and made.scales.shape == (48, 1)
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    choices = bits[torch.isfinite(bits)] * made.scales.float()[..., None]  # [N, 1, 254]
    nearest = (weight.float()[..., None] - choices).abs().amin(-1)
    found = made.values.float() * made.scales.float()
    assert torch.allclose((found - weight.float()).abs(), nearest, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_in_float8(dtype: str) -> None:
    """A byte for each number, the demo's answers, and the same alone and in company."""
    lora = LoraConfig(lora_target_modules=["attn_q"], max_lora_rank=16)
    japanese = LoRARequest("japanese", 1, str(DEMO / "adapters" / "japanese"))
    prompt, params = "Where is the capital of Egypt? \\nAnswer:", SamplingParams(max_tokens=8)
    sizes = []
    for kv in ("auto", "fp8"):
        cache = KvCacheConfig(max_tokens=1024, dtype=kv)
        with LLM(DEMO / "base", device="cpu", dtype=dtype, kv_cache_config=cache, lora_config=lora) as llm:
            sizes.append(llm.stats().kv_bytes)
            outputs = llm.generate([prompt] * 2, params, [None, japanese], False)
            assert [o.outputs[0].text.strip() for o in outputs] == ["Cairo", "カイロ"]
            alone = llm.generate(prompt, params, japanese, False)
            assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert sizes[0] == sizes[1] * getattr(torch, dtype).itemsize


def test_no_group_fits(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", intermediate_size=40)
    with pytest.raises(ConfigError, match="multiple of 32 inputs, one has 40"):
        LLM(model, device="cpu", quant_config=QuantConfig("W4A16"))

"""Protects the kernels in the Triton language: each says what the reference says. On a GPU where there is
one, else under the language's interpreter, where small shapes are slow enough. torch._scaled_mm runs on a
CPU too."""

from __future__ import annotations

import pytest
import torch
from selection import extended

from manylora.checkpoints.quant.config import QuantConfig
from manylora.kernels.cuda import rows
from manylora.kernels.cuda.arithmetic import quantise_rows
from manylora.kernels.cuda.attention import paged_attention
from manylora.kernels.cuda.grouped import QuantisedLinears
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.cuda.tables import plan_attention
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.reference import ACTIVATIONS, ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import (
    FP8,
    FP8_MAX,
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    LoraBatch,
    LoraRow,
    LoraSegment,
    LoraTarget,
)
from manylora.kernels.transfer import to_device
from manylora.model.quant import quantise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IN, WIDTHS = 48, (32, 16, 80)
# Three parts side by side, and a fused module over the first two of them.
TARGETS = (LoraTarget(0, 0, 48), *(LoraTarget(m + 1, sum(WIDTHS[:m]), w) for m, w in enumerate(WIDTHS)))
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.03, 0.06), torch.float16: (0.01, 0.02)}


def limits(dtype: torch.dtype = torch.float32, **changed: object) -> BatchLimits:
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "tokens_per_block": 4, "max_seq_len": 64}
    sizes = {"num_layers": 3, "max_sequences": 8, "dtype": dtype}
    return BatchLimits(**{**sizes, **shape, **changed})  # type: ignore[arg-type]


def ops(dtype: torch.dtype = torch.float32) -> CudaOps:
    made = CudaOps(part_keys=32)
    made.reserve(limits(dtype), DEVICE)
    return made


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def lora_batch(
    lengths: list[int], ranks: list[int], dora: bool, dtype: torch.dtype, device: torch.device = DEVICE
) -> LoraBatch:
    """Segments of so many rows with a base row before each, between NaNs in the pool. The first has the fused
    module too; odd ones lack the last target."""
    pieces = [torch.full((8,), float("nan"))]
    segments, used, start = [], 8, 1
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        places = {}
        for target in TARGETS[number > 0 : len(TARGETS) - number % 2]:
            size = rank * (IN + target.width) + target.width * dora
            places[2, target.module_id] = LoraRow(used, RowFormat(rank, dora))
            pad = -size % 8 + 8
            pieces += [torch.randn(size), torch.full((pad,), float("nan"))]
            used += size + pad
        segments.append(LoraSegment(start, start + length, places))
        start += length + 1
    return LoraBatch(torch.cat(pieces).to(dtype).to(device), tuple(segments), alignment=8)


def attention_batch(counts: list[int], lengths: list[int], size: int = 4) -> AttentionBatch:
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    columns = max(-(-length // size) for length in lengths)
    table = torch.randperm(128)[: len(counts) * columns].view(len(counts), columns).int()
    return AttentionBatch(starts, lengths, table, torch.arange(starts[-1]))


@pytest.mark.parametrize(
    ("lengths", "ranks", "dora", "dtype"),
    [
        ([1], [1], False, torch.float32),
        ([1, 1, 1], [5, 64, 16], True, torch.float32),
        ([1, 1], [8, 33], False, torch.bfloat16),
        pytest.param([1, 2, 1], [512, 3, 20], False, torch.float32, marks=pytest.mark.extended),
        ([3, 20, 1], [8, 17, 4], True, torch.float32),
        ([3, 20, 1], [8, 17, 4], True, torch.bfloat16),
        ([70], [12], False, torch.float32),
        ([2], [512], False, torch.float16),
    ],
)
def test_adapters_add_what_the_reference_adds(
    lengths: list[int], ranks: list[int], dora: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    made, batch = ops(dtype), lora_batch(lengths, ranks, dora, dtype)
    total = sum(lengths) + len(lengths) + 1
    x = (torch.randn(total, 2 * IN) / 7).to(dtype).to(DEVICE)[:, IN:]
    y = torch.randn(total, sum(WIDTHS)).to(dtype).to(DEVICE)
    bias = torch.randn(sum(WIDTHS)).to(dtype).to(DEVICE)
    attention = attention_batch([1] * total, [1] * total)
    planned = to_device(made.plan(attention, batch)[1], DEVICE)
    wide = LoraBatch(batch.pool.float(), batch.segments)
    want, got = y.float().clone(), y.clone()
    ReferenceOps().lora_add(want, x.float(), wide, 2, TARGETS, bias.float())
    made.lora_add(got, x, planned, 2, TARGETS, bias)
    close(got, want.to(dtype))
    spare = [0, *(segment.stop for segment in batch.segments)]
    assert torch.equal(got[spare], y[spare]), "a base row was touched"
    assert not torch.equal(got, y)
    other = y.clone()
    made.lora_add(other, x, planned, 1, TARGETS, bias)
    assert torch.equal(other, y), "a layer without rows was touched"


def test_a_long_input_is_split_and_summed() -> None:
    torch.manual_seed(0)
    made, wide = ops(), 1100
    target = LoraTarget(4, 0, 32)
    for lengths in ([1, 1], [5, 3]):
        size = 8 * (wide + 32)
        pool = torch.randn(2 * size, device=DEVICE) / 8
        starts = [0, lengths[0]]
        segments = tuple(
            LoraSegment(s, s + n, {(0, 4): LoraRow(i * size, RowFormat(8))})
            for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
        )
        batch = LoraBatch(pool, segments, alignment=4)
        total = sum(lengths)
        x, y = torch.randn(total, wide, device=DEVICE), torch.zeros(total, 32, device=DEVICE)
        planned = to_device(made.plan(attention_batch([1] * total, [1] * total), batch)[1], DEVICE)
        want = y.clone()
        ReferenceOps().lora_add(want, x, batch, 0, [target])
        made.lora_add(y, x, planned, 0, [target])
        close(y, want)


@pytest.mark.parametrize(
    ("counts", "lengths", "window", "softcap", "dtype", "cached"),
    [
        ([1, 1, 1], [1, 33, 50], None, None, torch.float32, None),
        ([1, 1], [40, 7], 5, None, torch.float32, None),
        ([1, 6, 1, 3], [9, 6, 50, 20], None, 0.5, torch.float32, None),
        ([1, 30], [50, 34], 9, 2.0, torch.float32, FP8),
        ([25], [25], None, None, torch.bfloat16, None),
        ([1, 1], [47, 3], None, 1.5, torch.bfloat16, FP8),
    ],
)
def test_attention_reads_pages_as_the_reference_does(
    counts: list[int],
    lengths: list[int],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    cached: torch.dtype | None,
) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(128, 4, 2, 24).to(cached or dtype).to(DEVICE) for _ in "kv")
    batch = attention_batch(counts, lengths)
    q = torch.randn(sum(counts), 6, 24).to(dtype).to(DEVICE)
    planned = to_device(plan_attention(batch, limits(), fixed=False, part_keys=32), DEVICE)
    # A softcap and sinks exclude each other in the models that there are.
    sinks = torch.linspace(-3, 3, 6, device=DEVICE) if softcap is None else None
    params = AttentionParams(0.2, window, softcap, sinks)
    want = ReferenceOps().attention(q.float(), k.float(), v.float(), batch, params)
    close(paged_attention(q, k, v, planned, params), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *extended(torch.bfloat16)])
def test_layers_with_other_heads_read_the_same_tables(dtype: torch.dtype) -> None:
    """One large head for all queries beside small ones; tiles of prompts have other rows there."""
    torch.manual_seed(0)
    shape = limits(dtype, num_kv_heads=3, other_heads=frozenset({(1, 264)}))
    batch = attention_batch([18, 1], [24, 33])
    planned = to_device(plan_attention(batch, shape, fixed=False, part_keys=32), DEVICE)
    for kv_heads, dim in shape.head_shapes:
        k, v = (torch.randn(128, 4, kv_heads, dim).to(dtype).to(DEVICE) for _ in "kv")
        q = torch.randn(19, 6, dim).to(dtype).to(DEVICE)
        for params in (AttentionParams(dim**-0.5), AttentionParams(dim**-0.5, 7)):
            want = ReferenceOps().attention(q.float(), k.float(), v.float(), batch, params)
            close(paged_attention(q, k, v, planned, params), want.to(dtype))


@pytest.mark.parametrize(("length", "window"), [(40, None), (300, 70), (2100, None)])
def test_a_sequence_does_not_depend_on_its_company(length: int, window: int | None) -> None:
    torch.manual_seed(0)
    other, params = 500 if length < 2100 else 50, AttentionParams(0.2, window)
    k, v = (torch.randn(512, 8, 1, 24, device=DEVICE) for _ in "kv")
    table = torch.randint(0, 512, (2, 263), dtype=torch.int32)
    both = AttentionBatch([0, 1, 2], [length, other], table, torch.arange(2))
    alone = AttentionBatch([0, 1], [length], table[:1, : -(-length // 8)], torch.arange(1))
    shape = limits(num_heads=3, num_kv_heads=1, tokens_per_block=8, max_seq_len=131072)
    q = torch.randn(2, 3, 24, device=DEVICE)
    found = []  # of the longest of them each part has 64 keys, else 32
    for batch, fixed in ((alone, False), (both, True)):
        planned = to_device(plan_attention(batch, shape, fixed, part_keys=32), DEVICE)
        found.append(paged_attention(q[: len(batch.kv_lens)], k, v, planned, params))
    assert torch.equal(found[0], found[1][:1]), "nor on the width of a recorded table"
    close(found[1], ReferenceOps().attention(q, k, v, to_device(both, DEVICE), params))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_wide_heads_in_float32_are_multiplied_in_pieces(kv_heads: int) -> None:
    """A row that decodes, and a prompt."""
    torch.manual_seed(0)
    k, v = (torch.randn(128, 4, kv_heads, 200, device=DEVICE) for _ in "kv")
    batch, q = attention_batch([9, 1], [30, 7]), torch.randn(10, 2, 200, device=DEVICE)
    shape = limits(num_heads=2, num_kv_heads=kv_heads, head_dim=200)
    planned = to_device(plan_attention(batch, shape, fixed=False, part_keys=32), DEVICE)
    want = ReferenceOps().attention(q, k, v, batch, AttentionParams(0.1, 20))
    close(paged_attention(q, k, v, planned, AttentionParams(0.1, 20)), want)


def test_a_row_does_not_depend_on_the_ranks_and_modules_beside_it() -> None:
    torch.manual_seed(0)
    batch = lora_batch([1, 1, 1], [5, 80, 20], False, torch.float32)
    x, y = torch.randn(7, IN, device=DEVICE), torch.randn(7, sum(WIDTHS), device=DEVICE)
    made, found = ops(), []
    for segments in (batch.segments[1:2], batch.segments):
        some = LoraBatch(batch.pool, segments, batch.alignment)
        planned = to_device(made.plan(attention_batch([1] * 7, [1] * 7), some)[1], DEVICE)
        found.append((planned.kinds.modules, y.clone()))
        made.lora_add(found[-1][1], x, planned, 2, TARGETS)
    assert found[0][0] != found[1][0], "other modules"
    assert torch.equal(found[0][1][3], found[1][1][3])
    assert not torch.equal(found[0][1][3], y[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotated", "cached"), [(None, None), (10, None), (6, None), (10, FP8)])
def test_pages_take_rotated_keys_and_values(
    rotated: int | None, cached: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Of a fused row [q; k; v]; padding is stored nowhere."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 10 * 10).to(dtype).to(DEVICE).view(4, 10, 10).split((6, 2, 2), dim=1)
    shape = (5, 3, 2, 10)
    caches = [torch.zeros(shape, dtype=cached or dtype, device=DEVICE) for _ in range(4)]
    slots, keep = torch.tensor([7, -1, 0, 14], device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE)
    rotary = None
    if rotated is not None:
        cos, sin = (torch.randn(4, rotated).to(dtype).to(DEVICE) for _ in "cs")
        rotary = cos, sin
    whole = AttentionBatch([], [], torch.empty(0), slots)
    got = rows.rotate_and_store(q, k, v, rotary, caches[0], caches[1], whole)
    some = None if rotary is None else (rotary[0][keep], rotary[1][keep])
    batch = AttentionBatch([], [], torch.empty(0), slots[keep])
    want = ReferenceOps().rotate_and_store(q[keep], k[keep], v[keep], some, caches[2], caches[3], batch)
    close(got[keep], want)
    step = 0.13 if cached else 0  # two roundings to bfloat16 may end in two neighbours of e4m3
    torch.testing.assert_close(caches[0].float(), caches[2].float(), rtol=max(step, 0.02), atol=0.02)
    assert torch.equal(caches[1].float(), caches[3].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rows_are_the_references(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference, x = ReferenceOps(), torch.randn(3, 2 * 24).to(dtype).to(DEVICE)
    heads, of_head = x.view(3, 2, 24), torch.randn(24).to(dtype).to(DEVICE)
    close(rows.rms_norm(heads, of_head, 1e-5), reference.rms_norm(heads, of_head, 1e-5))
    delta, weight = torch.randn(3, 24).to(dtype).to(DEVICE), torch.randn(24).to(DEVICE)
    for kept in (weight, weight.to(dtype)):  # of some models a norm's weight stays wide
        got = rows.add_rms_norm(x[:, :24], delta, kept, 1e-5)
        for one, want in zip(got, reference.add_rms_norm(x[:, :24], delta, kept, 1e-5), strict=True):
            close(one, want)
    for activation in ACTIVATIONS:
        close(rows.gated(x, activation), reference.gated(x, activation))
    close(rows.clamped_swiglu(x, 1.7, 0.5), reference.clamped_swiglu(x, 1.7, 0.5))


@pytest.mark.extended
def test_eight_bit_floats_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(FP8).float()
    finite = values[~values.isnan()]
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat(
        (finite, ties, ties * 1.0001, torch.randn(500) * 100, torch.randn(500) / 300, torch.tensor([900.0]))
    )
    cache, spare = (torch.zeros(1, len(x), 1, 1, device=DEVICE).to(FP8) for _ in "kv")
    wide = x.to(DEVICE).view(-1, 1, 1)
    batch = AttentionBatch([], [], torch.empty(0), torch.arange(len(x), device=DEVICE))
    rows.rotate_and_store(wide, wide, wide, None, cache, spare, batch)
    want = x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    assert torch.equal(cache.flatten().cpu().view(torch.uint8), want.view(torch.uint8))
    many = x[:1200].view(6, 200).to(DEVICE)
    quantised, scales = quantise_rows(many)
    torch.testing.assert_close(scales, many.abs().amax(1, keepdim=True) / FP8_MAX)
    assert torch.equal(quantised.view(torch.uint8), (many / scales).to(FP8).view(torch.uint8))


SCALED = "float8_e4m3fn weights 48 x 96 for %s: torch._scaled_mm, scales %s"


def weight_of(algo: str, dtype: torch.dtype, rows: int = 48, columns: int = 96) -> QuantisedWeight:
    torch.manual_seed(0)
    return quantise(torch.randn(rows, columns).to(dtype).to(DEVICE), QuantConfig(algo, group_size=32))


def is_right(linears: QuantisedLinears, weight: QuantisedWeight, rows: int, *, rounded: bool) -> bool:
    """rounded: whether rows of x are rounded to 8-bit floats."""
    dtype = weight.scales.dtype
    x = torch.randn(rows, 2 * weight.shape[1]).to(dtype).to(DEVICE)[:, : weight.shape[1]]
    bias = torch.randn(weight.shape[0]).to(dtype).to(DEVICE)
    values, scales = quantise_rows(x)
    wide = values.float() * scales if rounded else x.float()
    want = wide @ weight.wide().float().T + bias.float()
    packed = linears.pack(weight)
    got, plain = linears(x, packed, bias), linears(x, packed, None)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    tolerance = {"rtol": 0.01, "atol": 0.02 * float(want.abs().max())}
    return all(torch.allclose(one.float(), want, **tolerance) for one in (got, plain + bias))


@pytest.mark.parametrize("rows", [1, 70, 300])
@pytest.mark.parametrize(
    ("algo", "dtype"),
    [
        ("W8A16", torch.bfloat16),
        ("W8A16", torch.float32),
        ("W4A16", torch.float16),
        ("W4A16", torch.bfloat16),
    ],
)
def test_weights_are_widened_for_few_rows_and_for_many(algo: str, dtype: torch.dtype, rows: int) -> None:
    assert is_right(QuantisedLinears(), weight_of(algo, dtype), rows, rounded=False)


@pytest.mark.parametrize(("dtype", "where"), [(torch.bfloat16, "inside"), (torch.float16, "afterwards")])
def test_torch_multiplies_eight_bit_floats(
    dtype: torch.dtype, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manylora")
    linears = QuantisedLinears()
    for count in (1, 70):
        assert is_right(linears, weight_of("FP8", dtype), count, rounded=True)
    assert [record.getMessage() for record in caplog.records] == [SCALED % (dtype, where)], "said once"

"""CompiledOps: CPU operations with the compiled C kernels, in float32.

They cover linear layers, adapters, decode attention and row operations. A row is summed in the same order
whatever other rows are in the batch, so a request gets the same result alone or batched. Weights and adapters
may have narrower types, which the kernels widen in registers. Other dtypes and shapes go to CpuOps.
"""

from __future__ import annotations

import ctypes
import logging
import time
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.adapter_calls import LARGEST_RANK, PART, AdapterCalls
from manylora.kernels.cpu import CpuOps
from manylora.kernels.decode_step import KINDS, SHORT, DecoderParts, DecodeStep
from manylora.kernels.panels import (
    BLOCKS,
    INTEGERS,
    Panels,
    PanelsLinear,
    WeightRows,
    address,
    lay_out_blocks,
    read_panels,
    to_panels,
)
from manylora.kernels.quantised import BLOCK, FLOAT4, QuantisedWeight, StackedWeight
from manylora.kernels.recurrent import (
    LARGEST_DIM,
    MOST_TAPS,
    DeltaWeights,
    Mamba2Weights,
    RecurrentState,
    StateBatch,
)
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    LoraBatch,
    LoraTarget,
    Rotary,
    Targets,
    Weight,
)
from manylora.kernels.transfer import huge_zeros

logger = logging.getLogger("manylora")

FORMS = {1: "AVX512-BF16", 2: "AMX"}
"""By their numbers in native/bfloat16.c."""
NONE, DOTS = 0, 1
ROWS, COLUMNS, OUTPUTS = 64, 1024, 192  # of the trial: as many rows as in a step of many requests
ROUNDS = 20
LARGEST_HEAD = 256  # as in native/team.h
GATES = ("silu", "gelu", "gelu_tanh")  # in the order of their numbers in native/elementwise.c
POOLS = {torch.float32: "lora_add_float32", torch.bfloat16: "lora_add_bfloat16"}


class CompiledOps(CpuOps):
    """library: the result of `native.load()`."""

    block_types = BLOCKS
    packs_tables = True

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self._panels_linear = PanelsLinear(library)
        self._form = choose_form(library)
        self.has_bfloat16 = self._form != NONE
        self._has_pairs = rounds_adapters(library, self._form)
        self._scores = torch.empty(0)
        self._adapter_calls = AdapterCalls()

    def compute_in(self, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 products round float32 inputs. Everything else is as exact and fast as in float32."""
        self.rounds_inputs = dtype == torch.bfloat16 and self.has_bfloat16
        return torch.float32 if self.rounds_inputs else dtype

    def keeps(self, stored: torch.dtype, compute: torch.dtype) -> bool:
        """bfloat16 weights are widened to float32 in registers, exactly, and half the bytes are read."""
        return compute == torch.float32 and stored == torch.bfloat16

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        if isinstance(weight, StackedWeight):
            return weight.map(self.pack)
        if isinstance(weight, QuantisedWeight) and weight.rounds_inputs:
            return to_integer_panels(self._library, weight) or super().pack(weight)
        if isinstance(weight, QuantisedWeight) and weight.scales.dtype != torch.float32:
            return super().pack(weight)
        panels = self._to_panels(weight)
        return super().pack(weight) if panels is None else panels

    def pack_rows(self, rows: WeightRows, routed: bool = False) -> Weight:
        panels = read_panels(self._library, rows, self._panels_linear.width)
        return super().pack_rows(rows, routed) if panels is None else self._rounding(panels)

    def pack_blocks(self, kind: str, data: Tensor, columns: int, rounds_inputs: bool = False) -> Weight:
        form = INTEGERS + self._library.integer_dots() if rounds_inputs else 0
        panels = lay_out_blocks(self._library, kind, data, columns, form)
        return panels if rounds_inputs else self._rounding(panels)

    def pack_table(self, table: WeightRows | QuantisedWeight, is_head: bool) -> Tensor | Panels:
        packed: Weight | None = None
        if isinstance(table, QuantisedWeight):
            packed = self._to_panels(table)
        elif is_head:
            packed = self.pack_rows(table)
        return packed if isinstance(packed, Panels) else super().pack_table(table, is_head)

    @property
    def _rounds_adapters(self) -> bool:
        """Whether adapters in bfloat16 round their inputs."""
        return self.rounds_inputs and self._has_pairs

    def _to_panels(self, weight: Tensor | QuantisedWeight) -> Panels | None:
        panels = to_panels(weight, self._panels_linear.width, self._panels_linear.block)
        return None if panels is None else self._rounding(panels)

    def _rounding(self, panels: Panels) -> Panels:
        return panels.rounding(self._form) if self.rounds_inputs else panels

    def decode_step(self, parts: DecoderParts) -> DecodeStep | None:
        fits = parts.dim <= LARGEST_HEAD and parts.is_plain
        return DecodeStep(self._library, parts, self._adapter_calls, self._rounds_adapters) if fits else None

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(packed, Panels):
            return super().linear(x, packed, bias)
        shift = None if bias is None else bias.float()
        return self._panels_linear(x.float(), packed, shift).to(x.dtype)

    def best(self, logits: Tensor) -> Tensor:
        if not _plain(logits):
            return super().best(logits)
        best = torch.empty(len(logits), dtype=torch.int64)
        self._library.best_tokens(best.data_ptr(), logits.data_ptr(), *logits.shape)
        return best

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        if not _can_add(x, batch.pool):
            super().lora_add(y, x, batch, layer, targets, bias)
            return
        for call in self._adapter_calls.find(batch, layer, tuple(targets)):
            if len(call.segments):
                self._add(y, x, batch.pool, bias, call.segments, call.most_parts, call.most_rows)
            if call.others:
                super().lora_add(y, x, LoraBatch(batch.pool, call.others), layer, call.targets, bias)

    def _add(
        self,
        y: Tensor,
        x: Tensor,
        pool: Tensor,
        bias: Tensor | None,
        segments: np.ndarray,
        most_parts: int,
        most_rows: int,
    ) -> None:
        rounds = self._rounds_adapters and pool.dtype == torch.bfloat16
        getattr(self._library, "lora_add_rounded" if rounds else POOLS[pool.dtype])(
            y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), x.shape[1], pool.data_ptr(), address(bias),
            segments.ctypes.data, len(segments), most_parts, most_rows,
        )  # fmt: skip

    def add_groups(
        self, y: Tensor, x: Tensor, pool: Tensor, groups: np.ndarray, places: np.ndarray, target: LoraTarget
    ) -> None:
        if not _can_add(x, pool) or places["rank"].max() > LARGEST_RANK:
            super().add_groups(y, x, pool, groups, places, target)
            return
        count = len(groups)
        parts = np.empty(count, PART)
        parts["column"], parts["width"] = target.start, target.width
        parts["row"] = places
        segments = np.empty((count, 4), np.int64)
        segments[:, :2], segments[:, 3] = groups, 1
        segments[:, 2] = parts.ctypes.data + np.arange(count) * parts.strides[0]
        self._add(y, x, pool, None, segments, 1, int((groups[:, 1] - groups[:, 0]).max()))

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        wide = all(one.dtype == torch.float32 for one in (q, k, v))
        if not (wide and _can_cache(k_cache) and all(map(_whole_rows, (q, k, v)))):
            return super().rotate_and_store(q, k, v, rotary, k_cache, v_cache, batch)
        rows, heads, dim = q.shape
        cos, sin, turned, out = None, None, 0, q
        if rotary is not None:
            (cos, sin), out = (part.contiguous() for part in rotary), torch.empty(rows, heads, dim)
            turned = cos.shape[1]
        self._library.rotate_and_store(
            out.data_ptr(), q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            address(cos), address(sin), KINDS.index(k_cache.dtype), k_cache.data_ptr(), v_cache.data_ptr(),
            batch.slots.data_ptr(), rows, heads, k.shape[1], dim, turned,
        )  # fmt: skip
        return out

    def rows_alone(self, q: Tensor, k_cache: Tensor) -> int:
        return SHORT if _can_attend(q, k_cache) else 0

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lengths: list[int],
        params: AttentionParams,
    ) -> Tensor:
        if not _can_attend(q, k_cache):
            return super().decode(q, k_cache, v_cache, table, lengths, params)
        q, table = q.contiguous(), table.contiguous()
        count, heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        if self._scores.numel() < count * heads * longest:
            self._scores = torch.empty(2 * count * heads * longest)
        out, ends = torch.empty_like(q), np.array(lengths, np.int64)
        self._library.decode_attention(
            out.data_ptr(), heads * dim, q.data_ptr(), heads * dim, KINDS.index(k_cache.dtype),
            k_cache.data_ptr(), v_cache.data_ptr(), table.data_ptr(), table.shape[1], ends.ctypes.data,
            count, heads, kv_heads, dim, size,
            params.scale, -1 if params.window is None else params.window, params.softcap or 0.0,
            address(params.sinks), self._scores.data_ptr(), longest,
        )  # fmt: skip
        return out

    def delta_rule(
        self, x: Tensor, gates: Tensor, weights: DeltaWeights, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        heads, dim, keys = weights.value_heads, weights.value_dim, weights.key_dim
        if not _plain(x, gates) or max(dim, keys) > LARGEST_DIM or len(weights.taps) > MOST_TAPS:
            return super().delta_rule(x, gates, weights, state, batch)
        out, mixed = torch.empty(len(x), heads * dim), torch.empty(len(x), weights.channels)
        tables = (batch.starts, batch.reads, batch.writes, batch.cuts, batch.saves)
        self._library.delta_rule(
            out.data_ptr(), x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0), mixed.data_ptr(),
            weights.taps.data_ptr(), weights.decay.data_ptr(), weights.shift.data_ptr(),
            weights.norm.data_ptr(), state.inputs.data_ptr(), state.memory.data_ptr(),
            *(table.data_ptr() for table in tables), len(batch.reads), len(weights.taps), weights.key_heads,
            heads, keys, dim, weights.eps,
        )  # fmt: skip
        return out

    def mamba2(self, x: Tensor, weights: Mamba2Weights, state: RecurrentState, batch: StateBatch) -> Tensor:
        if not _plain(x) or len(weights.taps) > MOST_TAPS:
            return super().mamba2(x, weights, state, batch)
        out, mixed = torch.empty(len(x), weights.value_size), torch.empty(len(x), weights.channels)
        tables = (batch.starts, batch.reads, batch.writes, batch.cuts, batch.saves)
        self._library.mamba2(
            out.data_ptr(), x.data_ptr(), x.stride(0), mixed.data_ptr(), weights.taps.data_ptr(),
            weights.bias.data_ptr(), weights.decay.data_ptr(), weights.shift.data_ptr(),
            weights.skip.data_ptr(), address(weights.norm), state.inputs.data_ptr(), state.memory.data_ptr(),
            *(table.data_ptr() for table in tables), len(batch.reads), len(weights.taps), weights.heads,
            weights.groups, weights.head_dim, weights.state_dim, weights.norm_groups, weights.gate_first,
            weights.least, weights.most, weights.eps,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _plain(x, weight):
            return super().rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(x.shape)
        self._library.add_rms_norm(
            None, out.data_ptr(), rows.data_ptr(), rows.stride(0), None, 0, weight.data_ptr(),
            *rows.shape, eps,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dim() != 2 or not _plain(x, delta, weight):
            return super().add_rms_norm(x, delta, weight, eps)
        total, out = torch.empty(x.shape), torch.empty(x.shape)
        self._library.add_rms_norm(
            total.data_ptr(), out.data_ptr(), x.data_ptr(), x.stride(0), delta.data_ptr(), delta.stride(0),
            weight.data_ptr(), *x.shape, eps,
        )  # fmt: skip
        return total, out

    def gated(self, y: Tensor, activation: str) -> Tensor:
        if activation not in GATES or y.dim() != 2 or not _plain(y):
            return super().gated(y, activation)
        rows, width = y.shape[0], y.shape[1] // 2
        out = torch.empty(rows, width)
        self._library.gated(out.data_ptr(), y.data_ptr(), y.stride(0), rows, width, GATES.index(activation))
        return out


def _can_add(x: Tensor, pool: Tensor) -> bool:
    return x.dtype == torch.float32 and pool.dtype in POOLS and x.stride(1) == 1


def _can_attend(q: Tensor, k_cache: Tensor) -> bool:
    return q.dtype == torch.float32 and k_cache.dtype in KINDS and q.shape[2] <= LARGEST_HEAD


def _can_cache(cache: Tensor) -> bool:
    return cache.dtype == torch.float32 or (cache.dtype == torch.bfloat16 and cache.shape[-1] <= LARGEST_HEAD)


def _plain(*tensors: Tensor) -> bool:
    return all(one.dtype == torch.float32 and one.stride(-1) == 1 for one in tensors)


def _whole_rows(x: Tensor) -> bool:
    """Whether each row [heads, dim] is contiguous."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def to_integer_panels(library: ctypes.CDLL, weight: QuantisedWeight) -> Panels | None:
    """None if native/integer.c has no kernel for this weight. Uses the processor's byte products if
    available, with identical results.

    values: int8 [panels, K / 4, width, 4], inputs padded with zeros to blocks of 32; for 4 bits uint8
            [panels, K / 8, width, 4].
    scales: float32 [panels, 1, width]; for 4 bits bfloat16 [panels, K / 32, width].
    """
    width, form = library.panel_width(), INTEGERS + library.integer_dots()
    (rows, columns), groups = weight.shape, weight.scales.shape[1]
    panels, others = -(-rows // width), (weight.offsets, weight.zeros, weight.order)
    below = panels * width - rows
    if columns < BLOCK or any(part is not None for part in others):
        return None
    if weight.values.dtype == torch.int8 and groups == 1:
        values = F.pad(weight.values, (0, -columns % BLOCK, 0, below))
        fours = _in_huge_pages(values.view(panels, width, -1, 4).transpose(1, 2))
        scales = F.pad(weight.scales.float().flatten(), (0, below)).view(panels, 1, width)
        return Panels(fours, scales, None, rows, columns, form)
    narrow = weight.scales.bfloat16()
    if weight.values.dtype != torch.uint8 or weight.group_size != BLOCK or (narrow != weight.scales).any():
        return None
    halves = F.pad(weight.halves(), (0, 0, 0, below)).view(panels, width, -1, 2, 4)
    eights = _in_huge_pages((halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2))
    turned = F.pad(narrow, (0, 0, 0, below)).view(panels, width, groups).transpose(1, 2).contiguous()
    return Panels(eights, turned, None, rows, columns, form)


def _in_huge_pages(values: Tensor) -> Tensor:
    return huge_zeros(tuple(values.shape), values.dtype).copy_(values)


@lru_cache
def choose_form(library: ctypes.CDLL) -> int:
    """The fastest form that gives correct results, or NONE if float32 products are faster. One per process,
    because each form rounds differently.
    """
    offered = library.bfloat16_forms()
    multiply = PanelsLinear(library)
    forms = [form for form in FORMS if offered >> form & 1 and is_right(multiply, form)]
    form = fastest(multiply, [NONE, *forms]) if forms else NONE
    used = ["8-bit integers"] * bool(library.integer_dots())
    if form != NONE:
        used.append(f"bfloat16 ({FORMS[form]})")
    if used:
        logger.info("this processor's matrix instructions are used for %s", " and ".join(used))
    elif forms:
        logger.debug("this processor's bfloat16 instructions are slower than float32, and not used")
    return form


def rounds_adapters(library: ctypes.CDLL, form: int) -> bool:
    """Whether bfloat16 adapters round their inputs like linear layers in this form. They use AVX512-BF16 with
    AMX, too.
    """
    if form in (NONE, DOTS):
        return form == DOTS
    return bool(library.bfloat16_forms() >> DOTS & 1) and is_right(PanelsLinear(library), DOTS)


def fastest(multiply: PanelsLinear, forms: list[int]) -> int:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    weight = torch.randn(OUTPUTS, COLUMNS, generator=generator).bfloat16()
    packed = to_panels(weight, multiply.width, multiply.block)
    assert packed is not None
    seconds = dict.fromkeys(forms, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several threads would mostly measure waiting
    try:
        for form in forms * ROUNDS:
            began = time.perf_counter()
            multiply(x, packed.rounding(form), None)
            seconds[form] = min(seconds[form], time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return min(forms, key=lambda form: seconds[form])


def is_right(multiply: PanelsLinear, form: int) -> bool:
    """Tests every kind of weight, over several blocks, with partly filled panels, rows and inputs."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(101, 1144, generator=generator).bfloat16()
    scales = torch.rand(101, 11, generator=generator)
    eight = torch.randint(-128, 128, (101, 1144), generator=generator).to(torch.int8)
    four = torch.randint(0, 256, (101, 572), generator=generator).to(torch.uint8)
    x = torch.randn(19, 1144, generator=generator)
    floats = QuantisedWeight(four, scales, codebook=torch.tensor(FLOAT4, dtype=torch.float32))
    for weight in (plain, QuantisedWeight(eight, scales), QuantisedWeight(four, scales, scales), floats):
        packed = to_panels(weight, multiply.width, multiply.block)
        assert packed is not None
        wide = weight.to(torch.float64)
        want = x.bfloat16().double() @ (wide if isinstance(wide, torch.Tensor) else wide.wide()).T
        found = multiply(x, packed.rounding(form), None).double()
        if not torch.allclose(found, want, rtol=0, atol=1e-5 * float(want.abs().max())):
            return False
    return True

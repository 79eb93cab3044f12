"""ReferenceOps: the operations a device must provide, in plain PyTorch.

Each operation has a *Semantics* line and the shapes of its arguments; T is the number of token rows in the
batch. Devices override the operations that they do faster, and are tested against this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.decode_step import DecoderParts, DecodeStep
from manylora.kernels.lora import HostPairs, add_adapters, group_segments, pair_up
from manylora.kernels.panels import Panels, WeightRows
from manylora.kernels.quantised import (
    QuantisedWeight,
    StackedWeight,
    quantised_linear,
    stacked_linear,
)
from manylora.kernels.recurrent import (
    DeltaWeights,
    Mamba2Weights,
    RecurrentState,
    StateBatch,
    delta_rule,
    mamba2,
    short_conv,
)
from manylora.kernels.spec import (
    FP8,
    FP8_MAX,
    NOT_FINITE,
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    ExpertPairs,
    LoraBatch,
    Rotary,
    Targets,
    Weight,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class ReferenceOps:
    """Works on any torch device. It reads the batch tables on the host, so `plan` adds nothing.

    `plan` runs once per step, on the host. The other operations run per layer, on the device. `plan` may
    return subtypes of its arguments with more tables, and only those are passed to the other operations.
    """

    has_bfloat16 = True
    """Whether the processor has native bfloat16 products."""
    reads_tables = True
    """Whether operations read a batch's tables on the host each time, without device tables from `plan`."""
    block_types: Collection[str] = ()
    """GGUF's types that `pack_blocks` takes."""
    packs_tables = False
    """Whether `pack_table` gives panels of a quantised table, and of one that is a head."""
    rounds_inputs = False
    """Whether linear layers round their inputs to bfloat16. Weights are then exact in bfloat16, and all other
    tensors are float32.
    """

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        """Allocate what lives as long as the engine, and choose between implementations. Called once,
        first.
        """

    def plan(
        self, attention: AttentionBatch, lora: LoraBatch | None, fixed: bool = False
    ) -> tuple[AttentionBatch, LoraBatch | None]:
        """Complete a batch whose tables are still on the host.

        fixed: every sequence has one query row, and the shapes of all tables depend only on the number of
        rows and the width of the block table, so that a captured graph can run again with new contents.
        """
        if fixed:
            raise NotImplementedError("the reference reads host tables, which a recorded graph cannot change")
        return attention, lora

    def compiling(self) -> AbstractContextManager[bool]:
        """Inside, kernels may be compiled without running, and results are undefined. Yields whether any
        are.
        """
        return nullcontext(False)

    def compute_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of all tensors except weights, for a model that should compute in `dtype`. Called once,
        before any weight is packed.
        """
        return dtype

    def keeps(self, stored: torch.dtype, compute: torch.dtype) -> bool:
        """Whether `linear` reads a weight in its stored dtype, although it computes in `compute`."""
        return stored == compute

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        """A weight [N, K] in the best form for this device's `linear`, or for `expert_linear` if routed. The
        original may be freed.
        """
        return weight

    def pack_rows(self, rows: WeightRows, routed: bool = False) -> Weight:
        """As `pack`, for a plain weight that is still in its file."""
        return self.pack(rows.whole(), routed)

    def pack_blocks(self, kind: str, data: Tensor, columns: int, rounds_inputs: bool = False) -> Weight:
        """A weight [N, columns] of one of `block_types` as `pack` would give it, straight from the file's
        bytes, uint8 [N, bytes per row]. rounds_inputs: to 8 bits, as by `quantised.round_inputs`.
        """
        raise NotImplementedError

    def pack_table(self, table: WeightRows | QuantisedWeight, is_head: bool) -> Tensor | Panels:
        """An embedding's table [V, K] for `look_up`. is_head: it is also the head's weight; panels serve
        both.
        """
        return table.wide() if isinstance(table, QuantisedWeight) else table.whole()

    def decode_step(self, parts: DecoderParts) -> DecodeStep | None:
        """A decoder's step of one token per sequence as a single call. None if the device does not support
        it.
        """
        return None

    def best(self, logits: Tensor) -> Tensor:
        """As `best_tokens`."""
        return best_tokens(logits)

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        """Semantics: x @ weight.T + bias, with a packed weight; x [T, K] -> [T, N]."""
        if isinstance(packed, StackedWeight):
            return stacked_linear(self.linear, x, packed, bias)
        if not isinstance(packed, Tensor):
            assert not isinstance(packed, Panels)
            return quantised_linear(x, packed, bias)
        return F.linear(x, packed, bias)

    def adapted_linear(
        self, x: Tensor, packed: Weight, bias: Tensor | None, batch: LoraBatch, layer: int, targets: Targets
    ) -> Tensor:
        """`linear`, then `lora_add` to its result."""
        y = self.linear(x, packed, bias)
        self.lora_add(y, x, batch, layer, targets, bias)
        return y

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        """Add every adapter's delta to its own rows of y, in place.

        Semantics, for each segment and target, each member of its row (A, B[, m or b, d]) in order, and
        columns c:
            y[rows, c] += (scale * (x[rows] @ A.T)) @ B.T
            y[rows, c] = m * (y[rows, c] - bias[c]) + bias[c]        (only with a DoRA magnitude m)
        of a shared row
            y[rows, c] += b * ((scale * d * (x[rows] @ A.T)) @ B.T)
        and where DoRA is mixed, first, over the members with a magnitude, and then for each of them
            y[rows, c] = (1 + sum(scale * (m - 1))) * (y[rows, c] - bias[c]) + bias[c]
            y[rows, c] += m * ((scale * (x[rows] @ A.T)) @ B.T)
        y [T, N], x [T, in_dim], bias [N] or None (already part of y).
        """
        add_adapters(y, x, batch, layer, targets, bias)

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
        """Rotate queries and keys, and store keys and values in their pages. Returns the rotated queries.

        Semantics, with rotary = (cos, sin) and R = cos.shape[1], for x of q and k:
            x[..., :R] = x[..., :R] * cos + cat(-x2, x1) * sin, x1 and x2 the halves of x[..., :R]
            k_cache.view(-1, H, D)[slots] = k; the same for v
        q [T, Hq, D], k, v [T, H, D], last dimension contiguous; caches [blocks, tokens_per_block, H, D], one
        layer's; of k's dtype, or bfloat16 or float8_e4m3fn, to which values are rounded, and clamped for the
        latter -> [T, Hq, D].
        """
        if rotary is not None:
            q, k = (rotate(x, *rotary) for x in (q, k))
        self.store_kv(k, v, k_cache, v_cache, batch)
        return q

    def rotate_queries(self, q: Tensor, rotary: Rotary) -> Tensor:
        """Semantics: q as `rotate_and_store` rotates it. q [T, Hq, D] -> [T, Hq, D]."""
        return rotate(q, *rotary)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        """k_cache.view(-1, H, D)[slots] = k; the same for v."""
        store(k, k_cache, batch.slots)
        store(v, v_cache, batch.slots)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        """Causal attention of each row over its own sequence's pages.

        Semantics, for query i (absolute position p) of sequence s, over keys j of s:
            softmax_j(scale * q_i . k_j) v_j  with  j <= p  and, with a window w,  j > p - w
            and, with a softcap c, c * tanh(scale * q_i . k_j / c) in place of scale * q_i . k_j
            and, with sinks, one more score for each head, whose probability is dropped
        q [T, Hq, D], caches [blocks, tokens_per_block, Hkv, D], Hq a multiple of Hkv -> [T, Hq, D].
        """
        out = torch.empty_like(q)
        for s, kv_len in enumerate(batch.kv_lens):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            out[rows] = self.attend_one(q[rows], k_cache, v_cache, batch.block_table[s], kv_len, params)
        return out

    def attend_one(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        blocks: Tensor,
        kv_len: int,
        params: AttentionParams,
    ) -> Tensor:
        """Attention of one sequence, whose last n of kv_len tokens are the queries. q [n, Hq, D] -> [n, Hq,
        D].
        """
        return attend_sequence(q, k_cache, v_cache, blocks, kv_len, params)

    def delta_rule(
        self, x: Tensor, gates: Tensor, weights: DeltaWeights, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        """Update each sequence's state row by row, and store it.

        Semantics, for a row with [c; z] = x and [b; a] = gates, and the convolution's last inputs `seen`:
            q, k, v = silu(sum over i of taps[i] * [seen; c][i]); q and k divided by their lengths, q by
            sqrt(key_dim) too; then for each value head and its key head
            M *= exp(decay * softplus(a + shift));  M += sigmoid(b) * (v - M k) k^T;  y = M q
            result: norm * y * rsqrt(mean(y ** 2) + eps) * silu(z)
        x [T, channels + values], gates [T, 2 * value heads] -> [T, values]; states of one layer.
        """
        return delta_rule(x, gates, weights, state, batch)

    def mamba2(self, x: Tensor, weights: Mamba2Weights, state: RecurrentState, batch: StateBatch) -> Tensor:
        """Update each sequence's state row by row, and store it.

        Semantics, for a row with [z; u; d] = x, and the convolution's last inputs `seen`:
            v, b, c = silu(bias + sum over i of taps[i] * [seen; u][i]); then for each head, and its group's
            b and c, with step = clamp(softplus(d + shift), least, most)
            M *= exp(decay * step);  M += step * v b^T;  y = M c + skip * v
            result: norm * n(y * silu(z)), or norm * n(y) * silu(z), n(y) being y * rsqrt(mean(y ** 2) + eps)
            over each of norm_groups parts; without a norm y * silu(z); with norm_groups 0 y
        x [T, values + channels + heads] -> [T, values]; states of one layer.
        """
        return mamba2(x, weights, state, batch)

    def short_conv(self, x: Tensor, taps: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        """Update each sequence's last inputs `seen` row by row, and store them.

        Semantics, for a row with [b; c; h] = x:  c * sum over i of taps[i] * [seen; b * h][i]
        x [T, 3 * channels], taps [taps, channels] float32, the newest input's last -> [T, channels]; of
        one layer, whose states have no memory.
        """
        return short_conv(x, taps, state, batch)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Semantics: with n = x.float() * rsqrt(mean(x.float() ** 2, -1) + eps),
            (weight * n.to(weight.dtype)).to(x.dtype)

        weight [N] in the dtype of x, or in float32 where the model needs it exact.
        """
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Semantics: x + delta, and rms_norm(x + delta, weight, eps). x, delta [T, N]."""
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def gated(self, y: Tensor, activation: str) -> Tensor:
        """Semantics: with up, gate = y.chunk(2, -1):  f(gate) * up, f = ACTIVATIONS[activation]

        y [T, 2N], last dimension contiguous -> [T, N].
        """
        up, gate = y.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def clamped_swiglu(self, y: Tensor, alpha: float, limit: float) -> Tensor:
        """Semantics: with up, gate = y.chunk(2, -1), gate no more than limit, up within -limit and limit:
            (up + 1) * (gate * sigmoid(alpha * gate))

        y [T, 2N], last dimension contiguous -> [T, N].
        """
        up, gate = y.chunk(2, dim=-1)
        up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Semantics: (x - mean(x, -1)) * rsqrt(var(x, -1) + eps) * weight + bias, in float32, to x.dtype.

        x [..., N]; weight, bias [N], or [H, N] for the last two dimensions of x.
        """
        if weight.dim() == 1 and weight.dtype == x.dtype:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        normed = F.layer_norm(x.float(), weight.shape[-1:], None, None, eps)
        return (normed * weight + bias).to(x.dtype)

    def pair_up(
        self, choices: Tensor, num_experts: int, lora: LoraBatch | None
    ) -> tuple[ExpertPairs, Tensor]:
        """The pairs of one layer, and where each choice [T * k] is among them (int64), to undo the order.

        choices [T, k] int64: the experts of each row.
        """
        return pair_up(choices, num_experts, lora)

    def expert_linear(self, x: Tensor, pairs: ExpertPairs, weights: Sequence[Weight]) -> Tensor:
        """Multiply each pair's row by its expert's weight.

        Semantics, for each expert e and its pairs p: y[p] = x[p] @ weights[e].T
        x [P, K], weights: E packed ones of [N, K] -> [P, N].
        """
        assert isinstance(pairs, HostPairs)
        runs = zip(pairs.starts, pairs.starts[1:], weights, strict=False)
        return torch.cat([self.linear(x[start:stop], w, None) for start, stop, w in runs if start < stop])

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        """Add to each pair the delta of its row's adapter for its expert, in place.

        Semantics, for each expert e and segment, their pairs p, and each target of the segment's adapter with
        a row (A, B[, m]) and columns c, as `lora_add` without a bias:
            y[p, c] += (scale * (x[p] @ A[e].T)) @ B[e].T
            y[p, c] *= m[e]                                          (only with a DoRA magnitude m)
        y [P, N], x [P, in_dim].
        """
        assert isinstance(pairs, HostPairs)
        segments = group_segments(batch, pairs.groups, layer, targets, x.shape[-1])
        if segments:
            self.lora_add(y, x, LoraBatch(batch.pool, segments), layer, targets)


@torch.inference_mode()
def best_tokens(logits: Tensor) -> Tensor:
    """Index of the first maximum in each row of logits [L, vocab], as [L] int64. NOT_FINITE if a logit is NaN
    or infinite.

    The sum of a row is used for that check: testing every logit costs thirty times more.
    """
    if logits.device.type != "cpu":
        return torch.where(torch.isfinite(logits.sum(dim=-1)), torch.argmax(logits, dim=-1), NOT_FINITE)
    rows = logits.numpy()  # NumPy's calls are faster and do not wake torch's threads
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.where(np.isfinite(rows.sum(-1)), rows.argmax(-1), NOT_FINITE))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] with its first R elements rotated. cos and sin [T, R], as in `rotate_and_store`."""
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    x1, x2 = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """cache.view(-1, H, D)[slots] = new. new [T, H, D]."""
    rows = cache.view(-1, *new.shape[1:])
    if cache.dtype == FP8:  # as bytes, as few operations support it; clamped, as overflow becomes NaN
        new, rows = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), rows.view(torch.uint8)
    rows.index_copy_(0, slots, new.to(rows.dtype))


def gather(cache: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of a sequence's first tokens, [Hkv, length, D]."""
    used = blocks[: -(-length // cache.shape[1])].long()
    return cache[used].to(dtype).flatten(0, 1)[:length].transpose(0, 1)


def attend_sequence(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, kv_len: int, params: AttentionParams
) -> Tensor:
    """As `ReferenceOps.attend_one`. The G query heads of a key head become G * n rows, so that keys are not
    repeated.
    """
    count, num_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    groups = num_heads // kv_heads
    k, v = (gather(cache, blocks, kv_len, q.dtype) for cache in (k_cache, v_cache))
    queries = q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
    keys = torch.arange(kv_len, device=q.device)
    last = torch.arange(kv_len - count, kv_len, device=q.device).unsqueeze(1)
    mask = keys <= last
    if params.window is not None:
        mask &= keys > last - params.window
    sinks = params.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, groups, 1).expand(-1, -1, count).reshape(1, kv_heads, -1)
    mask = mask.repeat(groups, 1)
    mixed = attend(queries.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, params, sinks)
    return mixed.view(kv_heads, groups, count, dim).permute(2, 0, 1, 3).reshape(count, num_heads, dim)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams, sinks: Tensor | None = None
) -> Tensor:
    """Masked softmax(scores) v over the last two dimensions. The mask includes the window.

    sinks: for each row of q, [..., rows]; None if params has none.
    """
    scale, softcap = params.scale, params.softcap
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2)
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        own = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, own), dim=-1)
    return torch.softmax(scores, dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v

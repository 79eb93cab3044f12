"""The layers of a decoder. LoraLinear applies adapters. No layer depends on a device or a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from manylora.config.blocks import BesideConfig, LayerInputsConfig
from manylora.config.model import ModelConfig
from manylora.kernels.panels import Panels, look_up
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.reference import ACTIVATIONS, ReferenceOps, rotate
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch, LoraTarget, Rotary, Weight
from manylora.model.attend import attend_spans
from manylora.model.extras import adapt_inputs, adapt_linear, adapt_norm, changed_inputs, prefixes


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm if there is a bias. weight [N]. name: in extras. plus_one: stored minus 1."""

    ops: ReferenceOps
    weight: Tensor
    bias: Tensor | None
    eps: float
    name: str = ""
    plus_one: bool = False

    def __call__(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        y = self._norm(x, self.weight)
        self._adapt(y, x, lora)
        return y

    def add(self, x: Tensor, delta: Tensor, lora: LoraBatch | None = None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            total = x + delta
            return total, self(total, lora)
        total, y = self.ops.add_rms_norm(x, delta, self.weight, self.eps)
        self._adapt(y, total, lora)
        return total, y

    def _adapt(self, y: Tensor, x: Tensor, lora: LoraBatch | None) -> None:
        if lora is not None and lora.extras:
            adapt_norm(y, x, lora.extras, self.name, self._renormalise)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.bias is not None:
            return self.ops.layer_norm(x, weight, self.bias, self.eps)
        return self.ops.rms_norm(x, weight, self.eps)

    def _renormalise(self, x: Tensor, stored: Tensor) -> Tensor:
        weight = stored + 1 if self.plus_one else stored
        return self._norm(x, weight.to(self.weight.dtype).view_as(self.weight))


@dataclass(frozen=True)
class LoraLinear:
    """y = x W^T + bias, plus each row's adapter. weight: [N, K], packed. targets: modules and columns."""

    ops: ReferenceOps
    layer: int
    weight: Weight
    bias: Tensor | None
    targets: tuple[LoraTarget, ...]

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        if lora is None:
            return self.ops.linear(x, self.weight, self.bias)
        if lora.extras:
            x = changed_inputs(x, lora.extras, self.layer, self.targets)
        y = self.ops.adapted_linear(x, self.weight, self.bias, lora, self.layer, self.targets)
        if lora.extras:
            base = partial(self.ops.linear, packed=self.weight, bias=self.bias)
            adapt_inputs(y, x, lora.extras, self.layer, self.targets, base)
            adapt_linear(y, lora.extras, self.layer, self.targets)
        return y


class Rotation(NamedTuple):
    """Of queries and keys. growth: factors on queries, [T, 1, 1]. bias: on an encoder's scores."""

    rotary: Rotary | None = None
    growth: Tensor | None = None
    bias: Tensor | None = None


class Attends(Protocol):
    """x [T, hidden] -> [T, hidden]. rotary: index of its rotation; -1: none. kv: the layer's."""

    @property
    def rotary(self) -> int: ...

    def __call__(
        self, x: Tensor, rotation: Rotation, batch: AttentionBatch, lora: LoraBatch | None, kv: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over paged keys and values; in an encoder, within whole prompts, uncached.
    q_norm, k_norm: over head_dim, or over all heads if config.qk_norm is `all`. rotary: index; -1: none.
    shares: it has only queries, over keys and values of another layer, which ran earlier in this step.
    """

    config: ModelConfig
    ops: ReferenceOps
    qkv: LoraLinear
    out: LoraLinear
    q_norm: Norm | None
    k_norm: Norm | None
    params: AttentionParams
    rotary: int = -1
    v_norm: Norm | None = None
    shares: bool = False

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
    ) -> Tensor:
        config, ops, rows = self.config, self.ops, x.shape[0]
        if self.shares:
            q = self.qkv(x, lora).view(rows, config.num_heads, config.head_dim)
            q = q if self.q_norm is None else self.q_norm(q, lora)
            q = q if rotation.rotary is None else ops.rotate_queries(q, rotation.rotary)
            return self.out(ops.attention(q, kv[0], kv[1], batch, self.params).flatten(1), lora)
        if config.keys_are_values:
            q, k = self.qkv(x, lora).split((config.q_rows, config.kv_size), dim=-1)
            v = k
        else:
            q, k, v = self.qkv(x, lora).split((config.q_rows, config.kv_size, config.kv_size), dim=-1)
        if config.attention_gated:
            q, gate = q.unflatten(-1, (config.num_heads, 2, config.head_dim)).unbind(2)
        if config.qk_norm == "all":
            q, k = self._normalise(q, k, lora)
        q = q.reshape(rows, config.num_heads, config.head_dim)
        k = k.reshape(rows, config.num_kv_heads, config.head_dim)
        v = v.reshape(rows, config.num_kv_heads, config.head_dim)
        if config.qk_norm in ("head", "each", "plain") and self.q_norm is not None:
            q, k = self._normalise(q, k, lora)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if config.qkv_clip is not None:
            q, k, v = (part.clamp(-config.qkv_clip, config.qkv_clip) for part in (q, k, v))
        if config.rope_interleaved and rotation.rotary is not None:
            q, k = (halves_first(part, config.rotary_dim) for part in (q, k))
        if rotation.growth is not None:
            q = q * rotation.growth
        if config.bidirectional:
            if rotation.rotary is not None:
                q, k = rotate(q, *rotation.rotary), rotate(k, *rotation.rotary)
            own = self.params.scale, rotation.bias, self.params.window
            mixed = attend_spans(q, k, v, batch.query_starts, *own)
        else:
            q = ops.rotate_and_store(q, k, v, rotation.rotary, kv[0], kv[1], batch)
            # Overwrite the unused keys and values of virtual tokens with those that adapters bring.
            extras = lora.extras if lora is not None else ()
            for places, mine, values in prefixes(extras, self.qkv.layer, config.num_kv_heads, v.dtype):
                if config.rope_interleaved and rotation.rotary is not None:
                    mine = halves_first(mine, config.rotary_dim)
                ops.store_kv(mine, values, kv[0], kv[1], replace(batch, slots=batch.slots[places]))
            mixed = ops.attention(q, kv[0], kv[1], batch, self.params)
        if config.attention_gated:
            mixed = mixed.view(gate.shape) * torch.sigmoid(gate)
        return self.out(mixed.reshape(rows, config.q_size), lora)

    def _normalise(self, q: Tensor, k: Tensor, lora: LoraBatch | None) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q, lora), self.k_norm(k, lora)


def halves_first(x: Tensor, count: int) -> Tensor:
    """x [T, H, D]: the first `count` of each head from pairs to first and second ones; scores stay."""
    if count == x.shape[-1]:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape)
    pairs = x[..., :count]
    return torch.cat((pairs[..., ::2], pairs[..., 1::2], x[..., count:]), dim=-1)


class LogitRows(NamedTuple):
    """The rows [L] that are needed after a layer, and their adapters, counted within these rows."""

    rows: Tensor
    lora: LoraBatch | None


FeedForward = Callable[[Tensor, LoraBatch | None], Tensor]
"""The MLP or mixture of experts of a block; x [T, hidden] -> [T, hidden]."""

AddInput = Callable[[Tensor, Tensor, LoraBatch | None], Tensor]
"""From x [T, hidden] and the layer's own vectors [T, dim], what is added to x."""


@dataclass(frozen=True)
class Mlp:
    """down(f(gate x) * up x), fused as [up; gate], or down(f(up x)). scales: on gate and output."""

    up_gate: LoraLinear
    down: LoraLinear
    activation: str
    gated: bool
    cutoff: float | None = None  # gates below mean + cutoff * standard deviation become 0
    scales: tuple[float, float] = (1.0, 1.0)

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        y = self.up_gate(x, lora)
        if self.cutoff is not None:
            gate = y.chunk(2, dim=-1)[1]
            wide = gate.float()
            mean, deviation = self._spread(wide)
            gate.copy_((wide - (mean + self.cutoff * deviation)).relu())
        if self.scales != (1.0, 1.0):
            y[:, y.shape[1] // 2 :] *= self.scales[0]
            return self.down(self.up_gate.ops.gated(y, self.activation), lora) * self.scales[1]
        if self.gated:
            return self.down(self.up_gate.ops.gated(y, self.activation), lora)
        return self.down(ACTIVATIONS[self.activation](y), lora)

    def _spread(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        return gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, unbiased=False)


@dataclass(frozen=True)
class Block:
    """One decoder layer. attention: None if a recurrent layer replaces it. Norms that the family lacks are
    None; post norms apply to branch outputs. beside: what is added, from the MLP's output and the
    unnormalised x. scalar [1]: on the whole output. Takes the residual stream x and a delta that is not added
    yet (None: zero), and returns such a pair, so that one kernel adds and normalises, also between blocks.
    mix: attention or its replacement; None: only an MLP. own [T, dim]: the layer's vectors, for `add_input`.
    wanted: rows to compute after `mix`.
    """

    config: ModelConfig
    attention: Attends | None
    mlp: FeedForward | None
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    add_input: AddInput | None = None
    beside: Callable[[Tensor, Tensor, LoraBatch | None], Tensor] | None = None
    scalar: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        mix: Callable[[Tensor], Tensor] | None,
        lora: LoraBatch | None,
        own: Tensor | None = None,
        wanted: LogitRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x, seen = _add(self.attention_norm if mix is not None else self.mlp_norm, x, delta, lora)
        mixed = seen if mix is None else mix(seen)
        if wanted is not None:
            x, seen, mixed = (one[wanted.rows] for one in (x, seen, mixed))
            lora, own = wanted.lora, None if own is None else own[wanted.rows]
        if mix is None or self.mlp is None:
            return x, self._scaled(mixed if self.mlp is None else self.mlp(seen, lora))
        if self.config.post_norm:  # attention_norm is the previous block's, applied to its sum
            _, x = _add(self.mlp_norm, seen, mixed, lora)
            return x, self.mlp(x, lora)
        mixed = _apply(self.attention_post_norm, mixed, lora)
        if self.config.parallel_blocks:
            seen = seen if self.config.shared_norm else _apply(self.mlp_norm, x, lora)
            return x + mixed, self.mlp(seen, lora)
        x, seen = _add(self.mlp_norm, x, self._scaled(mixed), lora)
        y = self.mlp(seen, lora)
        if self.beside is not None:
            y = self.beside(y, x, lora)
        delta = self._scaled(_apply(self.mlp_post_norm, y, lora))
        if self.add_input is not None and own is not None:
            x = x + delta
            delta = self.add_input(x, own, lora)
        return (x, delta) if self.scalar is None else ((x + delta) * self.scalar, None)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale


def side_by_side(
    scales: BesideConfig | None, attention: Callable[[Tensor], Tensor], recurrent: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    assert scales is not None, "only then a layer has both"

    def mix(x: Tensor) -> Tensor:
        attended = attention(x * scales.attention_in) * scales.attention_out
        return recurrent(x * scales.recurrent_in) * scales.recurrent_out + attended

    return mix


def _apply(norm: Norm | None, x: Tensor, lora: LoraBatch | None) -> Tensor:
    return x if norm is None else norm(x, lora)


def _add(norm: Norm | None, x: Tensor, delta: Tensor | None, lora: LoraBatch | None) -> tuple[Tensor, Tensor]:
    if delta is None:
        return x, _apply(norm, x, lora)
    if norm is not None:
        return norm.add(x, delta, lora)
    total = x + delta
    return total, total


HALF = 2.0**-0.5  # keeps the magnitude of a sum of two vectors


@dataclass(frozen=True)
class LayerInputs:
    """table [vocab_size, layers * dim]. project: hidden to layers * dim. norm: over dim."""

    config: LayerInputsConfig
    table: Tensor | Panels
    project: LoraLinear
    norm: Norm

    def __call__(self, ids: Tensor, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """ids [T]; x [T, hidden]: their embeddings -> [layers, T, dim]."""
        return self.add(ids, self.made(x, lora))

    def made(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """The parts computed from the tokens' embeddings, [T, layers, dim]."""
        made = self.project(x, lora) * torch.tensor(x.shape[1] ** -0.5, dtype=x.dtype).item()
        return self.norm(made.unflatten(-1, (-1, self.config.dim)), lora)

    def add(self, ids: Tensor, made: Tensor) -> Tensor:
        ids = ids.where(ids < self.config.vocab_size, 0)
        scale = torch.tensor(self.config.dim**0.5, dtype=made.dtype)  # rounded before use, as in training
        looked_up = self.look_up(ids).to(made.dtype) * scale.item()
        whole = (made + looked_up.view(made.shape)) * torch.tensor(HALF, dtype=made.dtype).item()
        return whole.transpose(0, 1)

    def look_up(self, ids: Tensor) -> Tensor:
        """[T] -> [T, layers * dim], in the table's dtype or wider."""
        return look_up(ids, self.table)


@dataclass(frozen=True)
class LayerInput:
    """norm(project(f(gate x) * own)), which is added to the residual stream after a block."""

    gate: LoraLinear
    project: LoraLinear
    norm: Norm
    activation: str

    def __call__(self, x: Tensor, own: Tensor, lora: LoraBatch | None) -> Tensor:
        """x [T, hidden], own [T, dim]: the layer's vectors -> [T, hidden]."""
        gated = self.gate.ops.gated(torch.cat((own, self.gate(x, lora)), dim=-1), self.activation)
        return self.norm(self.project(gated, lora), lora)


@dataclass(frozen=True)
class RecurrentLayer:
    """project: to [q; k; v; z] of a delta rule, to [z; values; b; c; d] of Mamba-2, or to [b; c; h] of a
    convolution. mix: the operation with its weights, from these rows, and from those of `gates`. gates: of a
    delta rule, to [b; a], which control writing and forgetting. factors: on the rows, in the compute dtype.
    """

    project: LoraLinear
    out: LoraLinear
    mix: Callable[..., Tensor]
    gates: LoraLinear | None = None
    factors: Tensor | None = None

    def __call__(self, x: Tensor, lora: LoraBatch | None, state: RecurrentState, batch: StateBatch) -> Tensor:
        rows = self.project(x, lora)
        rows = rows if self.factors is None else rows * self.factors
        inputs = (rows,) if self.gates is None else (rows, self.gates(x, lora))
        return self.out(self.mix(*inputs, state=state, batch=batch), lora)

"""Transformer: shared by Decoder and EncoderDecoder. Creates layers from weights, and embeds tokens."""

from __future__ import annotations

from functools import cached_property
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from manylora.adapters.modules import LoraModuleId
from manylora.config.model import ModelConfig
from manylora.kernels.panels import Panels, look_up
from manylora.kernels.quantised import weight_bytes
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraTarget
from manylora.model.batch import ForwardBatch
from manylora.model.extras import adapt_embedding
from manylora.model.heads import ClassificationHead, HeadLayer
from manylora.model.layers import LoraLinear, Mlp, Norm


def gate_up(gated: bool, inner: int, up: int, gate: int, both: int | None = None) -> list[LoraTarget]:
    """Of an MLP's fused [up; gate]. up, gate, both: modules."""
    if not gated:
        return [LoraTarget(up, 0, inner)]
    fused = [] if both is None else [LoraTarget(both, 0, 2 * inner)]
    return [*fused, LoraTarget(gate, 0, inner), LoraTarget(up, inner, inner)]


class Transformer:
    """weights: by our names, from `model.weights`. dtype: the compute dtype; weights may be narrower."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Any], dtype: torch.dtype, ops: ReferenceOps
    ) -> None:
        self.config, self.dtype = config, dtype
        self._weights, self._ops = weights, ops
        self._device = weights["embed"].device
        self._head, self._head_bias = weights["head.weight"], weights.get("head.bias")
        self.classifier = ClassificationHead.of_weights(weights, config.head_dense_activation)
        self.head_layer: HeadLayer | None = None
        if config.head_layer is not None and "head_layer.weight" in weights:
            norm = None
            if config.head_layer.norm:
                part = "head_layer.norm"
                norm = weights[f"{part}.weight"], weights.get(f"{part}.bias"), config.norm_eps
            weight, bias = weights["head_layer.weight"], weights.get("head_layer.bias")
            self.head_layer = HeadLayer(config.head_layer, weight, bias, norm)
        self.dense: tuple[HeadLayer, ...] = ()  # applied after pooling, for embeddings
        scale = config.attention_scale
        self._attention_scale = config.head_dim**-0.5 if scale is None else scale
        # Rounded to the compute dtype before use, as in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=self._device)

    @cached_property
    def weight_bytes(self) -> int:
        weights = {id(weight): weight for weight in self._weights.values()}
        return sum(map(weight_bytes, weights.values()))

    @property
    def has_quantised_experts(self) -> bool:
        experts = [weight for name, weight in self._weights.items() if ".expert." in name]
        return any(
            weight.scales is not None if isinstance(weight, Panels) else not isinstance(weight, Tensor)
            for weight in experts
        )

    def _embed_tokens(self, batch: ForwardBatch, table: Tensor | Panels, name: str) -> Tensor:
        """Scaled embeddings [T, hidden] of `batch.input_ids`. name: of the table in an adapter's extras."""
        x = self._look_up(batch.input_ids, table)
        if batch.lora is not None and batch.lora.extras:
            adapt_embedding(x, batch.input_ids, batch.lora.extras, name)
        return x if self.config.embedding_scale == 1 else x * self._embedding_scale

    def _look_up(self, ids: Tensor, table: Tensor | Panels) -> Tensor:
        return look_up(ids, table).to(self.dtype)

    def _head_rows(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Logits [L, vocab] float32 of hidden states [L, hidden]. None if another rank has the head."""
        return self._ops.linear(x, self._head, bias).float()

    def _qkv(self, layer: int) -> LoraLinear:
        config = self.config.of_layer(layer)
        q, kv = config.q_rows, config.kv_size
        targets = (
            LoraTarget(LoraModuleId.ATTN_QKV, 0, q + 2 * kv),
            LoraTarget(LoraModuleId.ATTN_Q, 0, q),
            LoraTarget(LoraModuleId.ATTN_K, q, kv),
            LoraTarget(LoraModuleId.ATTN_V, q + kv, kv),
        )
        return self._linear(layer, "qkv", *(targets[1:3] if config.keys_are_values else targets))

    def _mlp(self, layer: int) -> Mlp:
        config, inner = self.config, self.config.of_layer(layer).intermediate_size
        modules = LoraModuleId.MLP_H_TO_4H, LoraModuleId.MLP_GATE, LoraModuleId.MLP_GATE_UP
        share = config.sparsity[layer] if config.sparsity else 0.0  # of gates that become 0
        return Mlp(
            up_gate=self._linear(layer, "up_gate", *gate_up(config.gated_mlp, inner, *modules)),
            down=self._one(layer, "down", LoraModuleId.MLP_4H_TO_H),
            activation=config.activation,
            gated=config.gated_mlp,
            cutoff=NormalDist().inv_cdf(share) if share else None,
            scales=config.mlp_scales,
        )

    def _linear(self, layer: int, name: str, *targets: LoraTarget) -> LoraLinear:
        name = f"{layer}.{name}"
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return LoraLinear(self._ops, layer, weight, bias, targets)

    def _one(self, layer: int, name: str, module_id: int, width: int | None = None) -> LoraLinear:
        """A layer of one module. width: of its output; None: hidden."""
        return self._linear(layer, name, LoraTarget(module_id, 0, width or self.config.hidden_size))

    def _inner_norm(self, layer: int, name: str, theirs: str | None) -> Norm | None:
        """Of a layer. name: of our weights. theirs: of the checkpoint's, which is also that in extras."""
        return self._norm(f"{layer}.{name}", f"layers.{layer}.{theirs}")

    def _norm(self, name: str, extra: str) -> Norm | None:
        """name: of our weights. extra: in an adapter's extras. None: the family has no such norm."""
        config = self.config
        weight, bias = (self._weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is None:
            return None
        if config.qk_norm == "each" and name.endswith(("q_norm", "k_norm")):
            weight = weight.view(-1, config.head_dim)
        if bias is None and config.norm.startswith("layer"):
            bias = torch.zeros_like(weight)
        return Norm(self._ops, weight, bias, config.norm_eps, extra, config.norm.endswith("plus_one"))

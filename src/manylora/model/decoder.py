"""Decoder: one transformer for every supported family; the families differ in their ModelConfig."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.engine import ModelConfig, MoeConfig
from manylora.kernels.panels import Panels
from manylora.kernels.spec import LoraTarget, Ops, Weight
from manylora.lora.modules import LoraModuleId
from manylora.model.batch import ForwardBatch
from manylora.model.extras import adapt_embedding, adapt_head
from manylora.model.families import FAMILIES
from manylora.model.layers import Attention, Block, FeedForward, LoraLinear, Mlp, Norm
from manylora.model.moe import Experts, Moe, SharedExpert
from manylora.model.rope import rope_frequencies

__all__ = ["Decoder", "nbytes"]


class Decoder:
    """weights: our names to tensors on one device, as `model.weights` makes them, matrices packed.

    dtype: what is computed in; weights may be narrower.

    max_seq_len: the longest sequence that will come; None: what the model allows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Any],
        dtype: torch.dtype,
        ops: Ops,
        max_seq_len: int | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._names = FAMILIES[config.architecture].names(config)
        self._weights, self._ops = weights, ops
        self._embedding = weights["embed"]
        self._positions = weights.get("positions")
        self._head, self._head_bias = weights["head.weight"], weights.get("head.bias")
        norm = self._norm("norm", "norm")
        assert norm is not None
        self._final_norm = norm
        self._blocks = [self._block(layer) for layer in range(config.num_layers)]
        self._ropes: list[tuple[Tensor, float]] = []
        if not config.learned_positions:
            self._ropes.append(rope_frequencies(config, max_seq_len))
            if config.rope_local_theta is not None:
                self._ropes.append(rope_frequencies(config, max_seq_len, local=True))
        device = self._embedding.device
        self._ropes = [(frequencies.to(device), factor) for frequencies, factor in self._ropes]
        # Rounded to the compute dtype before it is used, as the models were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=device)

    @property
    def weight_bytes(self) -> int:
        weights = {id(weight): weight for weight in self._weights.values()}
        return sum(nbytes(weight) for weight in weights.values())

    @property
    def has_quantised_experts(self) -> bool:
        """Whether an expert's weights are held in fewer bits than they were stored in."""
        return any(".expert." in name and _is_quantised(w) for name, w in self._weights.items())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Logits [L, vocab] float32 of `batch.logits_rows`; writes keys and values into kv.

        kv [num_layers, 2, num_blocks, tokens_per_block, num_kv_heads, head_dim].
        """
        config = self.config
        x = self._embed(batch)
        rotary = [self._rotary(batch.positions, rope) for rope in self._ropes]
        delta: Tensor | None = None  # of the block before, not added yet
        for layer, block in enumerate(self._blocks):
            # The last base is that of layers with a window; most models have one base only.
            angles = rotary[-1 if block.attention.window is not None else 0] if rotary else None
            x, delta = block(x, delta, angles, batch.attention, batch.lora, kv[layer])
        logits = self._logits(x, delta, batch)
        if config.logits_scale != 1:
            logits *= config.logits_scale
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        rows, lora = batch.logits_rows, batch.lora
        assert delta is not None, "a decoder has a block"
        if lora is None or not lora.extras:
            _, x = self._final_norm.add(x[rows], delta[rows])
            return self._ops.linear(x, self._head, self._head_bias).float()
        x = self._final_norm.add(x, delta, lora)[1][rows]
        logits = self._ops.linear(x, self._head, self._head_bias).float()
        adapt_head(logits, x, rows, lora.extras, self._head_bias, self.config.tie_word_embeddings)
        return logits

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding's scale is for tokens: vectors of a request are taken as they come."""
        x = F.embedding(batch.input_ids, self._embedding).to(self.dtype)
        if batch.lora is not None and batch.lora.extras:
            adapt_embedding(x, batch.input_ids, batch.lora.extras)
        if self.config.embedding_scale != 1:
            x = x * self._embedding_scale
        if batch.embeddings is not None:
            rows, vectors = batch.embeddings
            x[rows] = vectors
        if self._positions is not None:
            x = x + F.embedding(batch.positions, self._positions)
        return x

    def _rotary(self, positions: Tensor, rope: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
        """cos and sin [T, rotary_dim] in the compute dtype; angles in float32."""
        frequencies, factor = rope
        angles = positions.float().unsqueeze(1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)

    def _block(self, layer: int) -> Block:
        norms = {
            name: self._norm(f"{layer}.{name}", f"layers.{layer}.{self._names.block_norms.get(name)}")
            for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        }
        return Block(self.config, self._attention(layer), self._feed_forward(layer), **norms)

    def _attention(self, layer: int) -> Attention:
        config = self.config
        q, kv = config.q_size, config.kv_size
        return Attention(
            config,
            self._ops,
            qkv=self._linear(
                layer,
                "qkv",
                LoraTarget(LoraModuleId.ATTN_QKV, 0, q + 2 * kv),
                LoraTarget(LoraModuleId.ATTN_Q, 0, q),
                LoraTarget(LoraModuleId.ATTN_K, q, kv),
                LoraTarget(LoraModuleId.ATTN_V, q + kv, kv),
            ),
            out=self._linear(layer, "out", LoraTarget(LoraModuleId.ATTN_DENSE, 0, config.hidden_size)),
            q_norm=self._norm(f"{layer}.q_norm", f"layers.{layer}.{self._names.q_norm}"),
            k_norm=self._norm(f"{layer}.k_norm", f"layers.{layer}.{self._names.k_norm}"),
            window=config.sliding_windows[layer] if config.sliding_windows else None,
        )

    def _feed_forward(self, layer: int) -> FeedForward:
        config, inner = self.config, self.config.intermediate_size
        if config.moe is not None and layer in config.moe.layers:
            return self._moe(layer, config.moe)
        gated = (
            LoraTarget(LoraModuleId.MLP_GATE_UP, 0, 2 * inner),
            LoraTarget(LoraModuleId.MLP_GATE, 0, inner),
            LoraTarget(LoraModuleId.MLP_H_TO_4H, inner, inner),
        )
        targets = gated if config.gated_mlp else (LoraTarget(LoraModuleId.MLP_H_TO_4H, 0, inner),)
        return Mlp(
            up_gate=self._linear(layer, "up_gate", *targets),
            down=self._linear(layer, "down", LoraTarget(LoraModuleId.MLP_4H_TO_H, 0, config.hidden_size)),
            activation=config.activation,
            gated=config.gated_mlp,
        )

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        hidden, inner, shared = self.config.hidden_size, moe.intermediate_size, moe.shared_intermediate_size
        activation = self.config.activation
        extra = None
        if shared:
            mlp = Mlp(
                up_gate=self._linear(
                    layer,
                    "shared.up_gate",
                    LoraTarget(LoraModuleId.SHARED_EXPERT_GATE, 0, shared),
                    LoraTarget(LoraModuleId.SHARED_EXPERT_H_TO_4H, shared, shared),
                ),
                down=self._linear(
                    layer, "shared.down", LoraTarget(LoraModuleId.SHARED_EXPERT_4H_TO_H, 0, hidden)
                ),
                activation=activation,
                gated=True,
            )
            extra = SharedExpert(
                mlp, self._linear(layer, "shared_gate", LoraTarget(LoraModuleId.MLP_ROUTER, 0, 1))
            )
        return Moe(
            moe,
            router=self._linear(layer, "router", LoraTarget(LoraModuleId.MOE_ROUTER, 0, moe.num_experts)),
            up_gate=self._experts(
                layer,
                "up_gate",
                LoraTarget(LoraModuleId.MOE_GATE, 0, inner),
                LoraTarget(LoraModuleId.MOE_H_TO_4H, inner, inner),
            ),
            down=self._experts(layer, "down", LoraTarget(LoraModuleId.MOE_4H_TO_H, 0, hidden)),
            activation=activation,
            shared=extra,
        )

    def _experts(self, layer: int, name: str, *targets: LoraTarget) -> Experts:
        assert self.config.moe is not None
        numbers = range(self.config.moe.num_experts)
        weights = tuple(self._weights[f"{layer}.expert.{e}.{name}.weight"] for e in numbers)
        return Experts(self._ops, layer, weights, targets)

    def _linear(self, layer: int, name: str, *targets: LoraTarget) -> LoraLinear:
        name = f"{layer}.{name}"
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return LoraLinear(self._ops, layer, weight, bias, targets)

    def _norm(self, name: str, extra: str) -> Norm | None:
        """name: among the weights; extra: among an adapter's extras."""
        weight, bias = (self._weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is None:
            return None
        config = self.config
        return Norm(self._ops, weight, bias, config.norm_eps, extra, config.norm == "rms_plus_one")


def nbytes(weight: Weight) -> int:
    """Of tensors in every layout; some do not tell."""
    return weight.numel() * weight.element_size() if isinstance(weight, Tensor) else weight.nbytes


def _is_quantised(weight: Weight) -> bool:
    return weight.scales is not None if isinstance(weight, Panels) else not isinstance(weight, Tensor)

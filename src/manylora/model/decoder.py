"""Decoder: one transformer for every decoder-only family; the families differ in their ModelConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.blocks import (
    AltUpConfig,
    ConvConfig,
    DeltaConfig,
    LatentConfig,
    LayerInputsConfig,
    Mamba2Config,
)
from manylora.config.engine import ModelConfig, MoeConfig
from manylora.kernels.delta_rule import DeltaWeights
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionParams, LoraBatch, LoraTarget
from manylora.lora.modules import LoraModuleId
from manylora.model.altup import AltUp, AltUpBlock, Laurel, make_streams
from manylora.model.batch import ForwardBatch, HiddenRows
from manylora.model.chunks import in_chunks
from manylora.model.decoder_parts import decoder_parts
from manylora.model.delta_rule import DeltaRule, LayerState, passing_states
from manylora.model.extras import adapt_head, adapt_prompt
from manylora.model.families import FAMILIES
from manylora.model.kv_tensors import KvTensors
from manylora.model.latent import Expansion, LatentAttention
from manylora.model.layer_inputs import LayerInput, LayerInputs
from manylora.model.layers import (
    Attends,
    Attention,
    Block,
    FeedForward,
    LoraLinear,
    Mlp,
    Norm,
    Turns,
    Wanted,
    side_by_side,
)
from manylora.model.mamba2 import Mamba2, mamba2_factors, mamba2_weights
from manylora.model.moe import Experts, ExpertsBesideMlp, Moe, SharedExpert
from manylora.model.rope import Rope, make_rope
from manylora.model.routing import Router, WideRouter
from manylora.model.shared_kv import SharedKvAttention
from manylora.model.short_conv import ShortConv
from manylora.model.transformer import Transformer


class Decoder(Transformer):
    """The arguments are Transformer's."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Any], dtype: torch.dtype, ops: ReferenceOps
    ) -> None:
        super().__init__(config, weights, dtype, ops)
        self._names = FAMILIES[config.architecture].names(config)
        norm = self._norm("norm", "norm")
        if config.post_norm:
            norm = self._layer_norm(config.num_layers - 1, "mlp_norm")
        assert norm is not None
        self._final_norm = norm
        self._project_in = self._project_out = None
        if size := config.projected_size:
            inner = LoraTarget(LoraModuleId.PROJECT_IN, 0, config.hidden_size)
            self._project_in = self._linear(0, "project_in", inner)
            self._project_out = self._linear(0, "project_out", LoraTarget(LoraModuleId.PROJECT_OUT, 0, size))
        self._embedding_norm = self._norm("embedding_norm", "embedding_norm")
        self._recurrent = {layer: self._recurrent_layer(layer) for layer in sorted(config.recurrent_layers)}
        self._blocks = [self._block(layer) for layer in range(config.num_layers)]
        self._places = _kv_places(config)
        self._state_places = {layer: place for place, layer in enumerate(self._recurrent)}
        self._layer_inputs = self._make_layer_inputs(config.layer_inputs)
        self._streams = None if config.altup is None else make_streams(config.altup, self._outer_linear)
        self._ropes: list[Rope] = []
        if not config.learned_positions:
            self._ropes.append(make_rope(self._rotated(0), self._device))
            if config.rope_local_theta is not None:
                self._ropes.append(make_rope(self._rotated(1), self._device, local=True))

        self._decode_step = None
        parts = decoder_parts(config, self._blocks, norm, self._head, self._head_bias)
        if parts is not None and dtype == torch.float32 and not config.bidirectional:
            self._decode_step = ops.decode_step(parts)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvTensors, states: RecurrentState | None = None) -> Tensor:
        """Logits [L, vocab] float32 of `batch.logits_rows`; writes keys and values into kv.

        states: of recurrent layers.
        """
        config = self.config
        x = self._embed(batch)
        rotary = [self._rotary(batch, rope) for rope in self._ropes]
        growth = self._growth(batch)
        still = self._unrotated_growth(batch, growth)
        logits = None
        if (
            isinstance(kv, Tensor)
            and self._decode_step is not None
            and growth is None
            and batch.pooled is None
        ):
            logits = self._decode_step(x, rotary, batch.attention, batch.lora, kv, batch.logits_rows)
        if logits is None:
            turns = [Turns(None, still), *(Turns(one, growth) for one in rotary)]
            own = None if self._layer_inputs is None else self._vectors(self._layer_inputs, x, batch)
            logits = self._layers(x, turns, batch, kv, states, own)
        if config.logits_scale != 1:
            logits *= config.logits_scale
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits

    def _layers(
        self,
        x: Tensor,
        turns: list[Turns],
        batch: ForwardBatch,
        kv: KvTensors,
        states: RecurrentState | None,
        inputs: Tensor | None,
    ) -> Tensor:
        """turns: without a rotation, then with each. inputs: of layers that have vectors of their own."""
        delta: Tensor | None = None  # the last block's output, not added to x yet
        x = self._enter(x, batch, kv)
        whole, chunk = batch.attention, self.config.attention_chunk
        within, kv_within = whole, kv
        if chunk is not None:
            assert isinstance(kv, Tensor), "layers that attend in chunks are alike"
            within, kv_within = in_chunks(whole, chunk, kv)
        own, rows, lora = self.config.recurrent, batch.state, batch.lora
        if own is not None and (rows is None or states is None):
            states, rows = passing_states(own, whole.query_starts, self._device)
        wanted = self._wanted(batch)
        for layer, block in enumerate(self._blocks):
            attention, recurrent = block.attention, self._recurrent.get(layer)
            mix: Callable[[Tensor], Tensor] | None = None
            if attention is not None:
                rotary, place = attention.rotary, self._places[layer]
                seen, cache = (within, kv_within) if rotary >= 0 else (whole, kv)
                mix = partial(attention, turns=turns[rotary + 1], batch=seen, lora=lora, kv=cache[place])
            if recurrent is not None:
                assert states is not None and rows is not None
                state = LayerState(states.layer(self._state_places[layer]), rows)
                own_mix = partial(recurrent, cache=state, lora=lora)
                mix = own_mix if mix is None else side_by_side(self.config.beside, mix, own_mix)
            vectors = None if inputs is None else inputs[layer]
            x, delta = block(x, delta, mix, lora, vectors, wanted if block is self._blocks[-1] else None)
        if wanted is not None:
            return self._apply_head(self._hidden(x, delta, torch.arange(len(x)), wanted.lora), None)
        return self._leave(x, delta, batch, kv, inputs)

    def _vectors(self, made_by: LayerInputs, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Of each layer, [layers, T, dim]. x: the embeddings."""
        return made_by(ids_of(batch), x, batch.lora)

    def _enter(self, x: Tensor, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        """What the first layer gets of embeddings: one residual stream or several."""
        return x if self._streams is None else self._streams.split(x, batch.lora)

    def _leave(
        self, x: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: KvTensors, inputs: Tensor | None
    ) -> Tensor:
        """The logits of what the last layer gives. inputs: as of `_layers`."""
        if self._streams is not None:
            x = self._streams.merge(x, batch.lora)
        if batch.pooled is not None:
            self._pool(x, delta, batch.pooled, batch.lora)
        return self._logits(x, delta, batch)

    def _wanted(self, batch: ForwardBatch) -> Wanted | None:
        """The rows that the last layer is computed for behind its attention; None: all of them, as where
        arrays that adapters bring count on that, or tables are on another device or of all rows."""
        rows, lora = batch.logits_rows, batch.lora
        if self._device.type != "cpu" or batch.pooled is not None or self._streams is not None:
            return None
        if not 0 < len(rows) < len(batch.input_ids):
            return None
        if lora is not None and lora.extras:
            return None
        if lora is None:
            return Wanted(rows, None)
        few = lora.among(rows.tolist())
        return None if few is None else Wanted(rows, few if few.segments else None)

    def _pool(self, x: Tensor, delta: Tensor | None, pooled: HiddenRows, lora: LoraBatch | None) -> None:
        pooled.hidden = self._hidden(x, delta, pooled.rows, lora)

    def _hidden(self, x: Tensor, delta: Tensor | None, rows: Tensor, lora: LoraBatch | None) -> Tensor:
        """Behind the final norm and what may follow it, [P, hidden or projected_size] of rows [P]."""
        if self._project_out is not None:  # its adapters are for all rows
            assert delta is not None
            return self._project_out(self._final_norm.add(x, delta, lora)[1], lora)[rows]
        if delta is None:
            adapted = lora is not None and bool(lora.extras)
            return self._final_norm(x, lora)[rows] if adapted else self._final_norm(x[rows])
        if lora is None or not lora.extras:
            return self._final_norm.add(x[rows], delta[rows])[1]
        return self._final_norm.add(x, delta, lora)[1][rows]

    def _growth(self, batch: ForwardBatch) -> Tensor | None:
        """Of queries, [T, 1, 1]. On a CPU None where no position is so far on that it matters."""
        config = self.config
        if config.query_growth is None:
            return None
        rate, length = config.query_growth
        if self._device.type == "cpu" and max(batch.attention.kv_lens) <= length:
            return None
        growth = 1 + rate * torch.log(1 + torch.floor(batch.positions / length))
        return growth.to(self.dtype).view(-1, 1, 1)

    def _unrotated_growth(self, batch: ForwardBatch, growth: Tensor | None) -> Tensor | None:
        """Of the queries of layers that are not rotated, [T, 1, 1]."""
        if self.config.unrotated_growth is None:
            return growth
        rate, length = self.config.unrotated_growth
        growth = 1 + rate * torch.log1p(torch.floor((batch.positions + 1) / length))
        return growth.to(self.dtype).view(-1, 1, 1)

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        lora = batch.lora
        if not len(batch.logits_rows):  # as of an encoder, whose head for text is none
            return torch.empty((0, self.config.vocab_size), device=self._device)
        return self._apply_head(self._hidden(x, delta, batch.logits_rows, lora), lora)

    def _apply_head(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """Of rows behind the final norm. x [L, hidden] -> [L, vocab] float32."""
        logits = self._head_rows(x, self._head_bias)
        if logits is None:
            return torch.empty((0, self.config.vocab_size), device=self._device)
        if lora is not None and lora.extras:
            adapt_head(logits, x, lora.extras, self._head_bias, self.config.tie_word_embeddings)
        return logits

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding's scale is for tokens: a request's own vectors are used as they are."""
        x = self._embed_tokens(batch, self._weights["embed"], "embed")
        if batch.embeddings is not None:
            rows, vectors = batch.embeddings
            x[rows] = vectors
        if batch.lora is not None and batch.lora.extras:
            scale = self._embedding_scale if self.config.scales_vectors else None
            adapt_prompt(x, batch.lora.extras, scale)
        x = x if self._project_in is None else self._project_in(x, batch.lora)
        positions = self._weights.get("positions")
        x = x if positions is None else x + F.embedding(batch.positions, positions)
        return x if self._embedding_norm is None else self._embedding_norm(x, batch.lora)

    def _rotated(self, rotary: int) -> ModelConfig:
        """Of a layer that uses this rotation."""
        blocks = enumerate(self._blocks)
        layers = (
            n for n, block in blocks if block.attention is not None and block.attention.rotary == rotary
        )
        return self.config.of_layer(next(layers, 0))

    def _rotary(self, batch: ForwardBatch, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin [T, rotary_dim] in the compute dtype; angles in float32."""
        angles = rope.angles(batch.positions, batch.rope_lengths)
        return (angles.cos() * rope.factor).to(self.dtype), (angles.sin() * rope.factor).to(self.dtype)

    def _block(self, layer: int) -> Block | AltUpBlock:
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        norms = {name: self._layer_norm(layer, name) for name in names}
        if self.config.post_norm:  # each norm is computed with the sum that comes after it
            before = self._layer_norm(layer - 1, "mlp_norm") if layer else None
            norms |= {"attention_norm": before, "mlp_norm": norms["attention_norm"]}
        latent, attention = self.config.latent, None
        if layer in self.config.attention_layers:
            attention = self._attention(layer) if latent is None else self._latent_attention(layer, latent)
        add_input = None if self.config.layer_inputs is None else self._layer_input(layer)
        if self.config.altup is not None:
            return self._altup_block(layer, self.config.altup, attention, norms, add_input)
        beside, scalar = self._beside(layer), self._weights.get(f"{layer}.scalar")
        mlp: FeedForward | None = None
        if layer not in self.config.mlpless_layers:
            mlp = self._feed_forward(layer) if beside is None else self._mlp(layer)
        return Block(self.config, attention, mlp, **norms, beside=beside, add_input=add_input, scalar=scalar)

    def _make_layer_inputs(self, own: LayerInputsConfig | None) -> LayerInputs | None:
        if own is None:
            return None
        norm = self._norm("layer_inputs.norm", "per_layer_projection_norm")
        assert norm is not None
        target = LoraTarget(LoraModuleId.PER_LAYER_MODEL_PROJECTION, 0, own.layers * own.dim)
        project = self._outer_linear(0, "layer_inputs.project", target.module_id, target.width)
        return LayerInputs(own, self._weights["layer_inputs.embed"], project, norm)

    def _outer_linear(self, row: int, name: str, module_id: int, width: int | None = None) -> LoraLinear:
        """A linear layer outside layers. row: the layer of its rows in adapters. width: None: hidden."""
        target = LoraTarget(module_id, 0, width or self.config.hidden_size)
        return LoraLinear(self._ops, row, self._weights[f"{name}.weight"], None, (target,))

    def _altup_block(
        self,
        layer: int,
        own: AltUpConfig,
        attention: Attends | None,
        norms: dict[str, Norm | None],
        add_input: LayerInput | None,
    ) -> AltUpBlock:
        count, where = own.streams, f"layers.{layer}."
        router_norm = self._norm(f"{layer}.altup_norm", f"{where}altup.router_norm")
        laurel_norm = self._norm(f"{layer}.laurel_norm", f"{where}laurel.post_laurel_norm")
        assert attention is not None and add_input is not None and router_norm and laurel_norm
        present = {name: norm for name, norm in norms.items() if norm is not None}
        module = LoraModuleId
        targets = {
            "altup_router": (module.ALTUP_MODALITY_ROUTER, count),
            "altup_predict": (module.ALTUP_PREDICTION_COEFS, count**2),
            "altup_correct": (module.ALTUP_CORRECTION_COEFS, count),
            "laurel_left": (module.LAUREL_LEFT, own.laurel_rank),
            "laurel_right": (module.LAUREL_RIGHT, self.config.hidden_size),
        }
        linears = {n: self._linear(layer, n, LoraTarget(one, 0, w)) for n, (one, w) in targets.items()}
        router, predict, correct, left, right = linears.values()
        scale = self._weights[f"{layer}.altup_scale"] if own.scaled else None
        return AltUpBlock(
            attention,
            self._feed_forward(layer),
            **present,
            altup=AltUp(own.active, router_norm, router, predict, correct, scale),
            laurel=Laurel(left, right, laurel_norm),
            add_input=add_input,
        )

    def _layer_input(self, layer: int) -> LayerInput:
        own = self.config.layer_inputs
        assert own is not None
        norm = self._norm(f"{layer}.input_norm", f"layers.{layer}.post_per_layer_input_norm")
        assert norm is not None
        gate = LoraTarget(LoraModuleId.PER_LAYER_INPUT_GATE, 0, own.dim)
        project = LoraTarget(LoraModuleId.PER_LAYER_PROJECTION, 0, self.config.hidden_size)
        return LayerInput(
            self._linear(layer, "input_gate", gate),
            self._linear(layer, "input_project", project),
            norm,
            self.config.activation,
        )

    def _layer_norm(self, layer: int, name: str) -> Norm | None:
        return self._norm(f"{layer}.{name}", f"layers.{layer}.{self._names.block_norms.get(name)}")

    def _attention(self, layer: int) -> Attends:
        config = self.config.of_layer(layer)
        window = config.sliding_windows[layer] if config.sliding_windows else None
        still = config.learned_positions or layer in config.unrotated_layers
        # With two rotary bases, the second is for layers with a window.
        rotary = -1 if still else int(window is not None and config.rope_local_theta is not None)
        named = (("q_norm", self._names.q_norm), ("k_norm", self._names.k_norm))
        norms = [self._norm(f"{layer}.{ours}", f"layers.{layer}.{theirs}") for ours, theirs in named]
        ones = torch.ones(config.head_dim, dtype=self.dtype, device=self._device)
        plain = Norm(self._ops, ones, None, config.norm_eps)
        if config.qk_norm == "plain" and not still:
            norms = [plain] * 2
        params = AttentionParams(self._attention_scale, window, config.attention_softcap, self._sinks(layer))
        out = self._attention_out(layer)
        if layer in config.kv_readers:
            q = self._linear(layer, "q", LoraTarget(LoraModuleId.ATTN_Q, 0, config.q_size))
            return SharedKvAttention(config, self._ops, q, out, norms[0], params, rotary)
        return Attention(
            config,
            self._ops,
            qkv=self._qkv(layer),
            out=out,
            q_norm=norms[0],
            k_norm=norms[1],
            params=params,
            rotary=rotary,
            v_norm=plain if config.v_norm else None,
        )

    def _latent_attention(self, layer: int, latent: LatentConfig) -> LatentAttention:
        heads, first = self.config.num_heads, latent.q_rank or self.config.num_heads * latent.query_dim
        q = LoraTarget(LoraModuleId.ATTN_Q_A if latent.q_rank else LoraModuleId.ATTN_Q, 0, first)
        kv = LoraTarget(LoraModuleId.ATTN_KV_A, first, latent.cached_dim)
        up = LoraTarget(LoraModuleId.ATTN_Q_B, 0, heads * latent.query_dim)
        weight = self._weights[f"{layer}.kv_b.weight"].view(heads, -1, latent.kv_rank)
        kv_norm = self._inner_norm(layer, "k_norm", self._names.k_norm, latent)
        assert kv_norm is not None
        return LatentAttention(
            latent,
            heads,
            self._ops,
            qkv=self._linear(layer, "qkv", q, kv),
            q_up=self._linear(layer, "q_b", up) if latent.q_rank else None,
            q_norm=self._inner_norm(layer, "q_norm", self._names.q_norm, latent),
            kv_norm=kv_norm,
            expansion=Expansion(layer, weight, latent.plain_dim),
            out=self._attention_out(layer),
            params=AttentionParams(self._attention_scale),
            pairs=self.config.rope_interleaved,
        )

    def _inner_norm(self, layer: int, name: str, theirs: str, latent: LatentConfig) -> Norm | None:
        norm = self._norm(f"{layer}.{name}", f"layers.{layer}.{theirs}")
        return None if norm is None else replace(norm, eps=latent.norm_eps)

    def _router(self, layer: int, moe: MoeConfig) -> Router:
        target = LoraTarget(LoraModuleId.MOE_ROUTER, 0, moe.num_experts)
        if not moe.routing.wide:
            return self._linear(layer, "router", target)
        return WideRouter(self._ops, layer, self._weights[f"{layer}.router.weight"], (target,))

    def _sinks(self, layer: int) -> Tensor | None:
        sinks = self._weights.get(f"{layer}.sinks")
        return None if sinks is None else sinks.float()

    def _recurrent_layer(self, layer: int) -> DeltaRule | ShortConv | Mamba2:
        own = self.config.recurrent
        if isinstance(own, Mamba2Config):
            return self._mamba2(layer, own)
        if isinstance(own, ConvConfig):
            return self._short_conv(layer, own)
        assert isinstance(own, DeltaConfig)
        return self._delta_rule(layer, own)

    def _short_conv(self, layer: int, own: ConvConfig) -> ShortConv:
        project = LoraTarget(LoraModuleId.MAMBA_IN_PROJ, 0, 3 * own.channels)
        out = LoraTarget(LoraModuleId.MAMBA_OUT_PROJ, 0, self.config.hidden_size)
        taps = self._weights[f"{layer}.taps"].T.contiguous()
        return ShortConv(self._ops, self._linear(layer, "in", project), self._linear(layer, "out", out), taps)

    def _mamba2(self, layer: int, own: Mamba2Config) -> Mamba2:
        project = LoraTarget(LoraModuleId.MAMBA_IN_PROJ, 0, own.in_size)
        out = LoraTarget(LoraModuleId.MAMBA_OUT_PROJ, 0, self.config.hidden_size)
        prefix = f"{layer}."
        mine = {name.removeprefix(prefix): w for name, w in self._weights.items() if name.startswith(prefix)}
        return Mamba2(
            self._ops,
            self._linear(layer, "in", project),
            self._linear(layer, "out" if self.config.beside is None else "recurrent_out", out),
            mamba2_weights(own, mine, self.config.norm_eps),
            mamba2_factors(own, self._weights["embed"], self.dtype),
        )

    def _delta_rule(self, layer: int, own: DeltaConfig) -> DeltaRule:
        weights = self._weights
        wide, heads, qkv = own.channels + own.value_size, own.value_heads, own.channels
        project = (
            LoraTarget(LoraModuleId.LINEAR_ATTN_QKVZ, 0, wide),
            LoraTarget(LoraModuleId.LINEAR_ATTN_QKV, 0, qkv),
            LoraTarget(LoraModuleId.LINEAR_ATTN_Z, qkv, own.value_size),
        )
        gates = (
            LoraTarget(LoraModuleId.LINEAR_ATTN_BA, 0, 2 * heads),
            LoraTarget(LoraModuleId.LINEAR_ATTN_B, 0, heads),
            LoraTarget(LoraModuleId.LINEAR_ATTN_A, heads, heads),
        )
        out = LoraTarget(LoraModuleId.LINEAR_ATTN_OUT, 0, self.config.hidden_size)
        vectors = DeltaWeights(
            taps=weights[f"{layer}.taps"].T.contiguous(),
            decay=-weights[f"{layer}.decay"].exp(),
            shift=weights[f"{layer}.shift"],
            norm=weights[f"{layer}.norm.weight"],
            eps=self.config.norm_eps,
            key_heads=own.key_heads,
            key_dim=own.key_dim,
        )
        return DeltaRule(
            self._ops,
            project=self._linear(layer, "in", *project),
            gates=self._linear(layer, "gates", *gates),
            out=self._linear(layer, "out", out),
            weights=vectors,
        )

    def _feed_forward(self, layer: int) -> FeedForward:
        moe = self.config.moe
        return self._moe(layer, moe) if moe is not None and layer in moe.layers else self._mlp(layer)

    def _beside(self, layer: int) -> ExpertsBesideMlp | None:
        moe = self.config.moe
        if moe is None or not moe.beside_mlp or layer not in moe.layers:
            return None
        names = ("mlp_own_post_norm", "experts_norm", "experts_post_norm")
        theirs = self._names.block_norms
        norms = [self._norm(f"{layer}.{name}", f"layers.{layer}.{theirs[name]}") for name in names]
        norms.append(self._norm(f"{layer}.router.norm", ""))
        return ExpertsBesideMlp(self._moe(layer, moe), *(norm for norm in norms if norm is not None))

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        inner = moe.intermediate_size
        up_gate: tuple[LoraTarget, ...] = (
            LoraTarget(LoraModuleId.MOE_GATE, 0, inner),
            LoraTarget(LoraModuleId.MOE_H_TO_4H, inner, inner),
        )
        if not moe.gated:
            up_gate = (LoraTarget(LoraModuleId.MOE_H_TO_4H, 0, inner),)
        hidden, latent = self.config.hidden_size, moe.latent_size
        down = LoraTarget(LoraModuleId.MOE_4H_TO_H, 0, latent or hidden)
        ends = (
            LoraTarget(LoraModuleId.MOE_LATENT_FC1, 0, latent),
            LoraTarget(LoraModuleId.MOE_LATENT_FC2, 0, hidden),
        )
        return Moe(
            moe,
            router=self._router(layer, moe),
            up_gate=self._experts(layer, moe, "up_gate", *up_gate),
            down=self._experts(layer, moe, "down", down),
            activation=self.config.activation,
            shared=self._shared_expert(layer, moe),
            correction=self._weights.get(f"{layer}.router.correction"),
            scales=self._weights.get(f"{layer}.router.scales"),
            latent_in=self._linear(layer, "latent_in", ends[0]) if latent else None,
            latent_out=self._linear(layer, "latent_out", ends[1]) if latent else None,
        )

    def _shared_expert(self, layer: int, moe: MoeConfig) -> SharedExpert | None:
        inner = moe.shared_intermediate_size
        if not inner:
            return None
        up_gate: tuple[LoraTarget, ...] = (
            LoraTarget(LoraModuleId.SHARED_EXPERT_GATE_UP, 0, 2 * inner),
            LoraTarget(LoraModuleId.SHARED_EXPERT_GATE, 0, inner),
            LoraTarget(LoraModuleId.SHARED_EXPERT_H_TO_4H, inner, inner),
        )
        if not moe.gated:
            up_gate = (LoraTarget(LoraModuleId.SHARED_EXPERT_H_TO_4H, 0, inner),)
        down = LoraTarget(LoraModuleId.SHARED_EXPERT_4H_TO_H, 0, self.config.hidden_size)
        mlp = Mlp(
            up_gate=self._linear(layer, "shared.up_gate", *up_gate),
            down=self._linear(layer, "shared.down", down),
            activation=self.config.activation,
            gated=moe.gated,
        )
        if not moe.shared_gated:
            return SharedExpert(mlp, None)
        gate = self._linear(layer, "shared_gate", LoraTarget(LoraModuleId.MLP_ROUTER, 0, 1))
        return SharedExpert(mlp, gate)

    def _experts(self, layer: int, moe: MoeConfig, name: str, *targets: LoraTarget) -> Experts:
        numbers = range(moe.num_experts)
        weights = tuple(self._weights[f"{layer}.expert.{e}.{name}.weight"] for e in numbers)
        biases = None
        if moe.biased:
            biases = torch.stack([self._weights[f"{layer}.expert.{e}.{name}.bias"] for e in numbers])
        return Experts(self._ops, layer, weights, targets, biases)


def _kv_places(config: ModelConfig) -> dict[int, int]:
    """Of each layer with attention, where its keys and values are among those of all layers."""
    if config.bidirectional:  # nothing is cached
        return dict.fromkeys(config.attention_layers, 0)
    own = [*sorted(config.attention_layers - config.kv_readers), *config.kv_before]
    places = {layer: place for place, layer in enumerate(own)}
    return places | {layer: places[config.kv_sources[layer]] for layer in config.kv_readers}


def ids_of(batch: ForwardBatch) -> Tensor:
    """Of each row; 0 where a vector is in its token's place."""
    if batch.embeddings is None:
        return batch.input_ids
    return batch.input_ids.index_fill(0, batch.embeddings[0], 0)

"""DecoderLayers: builds the layers of a decoder from its weights and its ModelConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from manylora.adapters.modules import LoraModuleId
from manylora.config.blocks import (
    AltUpConfig,
    ConvConfig,
    DeltaConfig,
    LatentConfig,
    LayerInputsConfig,
    Mamba2Config,
)
from manylora.config.model import MoeConfig
from manylora.kernels.recurrent import DeltaWeights, Mamba2Weights
from manylora.kernels.spec import AttentionParams, LoraTarget
from manylora.model.altup import AltUp, AltUpBlock, Laurel
from manylora.model.families.family import TensorNames
from manylora.model.latent import Expansion, LatentAttention
from manylora.model.layers import (
    Attends,
    Attention,
    Block,
    FeedForward,
    LayerInput,
    LayerInputs,
    LoraLinear,
    Mlp,
    Norm,
    RecurrentLayer,
)
from manylora.model.moe import Experts, ExpertsBesideMlp, Moe, Router, SharedExpert, WideRouter
from manylora.model.transformer import Transformer, gate_up


class DecoderLayers(Transformer):
    """Builds a decoder's layers. names: of the checkpoint's tensors."""

    _names: TensorNames

    def _block(self, layer: int) -> Block | AltUpBlock:
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        norms = {name: self._layer_norm(layer, name) for name in names}
        if self.config.post_norm:  # each norm is computed together with the next addition
            before = self._layer_norm(layer - 1, "mlp_norm") if layer else None
            norms |= {"attention_norm": before, "mlp_norm": norms["attention_norm"]}
        latent, attention = self.config.latent, None
        if layer in self.config.attention_layers:
            attention = self._attention(layer) if latent is None else self._latent_attention(layer, latent)
        add_input, inputs = None, self.config.layer_inputs
        if inputs is not None:
            norm = self._inner_norm(layer, "input_norm", "post_per_layer_input_norm")
            assert norm is not None
            gate = self._one(layer, "input_gate", LoraModuleId.PER_LAYER_INPUT_GATE, inputs.dim)
            project = self._one(layer, "input_project", LoraModuleId.PER_LAYER_PROJECTION)
            add_input = LayerInput(gate, project, norm, self.config.activation)
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
        module_id, width = LoraModuleId.PER_LAYER_MODEL_PROJECTION, own.layers * own.dim
        project = self._outer_linear(0, "layer_inputs.project", module_id, width)
        return LayerInputs(own, self._weights["layer_inputs.embed"], project, norm)

    def _outer_linear(self, row: int, name: str, module_id: int, width: int | None = None) -> LoraLinear:
        """row: the layer number of its rows in adapters. width: None: hidden."""
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
        count = own.streams
        router_norm = self._inner_norm(layer, "altup_norm", "altup.router_norm")
        laurel_norm = self._inner_norm(layer, "laurel_norm", "laurel.post_laurel_norm")
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
        linears = [self._one(layer, name, *target) for name, target in targets.items()]
        router, predict, correct, left, right = linears
        scale = self._weights[f"{layer}.altup_scale"] if own.scaled else None
        return AltUpBlock(
            attention,
            self._feed_forward(layer),
            **present,
            altup=AltUp(own.active, router_norm, router, predict, correct, scale),
            laurel=Laurel(left, right, laurel_norm),
            add_input=add_input,
        )

    def _layer_norm(self, layer: int, name: str) -> Norm | None:
        return self._inner_norm(layer, name, self._names.block_norms.get(name))

    def _norms_of_queries_and_keys(self, layer: int) -> tuple[Norm | None, Norm | None]:
        names = self._names
        q = self._inner_norm(layer, "q_norm", names.q_norm)
        return q, self._inner_norm(layer, "k_norm", names.k_norm)

    def _attention(self, layer: int) -> Attends:
        config = self.config.of_layer(layer)
        window = config.sliding_windows[layer] if config.sliding_windows else None
        still = config.learned_positions or layer in config.unrotated_layers
        # With two rotary bases, the second is for layers with a sliding window.
        rotary = -1 if still else int(window is not None and config.rope_local_theta is not None)
        q_norm, k_norm = self._norms_of_queries_and_keys(layer)
        ones = torch.ones(config.head_dim, dtype=self.dtype, device=self._device)
        plain = Norm(self._ops, ones, None, config.norm_eps)
        if config.qk_norm == "plain" and not still:
            q_norm = k_norm = plain
        scale = self._attention_scale / (layer + 1 if config.scaled_by_layer else 1)
        sinks = self._weights.get(f"{layer}.sinks")
        sinks = None if sinks is None else sinks.float()
        params = AttentionParams(scale, window, config.attention_softcap, sinks)
        shares = layer in config.kv_readers
        return Attention(
            config,
            self._ops,
            qkv=self._one(layer, "q", LoraModuleId.ATTN_Q, config.q_size) if shares else self._qkv(layer),
            out=self._one(layer, "out", LoraModuleId.ATTN_DENSE),
            q_norm=q_norm,
            k_norm=k_norm,
            params=params,
            rotary=rotary,
            v_norm=plain if config.v_norm and not shares else None,
            shares=shares,
        )

    def _latent_attention(self, layer: int, latent: LatentConfig) -> LatentAttention:
        heads, first = self.config.num_heads, latent.q_rank or self.config.num_heads * latent.query_dim
        q = LoraTarget(LoraModuleId.ATTN_Q_A if latent.q_rank else LoraModuleId.ATTN_Q, 0, first)
        kv = LoraTarget(LoraModuleId.ATTN_KV_A, first, latent.cached_dim)
        weight = self._weights[f"{layer}.kv_b.weight"].view(heads, -1, latent.kv_rank)
        q_norm, kv_norm = self._norms_of_queries_and_keys(layer)
        assert kv_norm is not None
        queries = LoraModuleId.ATTN_Q_B, heads * latent.query_dim
        return LatentAttention(
            latent,
            heads,
            self._ops,
            qkv=self._linear(layer, "qkv", q, kv),
            q_up=self._one(layer, "q_b", *queries) if latent.q_rank else None,
            q_norm=None if q_norm is None else replace(q_norm, eps=latent.norm_eps),
            kv_norm=replace(kv_norm, eps=latent.norm_eps),
            expansion=Expansion(layer, weight, latent.plain_dim),
            out=self._one(layer, "out", LoraModuleId.ATTN_DENSE),
            params=AttentionParams(self._attention_scale),
            pairs=self.config.rope_interleaved,
        )

    def _router(self, layer: int, moe: MoeConfig) -> Router:
        target = LoraTarget(LoraModuleId.MOE_ROUTER, 0, moe.num_experts)
        if not moe.routing.wide:
            return self._linear(layer, "router", target)
        return WideRouter(self._ops, layer, self._weights[f"{layer}.router.weight"], (target,))

    def _recurrent_layer(self, layer: int) -> RecurrentLayer:
        own, module, ops, prefix = self.config.recurrent, LoraModuleId, self._ops, f"{layer}."
        mine = {name.removeprefix(prefix): w for name, w in self._weights.items() if name.startswith(prefix)}
        if isinstance(own, ConvConfig | Mamba2Config):
            width = 3 * own.channels if isinstance(own, ConvConfig) else own.in_size
            project = self._one(layer, "in", module.MAMBA_IN_PROJ, width)
            name = "out" if self.config.beside is None else "recurrent_out"
            out = self._one(layer, name, module.MAMBA_OUT_PROJ)
            if isinstance(own, ConvConfig):
                return RecurrentLayer(project, out, partial(ops.short_conv, taps=mine["taps"].T.contiguous()))
            mix = self._mamba2(mamba2_weights(own, mine, self.config.norm_eps))
            return RecurrentLayer(project, out, mix, factors=mamba2_factors(own, self._device, self.dtype))
        assert isinstance(own, DeltaConfig)
        heads, qkv = own.value_heads, own.channels
        qkvz = (
            LoraTarget(module.LINEAR_ATTN_QKVZ, 0, qkv + own.value_size),
            LoraTarget(module.LINEAR_ATTN_QKV, 0, qkv),
            LoraTarget(module.LINEAR_ATTN_Z, qkv, own.value_size),
        )
        ba = (
            LoraTarget(module.LINEAR_ATTN_BA, 0, 2 * heads),
            LoraTarget(module.LINEAR_ATTN_B, 0, heads),
            LoraTarget(module.LINEAR_ATTN_A, heads, heads),
        )
        weights = DeltaWeights(
            taps=mine["taps"].T.contiguous(),
            decay=-mine["decay"].exp(),
            shift=mine["shift"],
            norm=mine["norm.weight"],
            eps=self.config.norm_eps,
            key_heads=own.key_heads,
            key_dim=own.key_dim,
        )
        return RecurrentLayer(
            self._linear(layer, "in", *qkvz),
            self._one(layer, "out", module.LINEAR_ATTN_OUT),
            partial(ops.delta_rule, weights=weights),
            gates=self._linear(layer, "gates", *ba),
        )

    def _mamba2(self, weights: Mamba2Weights) -> Callable[..., Tensor]:
        return partial(self._ops.mamba2, weights=weights)

    def _feed_forward(self, layer: int) -> FeedForward:
        moe = self.config.moe
        return self._moe(layer, moe) if moe is not None and layer in moe.layers else self._mlp(layer)

    def _beside(self, layer: int) -> ExpertsBesideMlp | None:
        moe = self.config.moe
        if moe is None or not moe.beside_mlp or layer not in moe.layers:
            return None
        names = ("mlp_own_post_norm", "experts_norm", "experts_post_norm")
        norms = [self._layer_norm(layer, name) for name in names]
        norms.append(self._norm(f"{layer}.router.norm", ""))
        return ExpertsBesideMlp(self._moe(layer, moe), *(norm for norm in norms if norm is not None))

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        up_gate = gate_up(moe.gated, moe.intermediate_size, LoraModuleId.MOE_H_TO_4H, LoraModuleId.MOE_GATE)
        latent = moe.latent_size
        down = LoraTarget(LoraModuleId.MOE_4H_TO_H, 0, latent or self.config.hidden_size)
        return Moe(
            moe,
            router=self._router(layer, moe),
            up_gate=self._experts(layer, moe, "up_gate", *up_gate),
            down=self._experts(layer, moe, "down", down),
            activation=self.config.activation,
            shared=self._shared_expert(layer, moe),
            correction=self._weights.get(f"{layer}.router.correction"),
            scales=self._weights.get(f"{layer}.router.scales"),
            latent_in=self._one(layer, "latent_in", LoraModuleId.MOE_LATENT_FC1, latent) if latent else None,
            latent_out=self._one(layer, "latent_out", LoraModuleId.MOE_LATENT_FC2) if latent else None,
        )

    def _shared_expert(self, layer: int, moe: MoeConfig) -> SharedExpert | None:
        inner = moe.shared_intermediate_size
        if not inner:
            return None
        ids = LoraModuleId
        modules = ids.SHARED_EXPERT_H_TO_4H, ids.SHARED_EXPERT_GATE, ids.SHARED_EXPERT_GATE_UP
        mlp = Mlp(
            up_gate=self._linear(layer, "shared.up_gate", *gate_up(moe.gated, inner, *modules)),
            down=self._one(layer, "shared.down", LoraModuleId.SHARED_EXPERT_4H_TO_H),
            activation=self.config.activation,
            gated=moe.gated,
        )
        gate = self._one(layer, "shared_gate", LoraModuleId.MLP_ROUTER, 1) if moe.shared_gated else None
        return SharedExpert(mlp, gate)

    def _experts(self, layer: int, moe: MoeConfig, name: str, *targets: LoraTarget) -> Experts:
        numbers = range(moe.num_experts)
        weights = tuple(self._weights[f"{layer}.expert.{e}.{name}.weight"] for e in numbers)
        biases = None
        if moe.biased:
            biases = torch.stack([self._weights[f"{layer}.expert.{e}.{name}.bias"] for e in numbers])
        return Experts(self._ops, layer, weights, targets, biases)


def mamba2_factors(own: Mamba2Config, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if set(own.scales) <= {1.0}:
        return None
    keys = own.groups * own.state_dim
    sizes = torch.tensor((own.value_size, own.value_size, keys, keys, own.heads))
    return torch.tensor(own.scales).repeat_interleave(sizes).to(device, dtype)


def mamba2_weights(own: Mamba2Config, weights: Mapping[str, Tensor], eps: float) -> Mamba2Weights:
    """weights: of the layer, by our names."""
    taps = weights["taps"].T.contiguous()
    bias = weights["taps_bias"] if own.conv_bias else torch.zeros_like(taps[0])
    return Mamba2Weights(
        taps=taps,
        bias=bias,
        decay=-weights["decay"].exp(),
        shift=weights["shift"],
        skip=weights["skip"],
        norm=weights["inner_norm.weight"] if own.normed else None,
        eps=eps,
        groups=own.groups,
        head_dim=own.head_dim,
        state_dim=own.state_dim,
        norm_groups=own.groups,
        gate_first=own.gate_first,
        least=own.steps[0],
        most=own.steps[1],
    )

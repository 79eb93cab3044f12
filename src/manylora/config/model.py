"""ModelConfig: the shape of a checkpoint, as its family reads it from config.json. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manylora.checkpoints.quant.config import CheckpointQuant
from manylora.config.blocks import (
    AltUpConfig,
    BesideConfig,
    HeadLayerConfig,
    LatentConfig,
    LayerInputsConfig,
    LayerShape,
    RecurrentConfig,
    RoutingConfig,
)


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts in some or all layers of a decoder."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # size of one expert
    norm_topk_prob: bool  # normalise the weights of a token's experts to sum to 1
    layers: frozenset[int]  # layers with experts; the others have a dense MLP
    shared_intermediate_size: int = 0  # size of the shared expert; 0: none
    shared_gated: bool = True  # whether the shared expert has a gate
    latent_size: int = 0  # width of routed experts, between a down and an up projection; 0: hidden size
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    transposed: bool = False  # the checkpoint stores expert matrices as [in, out]
    either_way: bool = False  # the checkpoint may store either; the shape decides
    biased: bool = False  # the router and the experts' matrices have biases
    gated: bool = True  # the activated gate multiplies up; else up itself is activated
    interleaved: bool = False  # stored [in, out], columns of gate and up alternate, as do PEFT's rows
    beside_mlp: bool = False  # these layers also have a dense MLP, with its own norms; outputs are added
    swiglu: tuple[float, float] | None = None  # alpha and limit of a clamped SwiGLU; None: `activation`


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder-decoder model, of the decoder's sizes, and how decoding starts."""

    num_layers: int  # encoder layers; they are numbered before the decoder's
    decoder_start_id: int  # decoder prompt of a request without one
    forced_bos_id: int | None = None  # forced first token after a one-token decoder prompt
    post_norm: bool = False  # norms follow the residual additions instead of preceding the blocks
    relative_buckets: int = 0  # > 0: relative position bias instead of positions
    relative_max_distance: int = 128  # tokens; larger distances share a bucket
    head_dim: int = 0  # 0: the decoder's


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, from its config.json. Sizes in elements, for the whole model (not per rank)."""

    architecture: str  # e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # encoder and decoder layers together
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    dtype: str  # the checkpoint's: float32, float16, bfloat16
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    layer_shapes: tuple[LayerShape, ...] = ()  # per layer, overrides the fields above; empty: all equal
    # positions
    learned_positions: bool = False  # learned position embeddings instead of rotary ones
    position_offset: int = 0  # row of position 0 in that table
    rope_scaling: Mapping[str, Any] | None = None
    rope_local_theta: float | None = None  # theta of sliding-window layers, unscaled; None: as others
    rope_restarts: bool = False  # recompute the whole sequence when it outgrows rope_limit
    partial_rotary_factor: float = 1.0  # share of head_dim that is rotated, from its start
    rope_interleaved: bool = False  # rotate pairs of neighbours, not pairs across the two halves
    unrotated_layers: frozenset[int] = frozenset()  # layers without rotary positions
    # norms
    norm: str = "rms"  # or layer. _plus_one: the weight is 1 + the stored. _wide: multiplied in float32
    norm_bias: bool = True  # whether LayerNorm has a bias
    first_norm: bool = True  # whether the first layer has a norm before attention
    # Of q and k before rotary, over head_dim: head, each (weights per head, no biases), plain (no weights, in
    # layers with rotary); all: over all heads at once; empty: none.
    qk_norm: str = ""
    v_norm: bool = False  # also normalise the values of each head, without weights
    # attention
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    scaled_by_layer: bool = False  # divide the scale by the layer's number, which begins at 1
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each head has one additional learned score
    qkv_clip: float | None = None  # clamp q, k and v to this magnitude, after their norms
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    # Per layer, the layer whose keys and values it reads; below 0: one before the first. Empty: its own.
    kv_sources: tuple[int, ...] = ()
    latent: LatentConfig | None = None  # num_kv_heads is 1, head_dim the size of a token in the cache
    attention_chunk: int | None = None  # rotary layers attend within chunks of this many
    unrotated_growth: tuple[float, int] | None = None  # as query_growth, from p + 1, where not rotated
    attention_gated: bool = False  # q's matrix also gives an output gate per head
    keys_are_values: bool = False  # there is no v: values are k's output before its norm
    qkv_groups: int = 1  # [q; k; v] groups stacked in the checkpoint's fused matrix
    # MLP
    activation: str = "silu"  # silu, gelu, gelu_tanh, relu, relu2 (its square)
    gated_mlp: bool = True
    sparsity: tuple[float, ...] = ()  # per layer, share of the gate that is set to 0; empty: none
    mlp_bias: bool = False
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # factors on the gate before activation, and on the output
    moe: MoeConfig | None = None
    recurrent: RecurrentConfig | None = None  # None: every layer has attention
    beside: BesideConfig | None = None  # recurrent layers also have attention
    unmixed_layers: frozenset[int] = frozenset()  # layers with neither, only an MLP or experts
    mlpless_layers: frozenset[int] = frozenset()  # layers without an MLP
    encoder: EncoderConfig | None = None  # None: decoder only
    layer_inputs: LayerInputsConfig | None = None  # None: layers get only the residual stream
    altup: AltUpConfig | None = None  # None: one residual stream
    # how the parts are put together
    parallel_blocks: bool = False  # attention and MLP read the same input; their outputs are added
    shared_norm: bool = False  # parallel blocks share one norm
    scales_vectors: bool = False  # embedding_scale also applies to vectors that replace tokens
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    num_labels: int = 0  # labels of the checkpoint's classification head; 0: no head
    score_tokens: tuple[int, int] | None = None  # against and for: the score is their logits' difference
    no_adapters: str = ""  # why they cannot be served; empty: they can
    makes_text: bool = True  # whether the checkpoint has a language-model head
    bidirectional: bool = False  # encoder only: all tokens attend to each other
    head_layer: HeadLayerConfig | None = None  # of an encoder-only model
    padding_id: int | None = None  # these tokens share the position before the first and are not counted
    token_types: int = 0  # rows of the token-type table, which tells two texts apart
    relative_buckets: int = 0  # of an encoder-only model's bias on attention by relative position; 0: none
    head_dense_activation: str = "tanh"  # of the first layer of a classification head of two layers
    post_norm: bool = False  # norms follow the residual additions
    projected_size: int | None = None  # width of embedding and head; linear layers project from and to it
    transposed_weights: bool = False  # the checkpoint stores matrices as [in, out]
    quant: CheckpointQuant | None = None  # how the checkpoint is quantised; None: not, or by manylora build

    def of_layer(self, layer: int) -> ModelConfig:
        """The model with this layer's overrides applied to all layers."""
        if not self.layer_shapes:
            return self
        return replace(self, layer_shapes=(), **vars(self.layer_shapes[layer]))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q's matrix."""
        return self.q_size * (2 if self.attention_gated else 1)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_planes(self) -> int:
        """2: keys and values. 1 with latent attention, which has one vector for both."""
        return 2 if self.latent is None else 1

    @property
    def recurrent_layers(self) -> frozenset[int]:
        return frozenset() if self.recurrent is None else self.recurrent.layers

    @property
    def kv_readers(self) -> frozenset[int]:
        """Layers without keys and values of their own: they read those of an earlier layer."""
        return frozenset(layer for layer, source in enumerate(self.kv_sources) if source != layer)

    @property
    def attention_layers(self) -> frozenset[int]:
        others = frozenset() if self.beside else self.recurrent_layers
        return frozenset(range(self.num_layers)) - others - self.unmixed_layers

    @property
    def mlp_layers(self) -> frozenset[int]:
        """Layers with a dense MLP."""
        sparse = frozenset() if self.moe is None or self.moe.beside_mlp else self.moe.layers
        return frozenset(range(self.num_layers)) - self.mlpless_layers - sparse

    @property
    def kv_layers(self) -> int:
        """Number of decoder layers whose keys and values are in the cache."""
        if self.bidirectional:
            return 1  # nothing is written to it
        if self.encoder:
            return self.num_layers - self.encoder.num_layers
        return len(self.attention_layers - self.kv_readers) + len(self.kv_before)

    @property
    def kv_before(self) -> tuple[int, ...]:
        """Layers before the first that are in the cache, after the model's own."""
        return tuple(sorted({source for source in self.kv_sources if source < 0}))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(planes, heads, elements per head) of a token in the cache, for each of `kv_layers`."""
        if not self.layer_shapes:
            return ((self.kv_planes, self.num_kv_heads, self.head_dim),) * self.kv_layers
        layers = [layer for layer in range(self.num_layers) if layer not in self.kv_readers]
        layers += [self.kv_sources.index(source) for source in self.kv_before]  # a reader has the same shape
        own = (self.layer_shapes[layer] for layer in layers)
        return tuple((self.kv_planes, one.num_kv_heads, one.head_dim) for one in own)

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """(b, n): queries at position p are multiplied by 1 + b * log(1 + p // n). None: no such factor."""
        scaling = self.rope_scaling or {}
        if not scaling.get("llama_4_scaling_beta"):
            return None
        return float(scaling["llama_4_scaling_beta"]), int(scaling["original_max_position_embeddings"])

    @property
    def rope_limit(self) -> int | None:
        """Length in tokens beyond which a sequence's length changes how its tokens are rotated."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") == "longrope":
            return int(scaling["original_max_position_embeddings"])
        return self.max_position_embeddings if scaling.get("rope_type") == "dynamic" else None

    def rope_length(self, num_prompt: int) -> int:
        """The length that determines the rotation of such a prompt. 0: only each token's position does."""
        limit = self.rope_limit
        if limit is None or num_prompt <= limit:
            return 0
        return num_prompt if (self.rope_scaling or {})["rope_type"] == "dynamic" else limit + 1

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens: the model's positions, extended by rotary scaling if it has one."""
        return stretched(self.max_position_embeddings, self.rope_scaling or {})


def stretched(positions: int, scaling: Mapping[str, Any]) -> int:
    """Longest sequence in tokens under a rotary scaling of config.json."""
    kind, factor = scaling.get("rope_type") or scaling.get("type"), float(scaling.get("factor") or 1.0)
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    original = scaling.get("original_max_position_embeddings") or positions
    return max(positions, int(original * factor)) if kind == "yarn" else positions

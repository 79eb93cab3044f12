"""Configurations of blocks that few families have: MLA, recurrent layers, routing. All are frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """What one layer overrides where layers differ. Fields are those of ModelConfig with the same names."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    keys_are_values: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """MLA: keys and values of all heads are projections of a token's latent. Sizes in elements, per head."""

    q_rank: int  # size of the latent for queries; 0: queries come from the hidden states
    kv_rank: int  # size of the latent for keys and values
    plain_dim: int  # part of a query that is not rotated
    rope_dim: int  # rotated part of a query, and of the key that all heads share
    value_dim: int
    norm_eps: float = 1e-6  # of the norms of both latents

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the KV cache: its rotated key, then its latent."""
        return self.rope_dim + self.kv_rank


@dataclass(frozen=True)
class LayerInputsConfig:
    """A vector per token for each layer: the sum of a lookup and of a projection of its embedding."""

    dim: int  # size of the vector of one layer
    vocab_size: int  # rows of the table; tokens beyond it use row 0
    layers: int  # number of layers that get a vector


@dataclass(frozen=True)
class AltUpConfig:
    """Gemma 3n's AltUp and Laurel: several residual streams, and a low-rank residual in each layer."""

    streams: int
    active: int  # index of the stream that goes through the layers
    scaled: bool  # whether it is scaled before a per-layer input is computed from it
    laurel_rank: int


@dataclass(frozen=True)
class HeadLayerConfig:
    """Before a classification head. norm: one follows. each: also before the labels of each token."""

    activation: str
    biased: bool = True
    norm: bool = False
    each: bool = False


@dataclass(frozen=True)
class RoutingConfig:
    """How a router's scores choose experts and their weights.

    scores: softmax (over all experts), sigmoid, or top (the sigmoid of the chosen scores; a token is
    multiplied by it before its expert rather than after).
    corrected: each expert has a bias that is added to its score for the choice only.
    groups: number of groups of experts; a token's experts come from the best `top_groups` groups.
    group_best: a group's score is the sum of its `group_best` best experts.
    least, added: where a token's weights are normalised to sum to 1, the divisor is their sum plus `added`,
    and at least `least`.
    scale: factor on the weights.
    wide: the router computes in float32.
    """

    scores: str = "softmax"
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    least: float = 0.0
    added: float = 0.0
    scale: float = 1.0
    wide: bool = False


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers with a recurrent state of fixed size instead of keys and values."""

    layers: frozenset[int]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """One sequence and layer, float32: the convolution's last inputs, the heads' memory."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers."""
        return 4 * len(self.layers) * sum(math.prod(shape) for shape in self.state_shapes)


@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """Gated delta rules, each after a causal convolution over the last inputs."""

    key_heads: int  # heads of queries and keys; each serves value_heads / key_heads value heads
    value_heads: int
    key_dim: int  # size of a head
    value_dim: int
    taps: int  # inputs that the convolution sees, including the newest

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (self.value_heads, self.value_dim, self.key_dim)


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2, after a causal convolution."""

    heads: int
    groups: int  # heads of one group share b and c
    head_dim: int
    state_dim: int
    taps: int  # inputs that the convolution sees, including the newest
    conv_bias: bool = True
    biased: bool = False  # whether the input projection has a bias
    out_biased: bool = False  # whether the output projection has a bias
    scales: tuple[float, ...] = ()  # factors on z, values, b, c and d; empty: none
    steps: tuple[float, float] = (0.0, math.inf)  # smallest and largest step
    normed: bool = True  # whether the layer has a norm
    gate_first: bool = True  # whether the gate is applied before that norm or after it

    @property
    def value_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, b and c."""
        return self.value_size + 2 * self.groups * self.state_dim

    @property
    def in_size(self) -> int:
        """Rows of the input projection: [z; values; b; c; d]."""
        return self.value_size + self.channels + self.heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (self.heads, self.head_dim, self.state_dim)


@dataclass(frozen=True)
class BesideConfig:
    """Attention and a recurrent layer with one input, whose outputs are added: factors on these."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0


@dataclass(frozen=True)
class ConvConfig(RecurrentConfig):
    """Gated causal convolutions over the last inputs, with no other state."""

    channels: int
    taps: int  # inputs that the convolution sees, including the newest

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (0, 0, 0)

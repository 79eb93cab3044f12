"""The shapes of blocks that few families have: attention over latent keys and values, recurrent layers, and
how tokens are routed to experts. Frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """What one layer has of its own, where layers differ. As the fields of ModelConfig with these names."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    keys_are_values: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Attention of DeepSeek (MLA): keys and values of all heads are products of one vector for each token,
    its latent. Sizes in elements; those of queries and values are of one head."""

    q_rank: int  # of the vector that queries are made of; 0: they are made of the hidden states
    kv_rank: int  # of the latent
    plain_dim: int  # of a query that is not rotated
    rope_dim: int  # of a query and of the token's key that are; all heads share that key
    value_dim: int
    norm_eps: float = 1e-6  # of the norms of both vectors

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Of a token in the cache: its rotated key, then its latent."""
        return self.rope_dim + self.kv_rank


@dataclass(frozen=True)
class LayerInputsConfig:
    """Per-layer embeddings: each layer has a vector for each token, the sum of one that is looked up and one
    that is made of the token's embedding."""

    dim: int  # of the vector of one layer
    vocab_size: int  # rows of the table; tokens beyond it have the first one
    layers: int  # that have one


@dataclass(frozen=True)
class AltUpConfig:
    """AltUp and Laurel of Gemma 3n: several residual streams, and a residual of low rank in each layer."""

    streams: int
    active: int  # the stream that goes through the layers
    scaled: bool  # whether it has a scale where a layer's own input is made of it
    laurel_rank: int


@dataclass(frozen=True)
class HeadLayerConfig:
    """The layer that an encoder's hidden states go through before a classification head of one layer.

    activation: of `kernels.activations`, tanh, or none if empty. norm: a norm follows it. each: it comes
    before the labels of each token too, not only before those of a prompt.
    """

    activation: str
    biased: bool = True
    norm: bool = False
    each: bool = False


@dataclass(frozen=True)
class RoutingConfig:
    """How a router's scores become experts and their weights.

    scores: softmax (over all experts), sigmoid, or top (the sigmoid of the chosen ones' scores, by which a
    token is multiplied before its expert rather than after it).
    corrected: to choose by, each expert's score has a number of its own added.
    groups: the experts are so many groups; a token's experts are in the `top_groups` best ones. group_best: a
    group is worth its so many best experts together.
    least, added: where the weights of a token are to add up to 1, they are divided by their sum plus `added`,
    and by `least` at least.
    scale: on the weights. wide: the router computes in float32.
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
    """The layers that have a state of one size in place of keys and values."""

    layers: frozenset[int]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence in one layer, float32: its convolution's last inputs, and the heads' memory."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Of one sequence in all layers."""
        return 4 * len(self.layers) * sum(math.prod(shape) for shape in self.state_shapes)


@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """Gated delta rules, each behind a causal convolution over its last inputs."""

    key_heads: int  # of queries and keys; each serves value_heads / key_heads heads of values
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    taps: int  # inputs that the convolution sees, the newest among them

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (self.value_heads, self.value_dim, self.key_dim)


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2, behind a causal convolution."""

    heads: int
    groups: int  # heads of one group have the same b and c
    head_dim: int
    state_dim: int
    taps: int  # inputs that the convolution sees, the newest among them
    conv_bias: bool = True
    biased: bool = False  # the matrix before it
    out_biased: bool = False  # the one behind it
    scales: tuple[float, ...] = ()  # on what becomes z, values, b, c and d; empty: there are none
    steps: tuple[float, float] = (0.0, math.inf)  # least and largest step
    normed: bool = True  # the norm in the layer
    gate_first: bool = True  # the gate is on what this norm gets, else on what it gives

    @property
    def value_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, b and c."""
        return self.value_size + 2 * self.groups * self.state_dim

    @property
    def in_size(self) -> int:
        """Rows of the matrix before it: [z; values; b; c; d]."""
        return self.value_size + self.channels + self.heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (self.heads, self.head_dim, self.state_dim)


@dataclass(frozen=True)
class BesideConfig:
    """Layers that have attention and a recurrent layer, which read the same input and whose outputs are
    added. What their inputs and outputs are multiplied by."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0


@dataclass(frozen=True)
class ConvConfig(RecurrentConfig):
    """Gated causal convolutions over the last inputs, without a memory beyond these."""

    channels: int
    taps: int  # inputs that the convolution sees, the newest among them

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.taps - 1, self.channels), (0, 0, 0)

"""The shapes of blocks that few families have: attention over latent keys and values, and how tokens are
routed to experts. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


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
class RoutingConfig:
    """How a router's scores become experts and their weights.

    scores: softmax (over all experts), sigmoid, or top (the sigmoid of the chosen ones' scores, by which a
    token is multiplied before its expert rather than after it).
    corrected: to choose by, each expert's score has a number of its own added.
    groups: the experts are so many groups; a token's experts are in the `top_groups` best ones. group_best: a
    group is worth its so many best experts together.
    least: the weights of a token are divided by this at least, where they are to add up to 1.
    scale: on the weights. wide: the router computes in float32.
    """

    scores: str = "softmax"
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    least: float = 0.0
    scale: float = 1.0
    wide: bool = False

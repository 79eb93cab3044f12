"""Mixture of experts: each token uses a few of many MLPs, which its router's scores choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.model import MoeConfig
from manylora.kernels.reference import ACTIVATIONS, ReferenceOps
from manylora.kernels.spec import ExpertPairs, LoraBatch, LoraTarget, Weight
from manylora.model.layers import LoraLinear, Mlp, Norm


@dataclass(frozen=True)
class WideRouter:
    """A router that computes in float32, whatever the rest does. weight [experts, hidden] float32."""

    ops: ReferenceOps
    layer: int
    weight: Tensor
    targets: tuple[LoraTarget, ...]

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        x = x.float()
        y = F.linear(x, self.weight)
        if lora is not None:
            self.ops.lora_add(y, x, lora, self.layer, self.targets)
        return y


Router = LoraLinear | WideRouter


def route(logits: Tensor, config: MoeConfig, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The chosen experts [T, k] int64 and their weights [T, k] float32, from router logits [T, experts].
    correction [experts] float32: added to the scores for choosing experts only.
    """
    routing = config.routing
    logits = logits.float()
    if routing.scores == "top":
        best, choices = logits.topk(config.top_k, dim=-1)
        return torch.sigmoid(best), choices
    scores = torch.softmax(logits, dim=-1) if routing.scores == "softmax" else torch.sigmoid(logits)
    marks = scores if correction is None else scores + correction
    if routing.groups > routing.top_groups:
        grouped = marks.unflatten(-1, (routing.groups, -1))
        worth = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        top = worth.topk(routing.top_groups, dim=-1).indices
        hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, top, False)
        marks = grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
    choices = marks.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, choices)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.added).clamp(min=routing.least)
    return (weights if routing.scale == 1 else weights * routing.scale), choices


@dataclass(frozen=True)
class Experts:
    """One projection of all experts. weights: E packed weights [N, K]. biases: [E, N], or None."""

    ops: ReferenceOps
    layer: int
    weights: tuple[Weight, ...]
    targets: tuple[LoraTarget, ...]
    biases: Tensor | None = None

    def __call__(
        self, x: Tensor, pairs: ExpertPairs, experts: Tensor | None, lora: LoraBatch | None
    ) -> Tensor:
        """experts: of each pair, int64; None without biases."""
        y = self.ops.expert_linear(x, pairs, self.weights)
        if lora is not None:
            self.ops.expert_lora_add(y, x, lora, pairs, self.layer, self.targets)
        if self.biases is not None:  # after DoRA, which does not scale them
            y += self.biases[experts]
        return y


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token uses, multiplied by the sigmoid of its gate [1, hidden] if it has one."""

    mlp: Mlp
    gate: LoraLinear | None

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        y = self.mlp(x, lora)
        return y if self.gate is None else torch.sigmoid(self.gate(x, lora)) * y


@dataclass(frozen=True)
class Moe:
    """Each token's experts, weighted by its router, and the shared expert. up_gate: [up; gate], as in a dense
    MLP. correction [experts]: as in `route`. scales [experts]: on the experts' weights. latent_in,
    latent_out: between the layer's width and that of its routed experts, if it is another.
    """

    config: MoeConfig
    router: Router
    up_gate: Experts
    down: Experts
    activation: str
    shared: SharedExpert | None
    correction: Tensor | None = None
    scales: Tensor | None = None
    latent_in: LoraLinear | None = None
    latent_out: LoraLinear | None = None

    def __call__(self, x: Tensor, lora: LoraBatch | None, scored: Tensor | None = None) -> Tensor:
        """scored: the router's input; None: x."""
        scores = self.router(x if scored is None else scored, lora)
        weights, choices = route(scores, self.config, self.correction)
        if self.scales is not None:
            weights = weights * self.scales[choices]
        seen = x if self.latent_in is None else self.latent_in(x, lora)
        if self.config.routing.scores == "top":  # weights multiply the experts' inputs
            mixed = self.each(seen, choices, lora, weights).float().sum(dim=1).to(x.dtype)
        else:
            y = self.each(seen, choices, lora).float()
            mixed = (y * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
        mixed = mixed if self.latent_out is None else self.latent_out(mixed, lora)
        return mixed if self.shared is None else mixed + self.shared(x, lora)

    def each(
        self, x: Tensor, choices: Tensor, lora: LoraBatch | None, weights: Tensor | None = None
    ) -> Tensor:
        """The experts' outputs [T, k, hidden], in each token's own order. weights [T, k]: on the inputs."""
        pairs, places = self.up_gate.ops.pair_up(choices, self.config.num_experts, lora)
        experts = in_pairs(choices, places) if self.config.biased else None
        y = self.run(x, pairs, experts, lora, in_pairs(weights, places))
        return y[places].view(*choices.shape, -1)

    def run(
        self,
        x: Tensor,
        pairs: ExpertPairs,
        experts: Tensor | None,
        lora: LoraBatch | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Outputs of the pairs, [P, hidden]. experts: as in `Experts`. weights [P]."""
        seen = x[pairs.rows]
        if weights is not None:
            seen = seen * weights.to(x.dtype).unsqueeze(1)
        wide, ops, swiglu = self.up_gate(seen, pairs, experts, lora), self.up_gate.ops, self.config.swiglu
        if not self.config.gated:
            return self.down(ACTIVATIONS[self.activation](wide), pairs, experts, lora)
        inner = ops.gated(wide, self.activation) if swiglu is None else ops.clamped_swiglu(wide, *swiglu)
        return self.down(inner, pairs, experts, lora)


@dataclass(frozen=True)
class ExpertsBesideMlp:
    """The sum of an MLP's output and of experts that read the same stream, each with its own norms. moe:
    called like `Moe`. scored: the norm of the router's input, which is also multiplied by hidden ** -0.5.
    """

    moe: Callable[[Tensor, LoraBatch | None, Tensor], Tensor]
    mlp_post_norm: Norm
    norm: Norm
    post_norm: Norm
    scored: Norm

    def __call__(self, y: Tensor, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """y: of the MLP. x: the stream."""
        scored = self.scored(x) * x.shape[1] ** -0.5
        mixed = self.moe(self.norm(x, lora), lora, scored)
        return self.mlp_post_norm(y, lora) + self.post_norm(mixed, lora)


def in_pairs(values: Tensor | None, places: Tensor) -> Tensor | None:
    """values [T, k] in the order of the pairs, [P]."""
    if values is None:
        return None
    return torch.empty_like(values).view(-1).index_copy_(0, places, values.view(-1))

"""Which experts a token uses and with what weights, from the router's scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.blocks import RoutingConfig
from manylora.config.model import MoeConfig
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch, LoraTarget
from manylora.model.layers import LoraLinear


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
        marks = _within_best_groups(marks, routing)
    choices = marks.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, choices)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.added).clamp(min=routing.least)
    return (weights if routing.scale == 1 else weights * routing.scale), choices


def _within_best_groups(marks: Tensor, routing: RoutingConfig) -> Tensor:
    """marks [T, experts], with -inf outside of each token's best groups."""
    grouped = marks.unflatten(-1, (routing.groups, -1))
    worth = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
    best = worth.topk(routing.top_groups, dim=-1).indices
    hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)

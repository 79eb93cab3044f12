"""Synthetic adapters of routed experts and a reference for what they add, for tests and experiments."""

from __future__ import annotations

import torch
from torch import Tensor


def make_per_expert_lora(
    num_experts: int,
    rank: int,
    in_dim: int,
    out_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    shared_side: str | None = None,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Random normal matrices of one module: "A" [experts, rank, in_dim] and "B" [experts, out_dim, rank].
    shared_side: "A" or "B" has one matrix for all experts. seed: of a separate generator, which draws A
    before B. Raises ValueError.
    """
    if shared_side not in (None, "A", "B"):
        raise ValueError(f"shared_side must be 'A', 'B' or None, got {shared_side!r}")
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def draw(side: str, rows: int, columns: int) -> Tensor:
        count = 1 if side == shared_side else num_experts
        drawn = torch.randn(count, rows, columns, dtype=torch.float32, device=device, generator=generator)
        return drawn.to(dtype).expand(num_experts, -1, -1).contiguous()

    return {"A": draw("A", rank, in_dim), "B": draw("B", out_dim, rank)}


def reference_moe_lora_delta(
    a: Tensor, b: Tensor, x: Tensor, token_to_expert: Tensor, *, scale: float = 1.0
) -> Tensor:
    """scale * B[e] @ (A[e] @ x[t]) for each token t and its expert e, in float32: [tokens, out_dim].

    a [experts, rank, in_dim], b [experts, out_dim, rank], x [tokens, in_dim], token_to_expert [tokens] int64.
    """
    low = torch.einsum("tri,ti->tr", a[token_to_expert].float(), x.float())
    return scale * torch.einsum("tor,tr->to", b[token_to_expert].float(), low)

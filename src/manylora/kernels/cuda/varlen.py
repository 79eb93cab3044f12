"""Attention by PyTorch's variable-length kernels, where the installed ones read a block table."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from manylora.kernels.cuda.tables import PagedBatch
from manylora.kernels.spec import AttentionParams


class VarlenAttention:
    """Which page sizes and head sizes work depends on PyTorch's build: `backends.choose` tries it first."""

    name = "torch.nn.attention.varlen"

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        if params.softcap is not None:
            raise NotImplementedError("it has no soft cap")
        if k_cache.dtype != q.dtype:
            raise NotImplementedError(f"it does not read a cache in {k_cache.dtype}")
        out = varlen_attn(
            q,
            k_cache,
            v_cache,
            batch.starts,
            None,
            batch.max_queries,
            batch.max_keys,
            scale=params.scale,
            window_size=(-1 if params.window is None else params.window - 1, 0),
            enable_gqa=q.shape[1] != k_cache.shape[2],
            seqused_k=batch.lengths,
            block_table=batch.block_table,
        )
        assert isinstance(out, Tensor)
        return out

"""Decode attention by FlashInfer, where it is installed; prompts go through our own kernel.

It uses the one function that reads block tables on the device and plans nothing on the host, so that a step
can be recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.cuda.attention import PagedAttention
from manylora.kernels.cuda.blocks import BlockChooser
from manylora.kernels.cuda.tables import PagedBatch
from manylora.kernels.spec import AttentionParams

WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention:
    """Raises ImportError without FlashInfer. Which GPUs, page sizes and head sizes work depends on its build,
    so `backends.choose` tries it."""

    name = "FlashInfer for decoding, our own kernel in the Triton language for prompts"

    def __init__(self, device: torch.device, chooser: BlockChooser | None = None) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        self._decode = trtllm_batch_decode_with_kv_cache
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prompts = PagedAttention(chooser)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        if params.softcap is not None:
            raise NotImplementedError("its decode attention on block tables has no soft cap")
        if batch.max_queries > 1:
            return self._prompts(q, k_cache, v_cache, batch, params)
        out = self._decode(
            query=q.contiguous(),
            kv_cache=(k_cache, v_cache),
            workspace_buffer=self._workspace,
            block_tables=batch.block_table,
            seq_lens=batch.lengths.view(torch.uint32),
            max_seq_len=batch.max_keys,
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            window_left=-1 if params.window is None else params.window - 1,
            kv_layout="NHD",
        )
        assert isinstance(out, Tensor)
        return out

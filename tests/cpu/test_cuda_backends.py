"""Protects the choice of an attention, and what the foreign ones are called with: doubles that take only what
the libraries document stand in for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from test_cuda_kernels import DEVICE, attention_batch, limits
from torch import Tensor

from manylora.kernels.cuda.attention import PagedAttention
from manylora.kernels.cuda.backends import FlashInferAttention, VarlenAttention, choose
from manylora.kernels.cuda.tables import plan_attention
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, AttentionParams
from manylora.kernels.transfer import to_device


class _Wrong(PagedAttention):
    name = "wrong"

    def __call__(self, q, k_cache, v_cache, batch, params):  # type: ignore[no-untyped-def]
        return super().__call__(q, k_cache, v_cache, batch, replace(params, scale=2 * params.scale))


class _WrongWhenDecoding(PagedAttention):
    name = "wrong when decoding"

    def __call__(self, q, k_cache, v_cache, batch, params):  # type: ignore[no-untyped-def]
        return super().__call__(q, k_cache, v_cache, batch, params) * (batch.max_queries > 1)


class _Raises(PagedAttention):
    name = "raises"

    def __call__(self, q, k_cache, v_cache, batch, params):  # type: ignore[no-untyped-def]
        raise RuntimeError("page size must be divisible by 256")


def test_the_first_attention_that_is_right_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "manylora")
    own, spare = PagedAttention(), PagedAttention()
    assert choose(limits(), DEVICE, [_Raises(), _Wrong(), _WrongWhenDecoding(), own, spare]) is own
    assert "raises is not used: RuntimeError: page size must be divisible by 256" in caplog.text
    assert "wrong when decoding is not used: its answer is" in caplog.text
    whole = limits(windows=frozenset({None, 5}), softcap=2.0, kv_dtype=torch.float8_e4m3fn)
    assert choose(whole, DEVICE, [own, spare]) is own


def documented_decode(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    kv_layout: str = "HND",
) -> Tensor:
    """As docs.flashinfer.ai has flashinfer.decode.trtllm_batch_decode_with_kv_cache, for one query each."""
    k, v = kv_cache
    num_pages, page_size, num_kv_heads, head_dim = k.shape
    assert (kv_layout, v.shape) == ("NHD", k.shape)
    assert query.is_contiguous() and query.dim() == 3 and query.shape[2] == head_dim
    assert query.shape[1] % num_kv_heads == 0
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
    assert block_tables.dtype == torch.int32 and block_tables.shape[0] == len(query)
    assert int(block_tables.min()) >= 0 and int(block_tables.max()) < num_pages
    assert seq_lens.dtype == torch.uint32 and seq_lens.shape == (len(query),)
    lengths = seq_lens.view(torch.int32).tolist()
    assert max(lengths) <= max_seq_len <= block_tables.shape[1] * page_size
    assert bmm2_scale == 1.0
    window = None if window_left < 0 else window_left + 1  # the left side, the query's own key not counted
    batch = AttentionBatch(range(len(query) + 1), lengths, block_tables, torch.empty(0))
    return ReferenceOps().attention(query, k, v, batch, AttentionParams(bmm1_scale, window))


def test_flashinfer_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache = documented_decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    made, own = FlashInferAttention(DEVICE), PagedAttention()
    for windows in ({None}, {None, 5}):
        assert choose(limits(windows=frozenset(windows)), DEVICE, [made, own]) is made
    assert choose(limits(softcap=30.0), DEVICE, [made, own]) is own
    fixed = to_device(plan_attention(attention_batch([1, 1], [9, 30]), limits(), fixed=True), DEVICE)
    k, v = (torch.randn(128, 4, 2, 24, device=DEVICE) for _ in "kv")
    q = torch.randn(2, 6, 48, device=DEVICE)[..., :24]
    want = own(q.contiguous(), k, v, fixed, AttentionParams(0.3))
    torch.testing.assert_close(made(q, k, v, fixed, AttentionParams(0.3)), want)


def test_varlen_attention_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(  # torch.nn.attention.varlen.varlen_attn of PyTorch 2.13
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
        max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert cu_seq_k is None and enable_gqa == (query.shape[1] != key.shape[2])
        assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
        starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
        assert max(lengths) <= max_k
        assert max(stop - start for start, stop in pairwise(starts)) <= max_q
        left, right = window_size
        assert right == 0, "causal"
        batch = AttentionBatch(starts, lengths, block_table, torch.empty(0))
        return ReferenceOps().attention(
            query, key, value, batch, AttentionParams(scale, None if left < 0 else left + 1)
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    made, own = VarlenAttention(), PagedAttention()
    assert choose(limits(windows=frozenset({None, 5})), DEVICE, [made, own]) is made
    assert choose(limits(softcap=30.0), DEVICE, [made, own]) is own
    assert choose(limits(kv_dtype=torch.float8_e4m3fn), DEVICE, [made, own]) is own

"""Chooses the attention backend: the first that matches the reference on a small batch of the model's shape.

Libraries do not document reliably which shapes and GPUs their builds support, so each one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from manylora.kernels.cuda.attention import PagedAttention
from manylora.kernels.cuda.blocks import BlockChooser
from manylora.kernels.cuda.tables import PagedBatch, plan_attention
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, AttentionParams, BatchLimits
from manylora.kernels.transfer import to_device

logger = logging.getLogger("manylora")

KEYS = (9, 40, 21)  # lengths of the sequences in the trial
QUERIES = ((1, 1, 5), (1, 1, 1))  # query rows in its two batches: with a prompt, and decoding only
WORKSPACE_BYTES = 128 * 2**20  # for FlashInfer
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class AttentionBackend(Protocol):
    """An implementation of paged attention, called like `ReferenceOps.attention`."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor: ...


class VarlenAttention:
    """PyTorch's variable-length kernels. Raises ImportError if the installed ones do not support block
    tables.
    """

    name = "torch.nn.attention.varlen"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        if params.softcap is not None:
            raise NotImplementedError("it has no soft cap")
        if params.sinks is not None:
            raise NotImplementedError("it has no sinks")
        if k_cache.dtype != q.dtype:
            raise NotImplementedError(f"it does not read a cache in {k_cache.dtype}")
        out = self._attend(
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


class FlashInferAttention:
    """Decodes with the FlashInfer function that reads block tables on the device and plans nothing on the
    host, so that a step can be recorded. Raises ImportError without FlashInfer.
    """

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
        if params.sinks is not None:
            raise NotImplementedError("its decode attention on block tables is used without sinks")
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


def choose(
    limits: BatchLimits,
    device: torch.device,
    candidates: Sequence[AttentionBackend] | None = None,
    chooser: BlockChooser | None = None,
) -> AttentionBackend:
    """The first candidate that passes a trial. The last one needs none. Logs the choice.

    chooser: of our own kernel's block sizes.
    """
    offered = _installed(device, chooser) if candidates is None else candidates
    for backend in offered[:-1]:
        reason = _refusal(backend, limits, device)
        if reason is None:
            logger.info("attention: %s", backend.name)
            return backend
        logger.info("attention: %s is not used: %s", backend.name, reason)
    logger.info("attention: %s", offered[-1].name)
    return offered[-1]


def _installed(device: torch.device, chooser: BlockChooser | None) -> Sequence[AttentionBackend]:
    if device.type != "cuda":
        return (PagedAttention(chooser),)
    found: list[AttentionBackend] = []
    libraries: dict[str, Callable[[], AttentionBackend]] = {
        VarlenAttention.name: VarlenAttention,
        "FlashInfer": lambda: FlashInferAttention(device, chooser),
    }
    for name, load in libraries.items():
        try:
            found.append(load())
        except (ImportError, RuntimeError) as error:  # not installed, or not supported on this machine
            logger.info("attention: %s is not used: %s", name, error)
    return *found, PagedAttention(chooser)


def _refusal(backend: AttentionBackend, limits: BatchLimits, device: torch.device) -> str | None:
    """Why a backend cannot be used: it raised an error, or its result differs. None: it can."""
    reasons = (_refusal_of(backend, limits, device, *shape) for shape in limits.head_shapes)
    return next((reason for reason in reasons if reason is not None), None)


def _refusal_of(
    backend: AttentionBackend, limits: BatchLimits, device: torch.device, kv_heads: int, dim: int
) -> str | None:
    """The same for heads of one shape."""
    made = torch.Generator().manual_seed(0)
    size, columns = limits.tokens_per_block, -(-max(KEYS) // limits.tokens_per_block)
    pages = 1 + len(KEYS) * columns
    shape, cached = (pages, size, kv_heads, dim), limits.kv_dtype or limits.dtype
    k, v = (torch.randn(shape, generator=made).to(cached).to(device) for _ in "kv")
    table = torch.arange(1, pages, dtype=torch.int32).view(len(KEYS), columns)
    scale = dim**-0.5
    for counts in QUERIES:
        starts = [0, *accumulate(counts)]
        q = torch.randn(starts[-1], limits.num_heads, dim, generator=made)
        q = q.to(limits.dtype).to(device)
        batch = AttentionBatch(starts, KEYS, table, torch.zeros(starts[-1], dtype=torch.int64))
        planned = to_device(plan_attention(batch, limits, fixed=False), device)
        for window in limits.windows:
            sinks = torch.zeros(limits.num_heads, device=device) if limits.sinks else None
            params = AttentionParams(scale, window, limits.softcap, sinks)
            want = ReferenceOps().attention(q, k, v, planned, params)
            try:
                got = backend(q, k, v, planned, params)
                worst = float((got.float() - want.float()).abs().max())
            except Exception as error:  # a library may raise anything; then another one is used
                return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not worst <= TOLERANCE[limits.dtype]:
                return f"its answer is {worst:.3g} away from the reference's"
    return None

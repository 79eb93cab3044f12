"""The test bed of `gpu.py`: a random model in memory, random adapters in a pool, and decode steps.

It uses only the parts of the package below the engine, so that a plain PyTorch image is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manylora.adapters.modules import LoraModule, lora_modules
from manylora.config.model import ModelConfig, MoeConfig
from manylora.engine.graphs import DecodeGraphs
from manylora.engine.inputs import StepInputs
from manylora.engine.warmup import compile_kernels
from manylora.kernels.device import Device
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import BatchLimits, LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.model.decoder import Decoder
from manylora.model.plan import checkpoint_plan

QKV, ALL = (1, 2, 3), (1, 2, 3, 4, 5, 6, 7)  # module ids
EXPERTS = (1, 2, 3, 4, 13, 14, 15)
PAGE = 64
SHAPES = {  # hidden, inner, layers, heads, key heads, head size, vocabulary
    "tiny": (32, 48, 1, 2, 1, 16, 64),
    "1B": (2048, 8192, 16, 32, 8, 64, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128, 128256),
}
VARIANTS = {  # of `tiny`, with features that a Llama does not have
    "tiny experts": {
        "architecture": "MixtralForCausalLM",
        "moe": MoeConfig(4, 2, 48, True, frozenset({0})),
    },
    "tiny windows": {"attention_softcap": 2.0, "sliding_windows": (9,)},
}


def model_shape(name: str) -> ModelConfig:
    hidden, inner, layers, heads, kv_heads, dim, vocab = SHAPES[name.split()[0]]
    shape = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_position_embeddings=131072, norm_eps=1e-5, rope_theta=500000.0, dtype="bfloat16",
        tie_word_embeddings=name != "8B",
    )  # fmt: skip
    return replace(shape, **VARIANTS.get(name, {}))


@dataclass(frozen=True)
class Adapters:
    """`count` distinct adapters on every layer, each in its own part of the pool. ranks: used in turn."""

    count: int
    ranks: tuple[int, ...]
    modules: tuple[int, ...]
    pool: Tensor
    rows: tuple[dict[tuple[int, int], LoraRow], ...]
    num_bytes: int


class World:
    """A model in `dtype` with a KV cache for `max_batch` sequences of `context` tokens and a few more.

    kv_dtype: of the KV cache, None for `dtype`.
    """

    def __init__(
        self,
        shape: str,
        device: Device,
        dtype: torch.dtype,
        max_batch: int,
        context: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.device, self.dtype, self.context = shape, device, dtype, context
        self.config = config = model_shape(shape)
        self.modules: dict[int, LoraModule] = lora_modules(config)
        self._blocks_each = -(-(context + 8) // PAGE)
        heads = config.num_kv_heads, config.head_dim
        size = (config.num_layers, 2, max_batch * self._blocks_each, PAGE, *heads)
        self.kv = torch.zeros(size, dtype=dtype, device=device.torch).to(kv_dtype or dtype)
        self.weights = self._weights()
        self.decoder = Decoder(config, self.weights, dtype, device.ops)
        self.limits = BatchLimits(
            config.num_layers, max_batch, config.max_position_embeddings, PAGE, config.num_heads, *heads,
            dtype,
            windows=frozenset(config.sliding_windows or (None,)),
            softcap=config.attention_softcap,
            kv_dtype=kv_dtype,
            num_experts=config.moe.num_experts if config.moe else 0,
        )  # fmt: skip
        device.ops.reserve(self.limits, device.torch)
        modules = self.modules.values()
        compile_kernels(self.decoder, self.kv, device.ops, modules, self.limits, device.torch)
        self.pool = self._pool()
        self._new_graphs()

    def let_go(self) -> None:
        """Free the pool's memory, and the graphs, which hold it, too."""
        self.pool = torch.empty(0, dtype=self.dtype, device=self.device.torch)
        self._new_graphs()

    def _new_graphs(self) -> None:
        device = self.device
        assert device.capture is not None
        self.graphs = DecodeGraphs(self._forward, device.ops, device.capture, device.torch, self.limits, 64)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.num_layers * 2 * self.config.kv_size * self.dtype.itemsize

    def step_bytes(self, batch: int) -> int:
        """Bytes that a decode step of the base model reads. The embedding counts only if it is tied to the
        head, which reads all of it."""
        config, weights = self.config, self.decoder.weight_bytes
        if not config.tie_word_embeddings:
            weights -= config.vocab_size * config.hidden_size * self.dtype.itemsize
        return weights + batch * self.context * self.kv_bytes_per_token

    def adapters(self, count: int, ranks: tuple[int, ...], modules: tuple[int, ...]) -> Adapters:
        """Raises torch.OutOfMemoryError if the adapters do not fit in the pool."""
        placed, used = [], 0
        for number in range(count):
            rank, rows = ranks[number % len(ranks)], {}
            for layer in range(self.config.num_layers):
                for module_id in modules:
                    module = self.modules[module_id]
                    rows[layer, module_id] = LoraRow(used, RowFormat(rank))
                    used += module.row_elements(RowFormat(rank))
            placed.append(rows)
        if used > self.pool.numel():
            raise torch.OutOfMemoryError
        return Adapters(count, ranks, modules, self.pool, tuple(placed), used * self.dtype.itemsize)

    def batch(self, adapters: Adapters | None, lengths: Sequence[int]) -> LoraBatch | None:
        """Assign the sequences to the adapters in contiguous runs. lengths: rows of each sequence."""
        if adapters is None:
            return None
        bounds = [len(lengths) * i // adapters.count for i in range(adapters.count + 1)]
        starts = [sum(lengths[:bound]) for bound in bounds]
        parts = zip(starts, starts[1:], adapters.rows, strict=False)
        segments = tuple(LoraSegment(start, stop, rows) for start, stop, rows in parts if stop > start)
        return LoraBatch(adapters.pool, segments, 16)

    def inputs(self, lengths: Sequence[int], lora: LoraBatch | None) -> StepInputs:
        """Sequences of `context` tokens. lengths: how many of their last tokens this step computes."""
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        each = self._blocks_each
        blocks = [list(range(i * each, i * each + -(-self.context // PAGE))) for i in range(len(lengths))]
        places = [(i, self.context - n + j) for i, n in enumerate(lengths) for j in range(n)]
        return StepInputs(
            input_ids=[7 * j % self.config.vocab_size for j in range(starts[-1])],
            positions=[position for _, position in places],
            starts=starts,
            lengths=[self.context] * len(lengths),
            blocks=blocks,
            slots=[blocks[i][p // PAGE] * PAGE + p % PAGE for i, p in places],
            logits_rows=[start - 1 for start in starts[1:]],
            lora=lora,
        )

    def plain(self, inputs: StepInputs) -> Tensor:
        """Run one step without a graph. Returns the next tokens."""
        batch = to_device(inputs.plan(self.device.ops), self.device.torch)
        return torch.argmax(self._forward(batch), dim=-1)

    def decode(self, inputs: StepInputs) -> Tensor:
        """Run one decode step like the engine: build tables, copy them, launch. Returns the next tokens."""
        return torch.argmax(self.graphs.run(inputs), dim=-1)

    def _forward(self, batch) -> Tensor:  # type: ignore[no-untyped-def]
        return self.decoder.forward(batch, self.kv)

    def _pool(self) -> Tensor:
        """Room for 128 adapters of rank 64 on every module, or as much as fits besides the model."""
        sizes = sum(module.row_elements(RowFormat(64)) for module in self.modules.values() if module.counted)
        elements = 128 * self.config.num_layers * sizes
        if self.device.torch.type == "cuda":
            elements = min(elements, int(0.9 * self.device.free_bytes()) // self.dtype.itemsize)
        else:
            elements //= 32
        return torch.empty(elements, dtype=self.dtype, device=self.device.torch).normal_(0, 0.02)

    def _weights(self) -> dict[str, Tensor]:
        """Random weights, with the names that a checkpoint's tensors would get."""
        found = {}
        for name, part in checkpoint_plan(self.config, ()).items():
            weight = torch.empty(part.shape, dtype=self.dtype, device=self.device.torch).normal_(0, 0.02)
            found[name] = weight if part.columns else weight.add_(1)
        if self.config.tie_word_embeddings:
            found["head.weight"] = found["embed"]
        return found

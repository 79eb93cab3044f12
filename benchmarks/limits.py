"""What a machine allows: its bandwidth and GEMM rate, measured, and the times that follow for a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manylora.config.engine import ModelConfig
from manylora.lora.modules import LoraModule

INT4_SCALES = 8 / 128  # a scale and an offset, in float32, for each group of 128
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + INT4_SCALES}
HEAD_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}


def measure_machine(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a large read, FLOPs per second of a large GEMM; the best of several."""
    big = torch.ones(256 * 2**20 // 4)
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    read = min(_seconds(big.sum) for _ in range(8))
    multiply = min(_seconds(lambda: a @ b) for _ in range(12))
    return big.nbytes / read, 2 * 1024**3 / multiply


def _seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Limits:
    """Times at the machine's limits. A step takes the larger of its bytes at `bandwidth` (bytes/s) and its
    FLOPs at `rate` (FLOPs/s). Weights and adapters are read once in a step, keys and values by their owner.

    weights: dtype of the linear layers, one of WEIGHT_BYTES. element: bytes of a key or value.
    adapter_element: bytes of an element of A or B.
    """

    model: ModelConfig
    weights: str
    element: int
    adapter_element: int
    bandwidth: float
    rate: float

    def decode_step(self, lengths: Sequence[float], distinct: Sequence[int] = (), met: float = 0) -> float:
        """Seconds of a step of one token for each of so many sequences. distinct: elements of each adapter
        in the batch. met: elements that all sequences together meet."""
        m = self.model
        kv = 2 * m.num_layers * m.num_kv_heads * m.head_dim * sum(lengths)
        size = self._layers() * WEIGHT_BYTES[self.weights] + self._head() * HEAD_BYTES[self.weights]
        size += kv * self.element + sum(distinct) * self.adapter_element
        flops = 2 * (self._layers() + self._head()) * len(lengths) + 2 * met
        flops += 4 * m.num_layers * m.num_heads * m.head_dim * sum(lengths)
        return max(size / self.bandwidth, flops / self.rate)

    def prefill(self, prompt: int, elements: float = 0) -> float:
        """Seconds of a prompt under an adapter of so many elements, bound by FLOPs."""
        m = self.model
        attention = 2 * m.num_layers * m.num_heads * m.head_dim * prompt**2
        return (2 * (self._layers() + elements) * prompt + 2 * self._head() + attention) / self.rate

    def run(
        self, adapters: Sequence[int | None], sizes: Sequence[int], prompt: int, output: int, at_once: int
    ) -> float:
        """Seconds of a whole load: prompts one after the other, then steps of `at_once` sequences.

        adapters: of each request, None: the base. sizes: elements of each adapter."""
        seconds = 0.0
        for start in range(0, len(adapters), at_once):
            some = [n for n in adapters[start : start + at_once] if n is not None]
            count = len(adapters[start : start + at_once])
            distinct = [sizes[n] for n in set(some)]
            seconds += output * self.decode_step(
                [prompt + output / 2] * count, distinct, sum(sizes[n] for n in some)
            )
        return seconds + sum(self.prefill(prompt, 0 if n is None else sizes[n]) for n in adapters)

    def _layers(self) -> int:
        m = self.model
        attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
        return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)

    def _head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def adapter_elements(modules: dict[int, LoraModule], used: Sequence[int], rank: int, layers: int) -> int:
    """Elements of A and B over all layers."""
    return rank * layers * sum(modules[m].in_dim + modules[m].out_dim for m in used)

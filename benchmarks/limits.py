"""Measures a machine's bandwidth and GEMM rate, and computes the resulting lower bounds of a model's times.

A step of n sequences cannot be faster than the larger of two times:

- Bytes / bandwidth. A step reads every weight once (bfloat16 2 bytes, float32 4, int8 1, int4 0.56 with its
  scales; the output head 2 or 4), each distinct adapter once, and the keys and values of all n sequences.
- FLOPs / GEMM rate. A step does 2 FLOPs for each weight and sequence, 2 for each element of the sequence's
  adapter, and 4 for each key element that its heads attend to.

A prompt takes the larger of the time of its FLOPs and the time to read the weights once. Norms, rotary
embeddings, sampling and the rows of the embedding do not count. They are small, so all of them are overhead.

The bandwidth is that of a plain read loop on all cores (the C library's memchr over memory far larger than
the caches, in huge pages if available). The GEMM rate is the best of torch and our own kernel. Both are the
best of many runs, because other work on the machine can only lower them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from manylora.adapters.modules import LoraModule
from manylora.config.model import ModelConfig
from manylora.kernels.device import open_device

INT4_SCALES = 8 / 128  # a float32 scale and a float32 offset for each group of 128
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + INT4_SCALES}
HEAD_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}
READ_BYTES, READS, GEMMS = 2**28, 16, 12


def measure_machine() -> tuple[float, float]:
    """Bytes per second of a large read by all threads, FLOPs per second of a large GEMM."""
    return _bandwidth(torch.get_num_threads()), max(_gemm_rates().values())


def _bandwidth(threads: int) -> float:
    memory = mmap.mmap(-1, READ_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    ones = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    find = ctypes.CDLL(None).memchr  # ctypes releases the GIL during the call
    find.argtypes, find.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    part = READ_BYTES // threads

    def read() -> None:
        parts = [
            threading.Thread(target=find, args=(ones.data_ptr() + n * part, 0, part)) for n in range(threads)
        ]
        for one in parts:
            one.start()
        for one in parts:
            one.join()

    return threads * part / min(_seconds(read) for _ in range(READS))


def _gemm_rates() -> dict[str, float]:
    """FLOPs per second of torch and of our kernel, with bfloat16 weights and the number of rows of a prompt.
    Both use bfloat16 products if the processor has them."""
    ops = open_device("cpu").ops
    dtype = torch.bfloat16 if ops.has_bfloat16 else torch.float32
    ops.compute_in(dtype)
    x, weight = torch.randn(1024, 1024, dtype=dtype), torch.randn(2048, 1024, dtype=dtype)
    turned = weight.t().contiguous()
    packed = ops.pack(weight.to(torch.bfloat16))
    flops = 2 * x.numel() * weight.shape[0]
    work: dict[str, Callable[[], object]] = {
        "torch": lambda: x @ turned,
        "ours": lambda: ops.linear(x, packed, None),
    }
    return {name: flops / min(_seconds(do) for _ in range(GEMMS)) for name, do in work.items()}


def kv_bytes() -> int:
    """Of a key or a value of a bfloat16 model, in the engine."""
    return 2 if open_device("cpu").ops.has_bfloat16 else 4


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Limits:
    """Times at the machine's limits: bytes at `bandwidth` (bytes/s) or FLOPs at `rate` (FLOPs/s), whichever
    takes longer.

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
        """Seconds of a decode step. lengths: tokens in the KV cache of each sequence. distinct: elements of
        each distinct adapter in the batch. met: sum, over the sequences, of the elements of their adapter."""
        m = self.model
        kv = 2 * m.num_layers * m.num_kv_heads * m.head_dim * sum(lengths)
        seconds = self.read_once(distinct) + kv * self.element / self.bandwidth
        flops = 2 * (self._layers() + self._head()) * len(lengths) + 2 * met
        flops += 4 * m.num_layers * m.num_heads * m.head_dim * sum(lengths)
        return max(seconds, flops / self.rate)

    def read_once(self, distinct: Sequence[int] = ()) -> float:
        """Seconds to read all weights and some adapters. distinct: elements of each adapter."""
        size = self._layers() * WEIGHT_BYTES[self.weights] + self._head() * HEAD_BYTES[self.weights]
        return (size + sum(distinct) * self.adapter_element) / self.bandwidth

    def prefill(self, prompt: int, elements: float = 0) -> float:
        """Seconds of the FLOPs of a prompt. elements: of its adapter. On average a token attends to half of
        the prompt. Only the last token needs the head."""
        m = self.model
        attention = 2 * m.num_layers * m.num_heads * m.head_dim * prompt**2
        return (2 * (self._layers() + elements) * prompt + 2 * self._head() + attention) / self.rate

    def run(
        self, adapters: Sequence[int | None], sizes: Sequence[int], prompt: int, output: int, at_once: int
    ) -> float:
        """Seconds of a whole load: prompts, which give the first tokens, then steps of `at_once` sequences.

        adapters: of each request, None for the base model. sizes: elements of each adapter."""
        seconds = 0.0
        for start in range(0, len(adapters), at_once):
            some = [n for n in adapters[start : start + at_once] if n is not None]
            count = len(adapters[start : start + at_once])
            distinct = [sizes[n] for n in set(some)]
            step = self.decode_step([prompt + output / 2] * count, distinct, sum(sizes[n] for n in some))
            together = sum(self.prefill(prompt, sizes[n]) for n in some)
            together += (count - len(some)) * self.prefill(prompt)
            seconds += max(together, self.read_once(distinct)) + (output - 1) * step
        return seconds

    def _layers(self) -> int:
        m = self.model
        attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
        return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)

    def _head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size


def adapter_elements(modules: dict[int, LoraModule], used: Sequence[int], rank: int, layers: int) -> int:
    """Elements of an adapter's A and B over all layers."""
    return rank * layers * sum(modules[m].in_dim + modules[m].out_dim for m in used)

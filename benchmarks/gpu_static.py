"""Compiles every kernel, with every choice of block sizes, for three kinds of GPU, and writes what became of
it to a table. No GPU is needed: triton brings the compiler and NVIDIA's assembler.

    PYTHONPATH=src python benchmarks/gpu_static.py --out docs/gpu_static.md

Shapes are those of a Llama 3 8B, its experts those of a Mixtral. Fails where a kernel spills registers, needs
more shared memory than a GPU has, or cannot be compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from gpu_sass import UNITS, MachineCode, read_code
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from manylora.kernels.cuda.blocks import BlockChooser, Blocks
from manylora.kernels.cuda.fp8 import FP8, quantise_rows
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    LoraBatch,
    LoraRow,
    LoraSegment,
    LoraTarget,
)

SPILLED = 16  # bytes of a thread that are tolerated
HIDDEN, WIDTHS = 4096, (4096, 1024, 1024)
TARGETS = [LoraTarget(i, sum(WIDTHS[:i]), width) for i, width in enumerate(WIDTHS)]
LENGTHS = {1: (1,) * 32, 16: (8,) * 4, 64: (128, 128)}  # rows of each adapter, by the size of a tile
GROUPS = ("adapters", "attention", "weights", "rows")
HEAD = (
    "| kernel | case | block | registers | spilled | shared | blocks | loads of 128, 64, ≤ 32 bits "
    "| tensor cores | loop | barriers |"
)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    case: str
    blocks: Blocks | None
    warps: int
    code: MachineCode | None
    error: str = ""


class Collector:
    """Stands in for launching: each launch is a kernel to compile, with the case it belongs to."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.case = ""
        self.wanted: list[tuple[Any, str, Blocks | None, tuple, dict]] = []

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        self.wanted.append((kernel, self.case, Every.now, arguments, constants))

    def compile(self) -> Iterator[Compiled]:
        once = {
            (kernel.__name__, case, blocks): all_
            for all_ in self.wanted
            for kernel, case, blocks, *_ in [all_]
        }
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            yield from threads.map(self._one, once.values())

    def _one(self, wanted: tuple[Any, str, Blocks | None, tuple, dict]) -> Compiled:
        kernel, case, blocks, arguments, constants = wanted
        warps = constants.get("num_warps", 4)
        try:
            made = JIT_RUN(kernel, *arguments, grid=(1,), warmup=True, **constants)
            unit = UNITS[self.capability]
            code = read_code(made.asm["cubin"], unit, made.metadata.shared, warps)
        except Exception as error:  # whatever the compiler raises is a row of the table
            return Compiled(kernel.__name__, case, blocks, warps, None, f"{type(error).__name__}: {error}")
        return Compiled(kernel.__name__, case, blocks, warps, code)


class Every(BlockChooser):
    """Launches every candidate; the last one is left to the caller."""

    now: Blocks | None = None

    def choose(self, shape: str, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
        for blocks in candidates:
            Every.now = blocks
            launch(blocks)
        return candidates[-1]


JIT_RUN = JITFunction.run


def compile_all(capability: int, groups: Sequence[str] = GROUPS, part: str = "") -> list[Compiled]:
    """Every kernel of the groups for GPUs of one compute capability, times 10. part: of a case's name."""

    class NoGpu:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)

    driver.set_active(NoGpu())  # type: ignore[arg-type]
    collector = Collector(capability)
    JITFunction.run = lambda kernel, *a, **k: collector.run(kernel, *a, **k)  # type: ignore[method-assign]
    try:
        for name, case in _cases(groups, capability):
            collector.case, Every.now = name, None
            if part in name:
                case()
    finally:
        JITFunction.run = JIT_RUN  # type: ignore[method-assign]
    return list(collector.compile())


def _cases(groups: Sequence[str], capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    made = {"adapters": _adapters, "attention": _attention, "weights": _weights, "rows": _rows}
    for group in groups:
        yield from made[group](capability)


def _ops(dtype: torch.dtype, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> CudaOps:
    ops = CudaOps(chooser=Every())
    limits = BatchLimits(1, 256, 131072, 32, heads, kv_heads, dim, dtype, num_experts=8)
    ops.reserve(limits, torch.device("cpu"))
    return ops


def _batch(lengths: Sequence[int], keys: int = 1024) -> AttentionBatch:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    table = torch.zeros(len(lengths), -(-keys // 32), dtype=torch.int32)
    return AttentionBatch(starts, [keys] * len(lengths), table, torch.zeros(starts[-1], dtype=torch.int64))


def _adapters(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for size, lengths in LENGTHS.items():
            for rank, encoding in ((16, 0), (64, 0), (16, 1), (64, 1)):
                if size == 1 and rank == 64:
                    continue  # the same kernels
                attention = _batch(lengths)
                row = LoraRow(0, RowFormat(rank, encoding=Encoding(encoding)))
                spans = zip(attention.query_starts, attention.query_starts[1:], strict=False)
                rows = {(0, t.module_id): row for t in TARGETS}
                segments = tuple(LoraSegment(start, stop, dict(rows)) for start, stop in spans)
                ops = _ops(dtype)
                _, lora = ops.plan(attention, LoraBatch(torch.zeros(64, dtype=dtype), segments, 16))
                x = torch.zeros(sum(lengths), HIDDEN, dtype=dtype)
                y = torch.zeros(sum(lengths), sum(WIDTHS), dtype=dtype)
                name = f"{_name(dtype)}, tile {size}, rank {rank}{', 8-bit' * encoding}"
                yield name, lambda o=ops, y=y, x=x, b=lora: o.lora_add(y, x, b, 0, TARGETS)  # type: ignore[misc]


def _attention(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    heads_of = {torch.bfloat16: ((32, 8, 128), (16, 8, 256)), torch.float32: ((32, 8, 128), (16, 8, 256))}
    for dtype, shapes in heads_of.items():
        for heads, kv_heads, dim in shapes:
            for label, lengths in (("decoding", (1,) * 32), ("prompts", (512,))):
                for narrow in (False, True):
                    ops = _ops(dtype, heads, kv_heads, dim)
                    planned, _ = ops.plan(_batch(lengths), None)
                    q = torch.zeros(sum(lengths), heads, dim, dtype=dtype)
                    cache = torch.zeros(4, 32, kv_heads, dim, dtype=FP8 if narrow else dtype)
                    params = AttentionParams(0.1, 512, 30.0) if narrow else AttentionParams(0.1)
                    name = f"{_name(dtype)}, {label}, heads of {dim}{', 8-bit cache, window, cap' * narrow}"
                    yield name, lambda o=ops, q=q, c=cache, b=planned, p=params: o.attention(q, c, c, b, p)  # type: ignore[misc]


def _weights(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    dtype = torch.bfloat16
    scales = torch.zeros(HIDDEN, 32, dtype=dtype)
    kinds = {
        "plain": torch.zeros(HIDDEN, HIDDEN, dtype=dtype),
        "int8": QuantisedWeight(
            torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8), scales[:, :1].contiguous(), None
        ),
        "e4m3": QuantisedWeight(torch.zeros(HIDDEN, HIDDEN).to(FP8), scales[:, :1].contiguous(), None),
        "int4": QuantisedWeight(torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8), scales, scales),
    }
    for rows in (16, 64):
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        for name, weight in kinds.items():
            table = weight_table([weight])
            case = f"{name}, {rows} rows"
            yield case, lambda x=x, t=table: quantised_rows(x, t, Every())  # type: ignore[misc]
        if capability >= 89:
            units = weight_table([kinds["e4m3"]], narrow=True)
            yield f"FP8 units, {rows} rows", lambda x=x, t=units: quantised_rows(x, t, Every())  # type: ignore[misc]


def _rows(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    dtype = torch.bfloat16
    ops, attention = _ops(dtype), _batch((1,) * 32)
    x = torch.zeros(32, HIDDEN, dtype=dtype)
    q, k = torch.zeros(32, 32, 128, dtype=dtype), torch.zeros(32, 8, 128, dtype=dtype)
    cache, angle = torch.zeros(4, 32, 8, 128, dtype=dtype), torch.zeros(32, 128, dtype=dtype)
    yield "bf16", lambda: ops.add_rms_norm(x, x, x[0], 1e-5)
    yield "bf16, silu", lambda: ops.gated(x, "silu")
    yield "bf16", lambda: ops.rotate_and_store(q, k, k, (angle, angle), cache, cache, attention)
    yield "8-bit cache", lambda: ops.rotate_and_store(q, k, k, None, cache.to(FP8), cache.to(FP8), attention)
    yield "bf16", lambda: quantise_rows(x)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "float32"}[dtype]


def faults(rows: Sequence[Compiled], capability: int) -> list[str]:
    """What a kernel that may be chosen must not have."""
    found = []
    for row in rows:
        what = f"sm_{capability} {row.kernel} {row.case} {row.blocks}"
        if row.code is None:
            found.append(f"{what}: {row.error}")
        elif row.code.spilled > SPILLED:
            found.append(f"{what}: spills {row.code.spilled} bytes")
        elif row.code.shared > UNITS[capability].most_shared:
            found.append(f"{what}: {row.code.shared} bytes of shared memory")
    return found


def _line(row: Compiled) -> str:
    code, blocks = row.code, row.blocks
    size = f"{blocks.size}, {row.warps} warps, {blocks.stages} stages" if blocks else f"{row.warps} warps"
    if code is None:
        return f"| {row.kernel} | {row.case} | {size} | {row.error.splitlines()[0]} |" + " |" * 7
    narrow = sum(count for bits, count in code.loads.items() if bits <= 32)
    loads = f"{code.loads.get(128, 0)}, {code.loads.get(64, 0)}, {narrow}"
    return (
        f"| {row.kernel} | {row.case} | {size} | {code.registers} | {code.spilled} | {code.shared} | "
        f"{code.blocks} | {loads} | {code.tensor_cores} | {code.instructions} | {code.barriers} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=lambda text: [int(n) for n in text.split(",")], default=[80, 90, 100])
    parser.add_argument("--only", type=lambda text: text.split(","), default=GROUPS)
    parser.add_argument("--case", default="", help="only cases with this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [
        "# Machine code of the GPU kernels",
        "",
        f"Made by `benchmarks/gpu_static.py` with triton {triton.__version__}, without a GPU: nothing ran.",
        "A row is a kernel with one choice of block sizes. Registers are a thread's, spilled its bytes in",
        "local memory, shared bytes of a block; blocks: how many fit into a unit (SM). The loop is the main",
        "one's instructions, with its barriers.",
    ]
    wrong = []
    for capability in given.arch:
        rows = compile_all(capability, given.only, given.case)
        wrong += faults(rows, capability)
        lines += ["", f"## sm_{capability}", "", HEAD, "|" + "---|" * 11, *map(_line, rows)]
    text = "\n".join(lines) + "\n"
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "no spills", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Compiles every kernel with every choice of block sizes for three kinds of GPU, and tabulates the machine
code.

    PYTHONPATH=src python benchmarks/gpu_static.py --out build/gpu_static.md

No GPU is needed, because triton's wheel contains the compiler and NVIDIA's assembler. Shapes are those of a
Llama 3 8B. Fails if a kernel spills registers, needs more shared memory than a GPU has, or cannot be
compiled. Takes a quarter of an hour on one core. --only, --arch and --case select a part.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from gpu_sass import UNITS, MachineCode, read_code
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from manylora.kernels import spec
from manylora.kernels.cuda.blocks import BlockChooser, Blocks
from manylora.kernels.cuda.fp8 import FP8, quantise_rows
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.delta_rule import DeltaWeights
from manylora.kernels.mamba2 import Mamba2Weights
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.row_format import Encoding, RowFormat

SPILLED = 16  # tolerated bytes per thread
HIDDEN, WIDTHS = 4096, (4096, 1024, 1024)
TARGETS = [spec.LoraTarget(i, sum(WIDTHS[:i]), width) for i, width in enumerate(WIDTHS)]
LENGTHS = {1: (1,) * 32, 16: (8,) * 4, 64: (128, 128)}  # rows of each adapter, by tile size
GROUPS = ("adapters", "attention", "weights", "rows", "recurrent")
HEAD = "| case | block | registers | spilled | shared | blocks | loads | tensor cores | loop | barriers |"
INTRODUCTION = """# Machine code of the GPU kernels

`make gpu-static` compiles every kernel in the Triton language for {targets}, with every
choice of block sizes that the engine may time at startup, and reads the machine code that NVIDIA's
assembler makes of it. Nothing runs, so it needs no GPU and gives no times. This page was made with triton
{version}. Shapes are those of a Llama 3 8B; heads of 256 and 512 those of a Gemma 4, heads of 64 those of
a gpt-oss. Recurrent layers are those of a Granite 4, a Qwen 3.5 and an LFM2.

Each row is one case with one choice of block sizes. Where the GPUs differ, a cell has one value for each, in
the order above.

| column | meaning |
|---|---|
| block | size along the kernel's main dimension, warps, stages of loads in flight, parts of the sum |
| registers | per thread; an SM has 65,536 |
| spilled | bytes per thread in local memory; with more than 16, `make gpu-static` fails |
| shared | bytes of shared memory per thread block |
| blocks | thread blocks that fit on an SM at once |
| loads | instructions that load 128, 64, and 32 or fewer bits of global memory per thread |
| tensor cores | the instruction in the main loop |
| loop, barriers | instructions in the main loop, and barriers among them |"""


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one case, one choice of block sizes and one compute capability."""

    capability: int
    kernel: str
    case: str
    blocks: Blocks | None
    warps: int
    code: MachineCode | None = None
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kernel, self.case, str(self.blocks or f"{self.warps} warps")

    @property
    def cells(self) -> list[str]:
        if self.code is None:
            return [self.error.splitlines()[0], *[""] * 7]
        code = self.code
        narrow = sum(count for bits, count in code.loads.items() if bits <= 32)
        loads = f"{code.loads.get(128, 0)}, {code.loads.get(64, 0)}, {narrow}"
        numbers = (code.registers, code.spilled, code.shared, code.blocks)
        return [*map(str, numbers), loads, code.tensor_cores, str(code.instructions), str(code.barriers)]


class Collector:
    """Replaces launches: collects each launch as a kernel to compile, with the current case."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.case = ""
        self.wanted: dict[tuple[str, str, Blocks | None], tuple[Any, tuple, dict]] = {}

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        blocks = Every.now if "num_stages" in constants else None  # other kernels have no choice
        self.wanted[kernel.__name__, self.case, blocks] = kernel, arguments, constants

    def compile(self) -> Iterator[Compiled]:
        return (self._one(*key, *launch) for key, launch in self.wanted.items())

    def _one(
        self, name: str, case: str, blocks: Blocks | None, kernel: Any, arguments: tuple, constants: dict
    ) -> Compiled:
        warps = constants.get("num_warps", 4)
        try:
            made = JIT_RUN(kernel, *arguments, grid=(1,), warmup=True, **constants)
            code = read_code(made.asm["cubin"], UNITS[self.capability], made.metadata.shared, warps)
        except Exception as error:  # any error of the compiler becomes a row of the table
            return Compiled(
                self.capability, name, case, blocks, warps, error=f"{type(error).__name__}: {error}"
            )
        return Compiled(self.capability, name, case, blocks, warps, code)


class Every(BlockChooser):
    """Launches every candidate, and returns the last one for the caller to launch."""

    now: Blocks | None = None

    def choose(self, shape: str, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
        for blocks in candidates:
            Every.now = blocks
            launch(blocks)
        return candidates[-1]


JIT_RUN = JITFunction.run


def collect(capability: int, groups: Sequence[str] = GROUPS, part: str = "") -> Collector:
    """Collects the launches of the groups' kernels. capability: compute capability times 10; a process may
    use only one, because triton caches compiled kernels. part: only cases whose name contains this."""

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
    return collector


def _compile(task: tuple[int, str, str]) -> list[Compiled]:
    capability, group, part = task
    return list(collect(capability, (group,), part).compile())


def _cases(groups: Sequence[str], capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    made = {
        "adapters": _adapters, "attention": _attention, "weights": _weights, "rows": _rows,
        "recurrent": _recurrent,
    }  # fmt: skip
    for group in groups:
        yield from made[group](capability)


def _ops(dtype: torch.dtype, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> CudaOps:
    ops = CudaOps(chooser=Every())
    limits = spec.BatchLimits(1, 256, 131072, 32, heads, kv_heads, dim, dtype, num_experts=8)
    ops.reserve(limits, torch.device("cpu"))
    return ops


def _batch(lengths: Sequence[int], keys: int = 1024) -> spec.AttentionBatch:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    table = torch.zeros(len(lengths), -(-keys // 32), dtype=torch.int32)
    return spec.AttentionBatch(
        starts, [keys] * len(lengths), table, torch.zeros(starts[-1], dtype=torch.int64)
    )


def _adapters(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, size, rank, encoding, mixed, shared in _kinds_of_adapters():
        attention = _batch(LENGTHS[size])
        own = rank // 2 if mixed else rank
        row = spec.LoraRow(0, RowFormat(own, encoding=encoding, shared=shared), vectors=0 if shared else -1)
        row = replace(row, more=(row,) * mixed)
        spans = zip(attention.query_starts, attention.query_starts[1:], strict=False)
        segments = tuple(spec.LoraSegment(*span, {(0, t.module_id): row for t in TARGETS}) for span in spans)
        ops = _ops(dtype)
        _, lora = ops.plan(attention, spec.LoraBatch(torch.zeros(64, dtype=dtype), segments, 16))
        x = torch.zeros(sum(LENGTHS[size]), HIDDEN, dtype=dtype)
        y = torch.zeros(sum(LENGTHS[size]), sum(WIDTHS), dtype=dtype)
        name = f"{_name(dtype)}, tile {size}, rank {rank}{', 8-bit' * encoding}"
        name += ", shared" * shared + ", mix" * mixed
        yield name, lambda o=ops, y=y, x=x, b=lora: o.lora_add(y, x, b, 0, TARGETS)  # type: ignore[misc]


def _kinds_of_adapters() -> Iterator[tuple[torch.dtype, int, int, Encoding, bool, bool]]:
    """Dtype, rows of a tile, rank, encoding, whether two adapters are mixed, and whether the matrices are
    shared with other adapters. Tiles of one row use the same kernel for all ranks. In larger tiles, ranks
    above 16 use larger blocks."""
    for dtype, mixed in product((torch.bfloat16, torch.float32), (False, True)):
        for encoding, shared in ((Encoding.PLAIN, False), (Encoding.PLAIN, True), (Encoding.FLOAT8, False)):
            yield dtype, 1, 32 if mixed else 16, encoding, mixed, shared
            for size in (16, 64):
                yield dtype, size, 64, encoding, mixed, shared
                if dtype == torch.bfloat16 and encoding == Encoding.PLAIN and not mixed and not shared:
                    yield dtype, size, 16, encoding, mixed, shared


def _attention(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, (heads, kv_heads, dim), special in _kinds_of_heads():
        for label, lengths in (("decoding", (1,) * 32), ("prompts", (512,))):
            ops = _ops(dtype, heads, kv_heads, dim)
            planned, _ = ops.plan(_batch(lengths), None)
            q = torch.zeros(sum(lengths), heads, dim, dtype=dtype)
            narrow = special.startswith("8-bit cache")
            cache = torch.zeros(4, 32, kv_heads, dim, dtype=FP8 if narrow else dtype)
            params = spec.AttentionParams(0.1, 512, 30.0) if narrow else spec.AttentionParams(0.1)
            if special == "sinks":
                params = replace(params, sinks=torch.zeros(heads))
            name = ", ".join(filter(None, (_name(dtype), label, f"heads of {dim}", special)))
            yield name, lambda o=ops, q=q, c=cache, b=planned, p=params: o.attention(q, c, c, b, p)  # type: ignore[misc]


def _kinds_of_heads() -> Iterator[tuple[torch.dtype, tuple[int, int, int], str]]:
    """Dtype; heads, key heads and head size; special features of the case."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((32, 8, 128), (16, 8, 256), (16, 2, 512)):
            yield dtype, shape, ""
            yield dtype, shape, "8-bit cache, window, cap"
    yield torch.bfloat16, (64, 8, 64), "sinks"


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
    yield "bf16", lambda: ops.clamped_swiglu(x, 1.7, 7.0)
    yield "8 experts", lambda: ops.pair_up(torch.zeros(32, 2, dtype=torch.int64), 8, None)
    yield "bf16", lambda: ops.rotate_and_store(q, k, k, (angle, angle), cache, cache, attention)
    yield "8-bit cache", lambda: ops.rotate_and_store(q, k, k, None, cache.to(FP8), cache.to(FP8), attention)
    yield "bf16", lambda: quantise_rows(x)


def _recurrent(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The layers of a Granite 4, a Qwen 3.5 and an LFM2. Prompts use the same kernels as decoding."""
    ops, dtype = _ops(torch.bfloat16), torch.bfloat16
    places = StateBatch(*(torch.zeros(n, dtype=torch.int64) for n in (3, 2, 2, 2, 2)))
    x, heads = torch.zeros(2, 24576, dtype=dtype), torch.zeros(48)
    taps, state = torch.zeros(4, 3328), RecurrentState(torch.zeros(2, 3, 3328), torch.zeros(2, 48, 64, 128))
    mamba = Mamba2Weights(taps, taps[0], heads, heads, heads, torch.zeros(3072), 1e-5, 1, 64, 128)
    yield "Mamba-2", lambda: ops.mamba2(x, mamba, state, places)
    wide, large = torch.zeros(4, 8192), RecurrentState(torch.zeros(2, 3, 8192), torch.zeros(2, 32, 128, 128))
    delta = DeltaWeights(wide, heads[:32], heads[:32], torch.zeros(128), 1e-6, 16, 128)
    yield "delta rule", lambda: ops.delta_rule(x[:, :12288], x[:, 12288:12352], delta, large, places)
    short = RecurrentState(torch.zeros(2, 2, 2048), heads)
    yield "short convolution", lambda: ops.short_conv(x[:, :6144], torch.zeros(3, 2048), short, places)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "float32"}[dtype]


def faults(rows: Sequence[Compiled]) -> list[str]:
    """Faults that no kernel may have: compile errors, spills, too much shared memory."""
    found = []
    for row in rows:
        what = f"sm_{row.capability} {', '.join(row.key)}"
        if row.code is None:
            found.append(f"{what}: {row.error}")
        elif row.code.spilled > SPILLED:
            found.append(f"{what}: spills {row.code.spilled} bytes")
        elif row.code.shared > UNITS[row.capability].most_shared:
            found.append(f"{what}: {row.code.shared} bytes of shared memory")
    return found


def page(rows: Sequence[Compiled], capabilities: Sequence[int]) -> str:
    """Markdown with one table per kernel. A cell has one value, or one per GPU where they differ."""
    tables: dict[str, dict[tuple[str, str, str], dict[int, list[str]]]] = {}
    for row in rows:
        tables.setdefault(row.kernel, {}).setdefault(row.key, {})[row.capability] = row.cells
    lines = [
        INTRODUCTION.format(version=triton.__version__, targets=" / ".join(f"sm_{c}" for c in capabilities))
    ]
    for kernel in sorted(tables):
        lines += ["", f"## `{kernel}`", "", HEAD, "|---" * HEAD.count(" |") + "|"]
        for (_, case, blocks), found in tables[kernel].items():
            columns = zip(*(found.get(c, ["–"] * 8) for c in capabilities), strict=True)
            cells = (" / ".join(cell) if len(set(cell)) > 1 else cell[0] for cell in columns)
            lines.append(f"| {case} | {blocks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=lambda text: [int(n) for n in text.split(",")], default=[80, 90, 100])
    parser.add_argument("--only", type=lambda text: text.split(","), default=GROUPS, help=", ".join(GROUPS))
    parser.add_argument("--case", default="", help="only cases with this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tasks = [(capability, group, given.case) for group in given.only for capability in given.arch]
    with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as processes:
        rows = [row for some in processes.imap(_compile, tasks, chunksize=1) for row in some]
    text = page(rows, given.arch)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    wrong = faults(rows)
    print("\n".join(wrong) or "no spills", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

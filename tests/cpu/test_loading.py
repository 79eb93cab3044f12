"""Protects an adapter's values on their way in: compiled or not they are the same, checked and in place, with
the digest that others take. An adapter with a known layout is not judged again, and what is wrong with it is
still told; one that comes back from unchanged files goes straight into its pages, and one whose file changed
meanwhile is nobody's answer and nobody else's loss. And copies on disk:
what comes back is what went in, or nothing; within the bound.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from adapter_cases import edited
from blake3 import blake3
from levels import PARAMS, open_library
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, reference_generate

from manylora.adapters.cache import pool
from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.catalog import files
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.formats.peft_folder import read_peft_whole
from manylora.adapters.formats.read_options import KnownLayouts, ReadOptions
from manylora.adapters.geometry import CacheGeometry, Layout, Placement
from manylora.adapters.modules import lora_modules
from manylora.adapters.number_types import BFLOAT16, narrow_to_bfloat16, widen_bfloat16
from manylora.adapters.tensors import Adapter, AdapterRow, FileAdapter, adapter_from_rows
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError
from manylora.kernels import loading, native
from manylora.kernels.loading import FILE_ROW
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraExtra, LoraInput, Request, SamplingConfig

UNTOUCHED = 0xAB
SCALES = (1.0, 0.3, -2.0)
Result = TypeVar("Result")


class RowFile:
    """Random rows in one file, B of each before its A.

    path:    of the file. content: its bytes.
    table:   [rows] of FILE_ROW, whose targets lie in this object's memory.
    numbers: of each row, as `lay_out` has put A and the scaled B together; float32.
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, int, int]],
        source: str,
        target: str,
        lay_out: Callable[[np.ndarray, np.ndarray], np.ndarray],
        gap: int = 12,
    ) -> None:
        """shapes: rank, inputs, outputs of each row. source, target: "float32" or "bfloat16", in the file and
        in memory. gap: bytes between two rows in memory."""
        self.path, self.content, self.numbers = path, b"head", list[np.ndarray]()
        self._size = {"float32": 4, "bfloat16": 2}[source]
        stored = narrow_to_bfloat16 if source == "bfloat16" else np.asarray
        rows, self._expected, end = [], list[tuple[int, np.ndarray]](), 8
        for number, (rank, inputs, outputs) in enumerate(shapes):
            rng, scale = np.random.default_rng(number), SCALES[number % len(SCALES)]
            a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, inputs), (outputs, rank)))
            if source == "bfloat16":
                a, b = (widen_bfloat16(narrow_to_bfloat16(values)) for values in (a, b))
            self.numbers.append(lay_out(a, b * np.float32(scale)))
            made = narrow_to_bfloat16(self.numbers[-1]) if target == "bfloat16" else self.numbers[-1]
            b_at, a_at = len(self.content), len(self.content) + self._size * b.size
            self.content += stored(b).tobytes() + stored(a).tobytes()
            rows.append((a_at, b_at, end, rank, inputs, outputs, scale))
            self._expected.append((end, made))
            end += made.nbytes + gap
        self._memory = np.full(end + 4096, UNTOUCHED, np.uint8)
        self.table = np.array(rows, FILE_ROW)
        self.table["target"] += self._memory.ctypes.data

    def read(self, with_descriptor: Callable[[int], Result], content: bytes | None = None) -> Result:
        """What a function makes of the open file. content: other bytes than the file's own."""
        self.path.write_bytes(self.content if content is None else content)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return with_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def check_memory(self) -> None:
        """Assert that the rows are in it, and nothing else is. After this they are no longer."""
        for start, made in self._expected:
            place = self._memory[start : start + made.nbytes]
            assert place.tobytes() == made.tobytes()
            place[:] = UNTOUCHED
        assert (self._memory == UNTOUCHED).all(), "something was written beside the rows"

    def broken(self, every: int = 1) -> Iterator[bytes]:
        """Contents that are to be refused: with a NaN or an infinity at the first or the last place of a
        matrix, in every so many rows; and one that was cut short."""
        first_of_a, last_of_b = self.table["a"][::every], self.table["a"][every // 2 :: every] - self._size
        for place in (*first_of_a, self.table["b"][-1], *last_of_b):
            for value in (np.nan, np.inf):
                changed = bytearray(self.content)
                changed[place : place + self._size] = np.array([value], np.float32).tobytes()[-self._size :]
                yield bytes(changed)
        yield self.content[:-1]


needs_kernels = pytest.mark.skipif(native.load() is None, reason="needs the compiled kernels")


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", seed=1)


@pytest.fixture(scope="module")
def adapters(model: Path, workshop: Path) -> list[Path]:
    """The last two have the same layout."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [
        make_adapter(workshop / f"made{seed}", model, seed, rank, modules, use_rslora=seed > 1)
        for seed, rank in ((1, 8), (2, 5), (3, 8), (4, 8))
    ]


@pytest.fixture
def options(model: Path) -> ReadOptions:
    modules = lora_modules(read_model_config(model), ())
    return ReadOptions(modules, digest=True, layouts=KnownLayouts())


# experts, rank, in, out, and how many values behind them
ROW_SHAPES = [
    (1, 16, 64, 128, 0), (1, 16, 30, 77, 77), (3, 8, 33, 65, 0), (2, 40, 50, 129, 0), (1, 1, 5, 3, 3),
    (1, 64, 300, 272, 272), (4, 17, 16, 15, 60),
]  # fmt: skip


@pytest.fixture(params=["numpy", *PARAMS])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = None if request.param == "numpy" else open_library(request.param)
    monkeypatch.setattr(native, "loaded", lambda: library)


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 20003])
def test_values_are_scaled_and_checked(way: None, size: int) -> None:
    values = numbers(size)
    for scale in (1.0, 0.3, -2.0):
        kept = values.copy()
        assert loading.widen(kept, kept, np.float32(scale))
        np.testing.assert_array_equal(kept, values * np.float32(scale))
    for bad, at in product((np.inf, -np.inf, np.nan), {0, size // 2, size - 1}):
        broken = values.copy()
        broken[at] = bad
        assert not loading.widen(broken, broken, np.float32(1))
        broken.setflags(write=False)
        assert not loading.all_finite(broken) and not loading.all_finite(broken[::-1])
        assert not loading.all_finite(broken.astype(np.float16))
        assert not loading.widen(np.empty_like(broken), broken, np.float32(0.5))
    assert loading.all_finite(values) and loading.all_finite(values.astype(np.float16))
    assert loading.widen(values, values, np.float32(0)) and not values.any()
    large = np.full(size, 3e38, np.float32)
    assert loading.widen(large, large, np.float32(1)), "it is within float32's range"
    assert not loading.widen(large, large, np.float32(2))


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", ["float32", "bfloat16", "float16"])
def test_pages_hold_the_same_bits_either_way(way: None, sent: str, pages: torch.dtype) -> None:
    """Every type of a request's tensors into every type of pages, as torch converts them."""
    made = {"float32": np.float32, "float16": np.float16}
    placements, rows, slot = [], [], 0
    for number, (experts, rank, into, out, more) in enumerate(ROW_SHAPES):
        sizes = experts * rank * into, experts * rank * out
        count = -(-(sum(sizes) + more) // 8)
        kind = RowFormat(rank, more > 0)
        placements.append(Placement(0, slot, sum(sizes) + more, *sizes, 1, number, kind, count, experts))
        slot += count
        values = numbers(sum(sizes) + more, number)
        payload = narrow_to_bfloat16(values) if sent == "bfloat16" else values.astype(made[sent])
        rows.append(AdapterRow(1, number, kind, payload))
    layout = Layout(tuple(placements), (slot,))
    geometry = CacheGeometry(page_width=8, slots_per_page=slot, min_total_slots=slot, widest=1)
    pool = AdapterPool(geometry, 2, 2, pages, torch.device("cpu"))
    pool._host.zero_()
    pool.write_host(Adapter("", tuple(rows)), layout, [1])
    assert not pool._host[0].any()
    for row, back in zip(rows, pool.read_host("", layout, [1]).rows, strict=True):
        wide = torch.from_numpy(
            widen_bfloat16(row.payload) if sent == "bfloat16" else row.payload.astype(np.float32)
        )
        kind = torch.float32 if pages == torch.float32 else torch.int16
        assert back.payload.tobytes() == wide.to(pages).view(kind).numpy().tobytes()


WEIGHTS = "adapter_model.safetensors"
# rank, in, out: many of them together, and some that are more than that alone
TAKEN_SHAPES = [
    (1, 1, 1), (1, 5, 3), (1, 100, 153), (1, 100, 154), (1, 127, 129), (2, 300, 200), (5, 333, 77),
    (16, 64, 128), (8, 768, 256), (16, 300, 783), *((1, n, n + 1) for n in range(600, 4000, 371)),
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_rows_are_taken_with_their_digests(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, threads: int
) -> None:
    monkeypatch.setattr(loading, "TOGETHER", 0)
    monkeypatch.setattr(loading, "IN_CACHE", 20_000)
    made = RowFile(tmp_path / "rows", TAKEN_SHAPES, source, target, lambda a, b: np.concatenate((a, b), None))

    def take(descriptor: int) -> list[bytes] | None:
        digest = lambda numbers: blake3(numbers).digest()  # noqa: E731
        return loading.take_rows(descriptor, made.table, target, source, threads, digest)

    digests = made.read(take)
    assert digests == [blake3(b"float32\0" + numbers.tobytes()).digest() for numbers in made.numbers]
    made.check_memory()
    assert all(made.read(take, content) is None for content in made.broken(every=7))
    assert made.read(take) is not None


def rows_of(folder: Path, options: ReadOptions) -> list[AdapterRow]:
    content = read_peft_whole(folder, options)
    assert not content.extras
    return content.rows


@needs_kernels
@pytest.mark.parametrize("target", ["q_proj", "v_proj"])
def test_what_is_wrong_with_one_of_them_is_told(
    options: ReadOptions, adapters: list[Path], tmp_path: Path, target: str
) -> None:
    rows_of(adapters[2], options)
    shutil.copytree(adapters[3], tmp_path / "bad")
    file = tmp_path / "bad" / WEIGHTS
    values = load_file(file)
    key = next(name for name in values if target in name and "lora_B" in name)
    values[key][-1, -1] = float("nan")
    save_file(values, file, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=f"{key}.*holds a NaN"):
        rows_of(tmp_path / "bad", options)


@needs_kernels
def test_those_that_differ_are_judged(options: ReadOptions, adapters: list[Path], tmp_path: Path) -> None:
    """Another scaling, a tensor of another name or type, a longer file; but not the order of a set."""
    first = rows_of(adapters[2], options)
    folder = shutil.copytree(adapters[2], tmp_path / "other")
    file, config = folder / WEIGHTS, folder / "adapter_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"lora_alpha": 1}), encoding="utf-8")
    other = rows_of(folder, options)
    assert all(one.content != two.content for one, two in zip(first, other, strict=True))
    config.write_text(json.dumps(settings | {"use_unheard_of": 1}), encoding="utf-8")
    with pytest.raises(AdapterInvalidError, match="use_unheard_of"):
        rows_of(tmp_path / "other", options)
    names = settings["target_modules"][::-1]
    config.write_text(json.dumps(settings | {"target_modules": names}), encoding="utf-8")
    rows_of(tmp_path / "other", options)
    kept = file.read_bytes()
    file.write_bytes(kept + b"0000")
    with pytest.raises(AdapterInvalidError, match="bytes, by its header"):
        rows_of(tmp_path / "other", options)
    file.write_bytes(kept.replace(b"v_proj.lora_A", b"v_prox.lora_A", 1))
    with pytest.raises(AdapterInvalidError, match="v_prox"):
        rows_of(tmp_path / "other", options)
    save_file(
        {key: tensor.to(torch.float16) for key, tensor in load_file(adapters[2] / WEIGHTS).items()}, file
    )
    assert rows_of(tmp_path / "other", options)


@needs_kernels
def test_one_of_which_something_was_told_is_told_of_again(
    options: ReadOptions, adapters: list[Path], tmp_path: Path
) -> None:
    told: list[str] = []
    options = replace(options, tell=told.append)
    odd = edited(adapters[2], tmp_path / "odd", strange=1)
    for count in (1, 2):
        rows_of(odd, options)
        assert len(told) == count


# rank, in, out
FILE_ROWS = [
    (16, 64, 128),
    (16, 30, 77),
    (1, 5, 3),
    (5, 33, 100),
    (40, 48, 272),
    (64, 300, 15),
]
NEW = 8
PROMPT = tuple(range(10, 22))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_rows_of_a_file_lie_in_their_pages(
    compiled: Any, tmp_path: Path, source: str, target: str, threads: int
) -> None:
    assert loading.can_read(target, source)
    assert not loading.can_read("float16", source) and not loading.can_read(target, "float16")
    made = RowFile(
        tmp_path / "rows", FILE_ROWS, source, target, lambda a, b: np.concatenate((a, b.T), None), 10
    )

    def read(descriptor: int) -> bool:
        return loading.read_rows(descriptor, made.table, target, source, threads)

    assert made.read(read)
    made.check_memory()
    assert not any(made.read(read, content) for content in made.broken())
    assert made.read(read)


def known(folder: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """<folder>/1, <folder>/2, …: copies whose times are to be trusted soon."""
    monkeypatch.setattr(files, "SETTLED_NS", 5 * 10**7)
    for number, adapter in enumerate(adapters, 1):
        shutil.copytree(adapter, folder / str(number))
    time.sleep(2 * files.SETTLED_NS / 1e9)


def open_engine(model: Path, folder: Path, adapters: int = 1) -> Engine:
    """With room for so many of the adapters."""
    page = 73728  # of one adapter of rank 8 with every module, and all that are smaller
    room = {"host_memory_bytes": adapters * page, "gpu_memory_bytes": adapters * page}
    lora = LoraCacheConfig(max_adapter_size=8, optimal_adapter_size=8, prefetch_dir=folder, **room)  # type: ignore[arg-type]
    config = EngineConfig(
        model, device="cpu", dtype="float32", max_seq_len=64, max_tokens_in_paged_kv_cache=1024, lora=lora
    )
    return Engine(config)


def run(engine: Engine) -> dict[int, tuple[list[int], Exception | None]]:
    found: dict[int, tuple[list[int], Exception | None]] = {}
    while engine.has_work:
        for handle, event in engine.step():
            assert event.last
            found[handle] = (list(event.token_ids), event.error)
    engine.check()
    return found


def ask(task_id: int | None) -> Request:
    lora = LoraInput(task_id) if task_id else None
    return Request(PROMPT, SamplingConfig(max_tokens=NEW), lora=lora)


@needs_kernels
def test_an_adapter_that_comes_back_answers_as_the_reference(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(tmp_path, adapters, monkeypatch)
    monkeypatch.setattr(pool, "PARALLEL_BYTES", 0)
    engine = open_engine(model, tmp_path)
    right = {i: reference_generate(model, path, list(PROMPT), NEW) for i, path in enumerate(adapters, 1)}
    assert len(set(map(tuple, right.values()))) == len(adapters)
    for task_id in (1, 2, 3, 4, 1, 2, 3, 4):
        prepared = engine.prepare(ask(task_id))
        assert isinstance(prepared.adapters[0], FileAdapter)
        handle = engine.submit(prepared)
        assert run(engine) == {handle: (right[task_id], None)}
    assert engine.stats().adapters.source_loads == 8
    engine.close()


@needs_kernels
def test_who_asked_for_a_file_that_changed_is_told_and_nobody_else(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(tmp_path, adapters[:3], monkeypatch)
    engine = open_engine(model, tmp_path, adapters=2)
    prepared = {task_id: engine.prepare(ask(task_id)) for task_id in (None, 1, 2)}
    shutil.copytree(adapters[3], tmp_path / "1", dirs_exist_ok=True)
    handles = {task_id: engine.submit(one) for task_id, one in prepared.items()}
    again = engine.submit(prepared[1])
    found = run(engine)
    told = "adapter 1 changed while it was loaded, please send the request again"
    assert [str(found[handle][1]) for handle in (handles[1], again)] == [told, told]
    for task_id, adapter in ((None, None), (2, adapters[1])):
        right = reference_generate(model, adapter, list(PROMPT), NEW)
        assert found[handles[task_id]] == (right, None)
    assert engine.stats().requests_failed == 2
    handle = engine.submit(engine.prepare(ask(1)))
    found = run(engine)
    assert found == {handle: (reference_generate(model, adapters[3], list(PROMPT), NEW), None)}
    engine.close()


COPY_BYTES = 8 * 4000


def stored_adapter(seed: int, kind: str = "float32") -> Adapter:
    values = np.random.default_rng(seed).normal(size=4000).astype(np.float32)
    payload = values.astype(np.float16).view(BFLOAT16) if kind == "bfloat16" else values
    payload = (values > 0).view("V1") if kind == "float8" else payload
    formats = [RowFormat(8), RowFormat(8, dora=True)]
    if kind == "float8":
        formats = [RowFormat(8, encoding=Encoding.FLOAT8, scale=scale) for scale in (0.3, 0.6)]
    rows = [AdapterRow(1, layer, formats[layer], payload[layer:]) for layer in (0, 1)]
    extras = [LoraExtra("embed.tokens", values[:20].reshape(10, 2), tuple(range(10)))]
    return adapter_from_rows(rows, extras=extras)


def path_of(folder: Path, one: Adapter) -> Path:
    return folder / f"{one.digest}.safetensors"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8"])
def test_a_copy_is_the_adapter(tmp_path: Path, kind: str) -> None:
    one, disk = stored_adapter(0, kind), DiskLevel(10 * COPY_BYTES, tmp_path)
    disk.put_soon(one)
    disk.close()
    found = DiskLevel(10 * COPY_BYTES, tmp_path).get(one.digest)
    assert found is not None and found.digest == one.digest
    for theirs, ours in zip(found.rows, one.rows, strict=True):
        assert theirs.payload.dtype == ours.payload.dtype
        assert theirs.payload.tobytes() == ours.payload.tobytes()
        assert theirs.format == ours.format
    np.testing.assert_array_equal(found.extras[0].values, one.extras[0].values)


def test_what_was_used_longest_ago_goes_and_nobody_elses_files(tmp_path: Path) -> None:
    most = 4 * COPY_BYTES
    one, other = DiskLevel(most, tmp_path), DiskLevel(most, tmp_path)  # as of two processes
    (tmp_path / "mine.safetensors").write_bytes(b"x" * most)
    adapters = [stored_adapter(seed) for seed in range(8)]
    for number, disk in enumerate((one, other, one)):
        disk.put(adapters[number])
        time.sleep(0.01)
    assert other.get(adapters[0].digest) is not None
    for late in adapters[3:]:
        time.sleep(0.01)
        one.put(late)
        assert one.get(adapters[0].digest) is not None
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * most
    assert other.get(adapters[1].digest) is None and other.get(adapters[7].digest) is not None
    assert (tmp_path / "mine.safetensors").exists()


def test_what_is_damaged_or_of_another_content_counts_as_absent(tmp_path: Path) -> None:
    disk, (one, two, three) = DiskLevel(99 * COPY_BYTES, tmp_path), map(stored_adapter, range(3))
    for each in (one, two):
        disk.put(each)
    content = path_of(tmp_path, one).read_bytes()
    path_of(tmp_path, three).write_bytes(content)
    path_of(tmp_path, one).write_bytes(content[:-100] + b"!" + content[-99:])
    os.truncate(path_of(tmp_path, two), 5000)
    for bad in (one, two, three):
        assert disk.get(bad.digest) is None
        assert not path_of(tmp_path, bad).exists()

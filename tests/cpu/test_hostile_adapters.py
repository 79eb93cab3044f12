"""Protects everybody else from one adapter: whatever its files claim or are, reading it ends at once with one
sentence, takes no memory to speak of, and opens nothing outside the folders that adapters lie in.

MANYLORA_LONG=1 reads 2,000 of them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_adapters import HIDDEN, WEIGHTS, entries_of, good, header, hostile, pair, settings
from tiny_models import make_model

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.catalog.files import find_adapters
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.formats import safe_files
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft.settings import Patterns
from manylora.adapters.formats.read_options import ReadOptions
from manylora.config.engine import LoraCacheConfig
from manylora.errors import AdapterError, AdapterInvalidError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

COUNT = 2000 if os.environ.get("MANYLORA_LONG") else 105
ROOM = 2**28  # bytes that a reader may take beside what the process has


def open_store(model_dir: Path, **options: object) -> AdapterStore:
    sizes = {"max_adapter_size": 8, "host_memory_bytes": 2**24, "gpu_memory_bytes": 2**24}
    cache = LoraCacheConfig(**sizes, **options)  # type: ignore[arg-type]
    base = BaseWeights(model_dir)
    return AdapterStore(read_model_config(model_dir), cache, torch.device("cpu"), torch.float32, 2**30, base)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture(scope="module")
def store(model_dir: Path) -> Iterator[AdapterStore]:
    store = open_store(model_dir)
    yield store
    store.close()


def attack(model_dir: Path, folder: Path, count: int) -> None:
    """In a process of its own: as engines here and servers before Triton read them, with little memory."""
    store = open_store(model_dir)
    reader = store.reader(store.modules)
    options = ReadOptions(store.modules, BaseWeights(model_dir), store._parts.options.bounds, float8=False)
    plain = AdapterReader(store.rules, options)
    for read in (reader.read, plain.read):
        read(good(folder / "good"))
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM, in_use + ROOM))
    for what, path in hostile(folder, count):
        for read in (reader.read, plain.read):
            began, reason = time.thread_time(), ""
            try:
                read(path)
            except AdapterError as error:
                reason = str(error)
            except BaseException as error:
                raise AssertionError(f"{what}: {error!r}") from error
            assert reason, f"{what} was taken"
            assert reason.isprintable() and len(reason) < 1100, f"{what}: {reason}"
            assert str(folder.parent) not in reason, f"{what}: {reason}"
            assert time.thread_time() - began < 2, f"{what} took {time.thread_time() - began:.1f} s"
    for read in (reader.read, plain.read):
        read(folder / "good")
    store.close()


def test_whatever_comes_in_is_refused_with_a_reason(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(model_dir), str(tmp_path), str(COUNT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("rows", [10**6, 1100])
def test_rows_of_a_request_are_counted_first(store: AdapterStore, rows: int) -> None:
    weights, config = np.zeros((1, rows, 0), np.float32), np.zeros((1, rows, 3), np.int32)
    config[0, :, 2] = 1
    with pytest.raises(
        AdapterInvalidError, match=rf"it has {rows} rows, an adapter of this model has at most"
    ):
        store.rules.check(LoraInput(1, weights, config))


def test_an_adapter_larger_than_the_cache_is_not_read(store: AdapterStore, tmp_path: Path) -> None:
    folder, numbers = good(tmp_path / "a"), 2 * 2 * 2 * HIDDEN
    options = store._parts.options

    def reader(elements: int) -> AdapterReader:
        bounds = replace(options.bounds, elements=elements)
        return AdapterReader(store.rules, replace(options, bounds=bounds))

    assert reader(numbers).read(folder)
    with pytest.raises(AdapterInvalidError, match=rf"{numbers} numbers, at most {numbers - 1} can be held"):
        reader(numbers - 1).read(folder)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = good(tmp_path / "a")
    plain = safe_files.OpenFile.read_into

    def cut(file: safe_files.OpenFile, start: int, target: object) -> None:
        plain(file, start, target)
        if file.name == WEIGHTS and start == 8:
            os.truncate(folder / WEIGHTS, 100)

    monkeypatch.setattr(safe_files.OpenFile, "read_into", cut)
    with pytest.raises(AdapterInvalidError, match="is not readable: it was cut short"):
        store.reader(store.modules).read(folder)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A root with a cache as Hugging Face's inside it, and links that lead out in every way."""
    root = tmp_path / "root"
    blobs = good(root / "models--one" / "blobs")
    snapshot = root / "models--one" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    outside = good(tmp_path / "outside" / "adapter")
    (root / "folder").symlink_to(outside)
    good(root / "weights")
    (root / "weights" / WEIGHTS).unlink()
    (root / "weights" / WEIGHTS).symlink_to(outside / WEIGHTS)
    (root / "away").symlink_to("/")
    (root / "back").symlink_to(root)
    (root / "round").symlink_to("round")
    (root / "long").symlink_to("x" * 4000)
    return root


def test_links_are_followed_within_the_roots_only(store: AdapterStore, linked: Path) -> None:
    inside, outside = linked / "models--one" / "snapshots" / "main", linked.parent / "outside"
    for roots in ([linked], [linked, outside]):
        files = store.reader(store.modules, roots)
        assert files.read(inside)
        for name in ("folder", "weights"):
            if outside in roots:
                assert files.read(linked / name)
            else:
                with pytest.raises(AdapterInvalidError, match=r"a link that leads out .* lora_allowed_path"):
                    files.read(linked / name)


def test_the_folder_watch_looks_at_no_other_folder_and_ends(linked: Path) -> None:
    found = find_adapters(linked, {}, [linked.resolve()])
    known = {"models--one/snapshots/main", "models--one/blobs", "folder", "weights"}
    assert known <= found.keys()
    assert not [name for name in found if name.startswith(("away/", "back/", "round", "long"))]


def test_the_catalog_names_what_leads_out(
    model_dir: Path, linked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for task_id, name in enumerate(("folder", "weights", "models--one/snapshots/main")):
        (linked / str(task_id)).symlink_to(linked / name)
    (linked / "7\nlora task 9 is fine").mkdir()
    store = open_store(model_dir, prefetch_dir=linked, catalog_dir=linked)
    assert [store.resident(task_id) for task_id in range(3)] == [False, False, True]
    assert (
        "lora task 0 is skipped: adapter_config.json is, or lies behind, a link that leads out" in caplog.text
    )
    assert "7\\nlora task 9 is fine is invalid" in caplog.text
    with pytest.raises(AdapterInvalidError, match="leads out"):
        store.prepare(store.library.resolve(LoraInput(None, name="folder")))
    store.close()
    store = open_store(model_dir, prefetch_dir=linked, allowed_paths=(linked.parent / "outside",))
    assert all(store.resident(task_id) for task_id in range(3))
    store.close()


def test_patterns_that_are_slow_to_match_end_within_their_time() -> None:
    patterns = Patterns("alpha_pattern", [f"[^x]*[^x]*[^x]*x{n}" for n in range(64)])
    began = time.process_time()
    with pytest.raises(AdapterInvalidError, match="alpha_pattern takes too long to compare"):
        for layer in range(1000):
            patterns.first(".".join("a" * 50) + f".{layer:05}")
    assert time.process_time() - began < 20


def test_a_header_is_read_in_slices(store: AdapterStore, tmp_path: Path) -> None:
    """As long ones of many experts are."""
    settings(tmp_path)
    shapes = {key: one for layer in range(900) for key, one in pair(2, layer).items()}
    entries, size = entries_of(shapes)
    header(tmp_path / WEIGHTS, json.dumps(entries, separators=(", ", " : ")).encode(), size)
    with pytest.raises(AdapterInvalidError, match=r"got \d+, the model has 2$"):
        store.reader(store.modules).read(tmp_path)


if __name__ == "__main__":
    attack(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

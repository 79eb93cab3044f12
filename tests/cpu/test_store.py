"""Protects the adapters' bytes on their way between request, host and device, whoever waits for whom."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny_models import make_model
from waiting import wait_for

from manylora.adapters import staging, tensors
from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.cache.store import AdapterLease, AdapterStore
from manylora.adapters.catalog import files, reader
from manylora.adapters.formats.npy import write_npy
from manylora.adapters.formats.peft import rows as peft_rows
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import AdapterNotCachedError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput

HIDDEN, RANK, LAYERS = 64, 8, 2
CONFIG = np.array([[[1, layer, RANK, 0] for layer in range(LAYERS)]], np.int32)
ROW = RANK * 2 * HIDDEN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(make_model(tmp_path_factory.mktemp("store") / "model"))


def adapter(task_id: int, seed: int | None = None) -> LoraInput:
    values = np.random.default_rng(task_id if seed is None else seed).normal(size=(1, LAYERS, ROW))
    return LoraInput(task_id, values.astype(np.float32), CONFIG)


def open_store(
    model: ModelConfig, host: int, device: int, dtype: torch.dtype = torch.float32, **options: object
):
    """A store with room for so many of `adapter`'s on each level: one page each."""
    slot_bytes = dtype.itemsize * (HIDDEN + HIDDEN // 2)  # k and v have half the heads
    page_bytes = slot_bytes * RANK * LAYERS * (2 + 1 + 1)  # q takes two slots
    cache = LoraCacheConfig(
        max_adapter_size=RANK,
        host_memory_bytes=host * page_bytes,
        gpu_memory_bytes=device * page_bytes,
        target_modules=("attn_q",),
        **options,  # type: ignore[arg-type]
    )
    store = AdapterStore(model, cache, torch.device("cpu"), dtype, 2**30)
    assert (store.stats().host_pages, store.stats().device_pages) == (host, device)
    return store


def on_device(store: AdapterStore, lease: AdapterLease) -> np.ndarray:
    """What a forward pass under this lease would read: [layers, row]."""
    batch = store.batch([(0, 1, lease)])
    assert batch is not None
    rows = batch.segments[0].rows
    stored = [batch.pool[rows[layer, 1].offset :][:ROW].float().numpy() for layer in range(LAYERS)]
    half = RANK * HIDDEN
    return np.stack([np.concatenate((r[:half], r[half:].reshape(RANK, HIDDEN).T.ravel())) for r in stored])


def written(store: AdapterStore) -> None:
    """Wait for the writes to the host: an adapter that is still written is in hand, and not read again."""
    store._transfers._writer.submit(lambda: None).result()


def check_content(store: AdapterStore, lease: AdapterLease, seed: int) -> None:
    """A pass under this lease reads the adapter of this seed; then the lease ends."""
    assert store.admit(lease)
    np.testing.assert_array_equal(on_device(store, lease), adapter(seed).weights[0])  # type: ignore[index]
    store.release(lease)
    written(store)


def take(store: AdapterStore, lora: LoraInput) -> AdapterLease:
    return store.acquire(lora, store.prepare(lora))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_waits_never_holds_the_host_against_who_could_run(model: ModelConfig, dtype: torch.dtype) -> None:
    store = open_store(model, 2, 2, dtype)
    leases = {task_id: take(store, adapter(task_id)) for task_id in range(5)}
    store.check()
    # Only the last comers found the host full; they can run nevertheless, in any order.
    for task_id in (4, 2, 0, 1, 3):
        assert store.admit(leases[task_id])
        expected = torch.from_numpy(adapter(task_id).weights[0]).to(dtype).float().numpy()  # type: ignore[index]
        np.testing.assert_array_equal(on_device(store, leases[task_id]), expected)
        store.check()
        store.release(leases[task_id])
    store.check()
    assert store.stats().host_pinned == store.stats().device_pinned == 0


def test_random_leases_always_read_their_own_adapter(model: ModelConfig) -> None:
    picks = random.Random(5)
    store = open_store(model, 4, 3)
    leases: list[AdapterLease] = []
    for _ in range(3000):
        action = picks.random()
        if action < 0.35 and len(leases) < 12:
            task_id = picks.randrange(9)
            known = store.resident(task_id) and picks.random() < 0.5
            leases.append(take(store, LoraInput(task_id) if known else adapter(task_id)))
        elif leases and action < 0.7:
            lease = picks.choice(leases)
            if lease.admitted or store.admit(lease):
                np.testing.assert_array_equal(on_device(store, lease), adapter(lease.task_id).weights[0])  # type: ignore[index]
        elif leases and action < 0.8:
            store.suspend(picks.choice(leases))
        elif leases:
            lease = leases.pop(picks.randrange(len(leases)))
            store.release(lease)
            store.release(lease)
        store.check()
        admitted = {lease.digest for lease in leases if lease.admitted}
        assert store.stats().device_pinned == len(admitted)
        if not admitted and leases:
            assert store.admit(leases[0]), "nothing runs, and the first in the queue is refused"


def test_a_prefetched_adapter_comes_back_by_itself_and_another_does_not(
    model: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for task_id in (1, 2, 3):
        lora = adapter(task_id)
        write_npy(tmp_path / str(task_id), lora.weights, lora.config)  # type: ignore[arg-type]
    write_npy(tmp_path / "007", adapter(7).weights, CONFIG)  # type: ignore[arg-type]
    write_npy(tmp_path / "7", adapter(8).weights, CONFIG)  # type: ignore[arg-type]
    (tmp_path / "spanish").mkdir()
    (tmp_path / "9").mkdir()
    store = open_store(model, 2, 2, prefetch_dir=tmp_path)
    assert "lora task name spanish is invalid" in caplog.text
    assert "lora task 9 is skipped: folder 9 holds neither" in caplog.text
    assert "lora task 007 is skipped: another folder has id 7" in caplog.text
    same = LoraInput(50, adapter(1).weights, CONFIG)
    store.release(take(store, same))
    for task_id in (2, 3, 7, 1, 50, 2):
        check_content(store, take(store, LoraInput(task_id)), {7: 8, 50: 1}.get(task_id, task_id))
    assert store.stats().source_loads >= 4
    store.release(take(store, adapter(60)))
    for task_id in (1, 2, 3):
        store.release(take(store, LoraInput(task_id)))
    written(store)
    with pytest.raises(AdapterNotCachedError, match="not found in cache"):
        store.prepare(LoraInput(60))
    # A folder that broke since is as if it had come over the wire; one that changed serves its new content.
    (tmp_path / "1" / "model.lora_weights.npy").write_bytes(b"not an array")
    write_npy(tmp_path / "2", adapter(22).weights, CONFIG)  # type: ignore[arg-type]
    for task_id in (70, 71):
        store.release(take(store, adapter(task_id)))
    written(store)
    with pytest.raises(AdapterNotCachedError, match="Please send LoRA weights with request"):
        store.prepare(LoraInput(1))
    assert "lora task 1 cannot be read again" in caplog.text
    check_content(store, take(store, LoraInput(2)), 22)
    none = tmp_path / "none"
    assert open_store(model, 2, 2, prefetch_dir=none).stats().host_adapters == 0
    assert f"lora_prefetch_dir {none} cannot be read" in caplog.text


def test_an_evicted_adapter_is_found_on_disk_by_its_id(model: ModelConfig, tmp_path: Path) -> None:
    store = open_store(model, 1, 1, disk_cache_dir=tmp_path)
    for task_id in range(3):
        store.release(take(store, adapter(task_id)))
    wait_for(lambda: len(list(tmp_path.glob("*.safetensors"))) == 3)
    for task_id in (1, 0, 2, 0):
        check_content(store, take(store, LoraInput(task_id)), task_id)
    for file in tmp_path.iterdir():  # what is damaged counts as absent, and is written again
        os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(AdapterNotCachedError, match="Please send LoRA weights with request"):
        store.prepare(LoraInput(2))
    for task_id in (2, 1):
        check_content(store, take(store, adapter(task_id)), task_id)
    wait_for(lambda: len(list(tmp_path.glob("*.safetensors"))) == 3)
    check_content(store, take(store, LoraInput(2)), 2)
    with pytest.raises(AdapterNotCachedError):  # another process has the copies, but requests tell ids
        open_store(model, 1, 1, disk_cache_dir=tmp_path).prepare(LoraInput(2))


def test_an_adapter_is_written_beside_the_steps_of_the_others(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its last byte is written it is left out of steps; what changes pages meanwhile gets its own."""
    store, go_on = open_store(model, 2, 2), threading.Event()
    early = take(store, adapter(1))
    assert store.admit(early)
    np.testing.assert_array_equal(on_device(store, early), adapter(1).weights[0])
    real = AdapterPool.write_host

    def slow(*what: object) -> None:
        assert go_on.wait(60)
        real(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterPool, "write_host", slow)
    late = take(store, adapter(2))
    assert store.admit(late)
    assert not store.is_loaded(late) and store.is_loaded(early)
    np.testing.assert_array_equal(on_device(store, early), adapter(1).weights[0])
    store.release(late)  # its client left; its pages go to another while they are still to be written
    third = take(store, adapter(3))
    assert store.admit(third) and not store.is_loaded(third)
    store.check()
    go_on.set()
    np.testing.assert_array_equal(on_device(store, third), adapter(3).weights[0])
    assert store.is_loaded(third)
    np.testing.assert_array_equal(on_device(store, early), adapter(1).weights[0])


def write_peft(folder: Path, seed: int, kind: type = np.float32) -> None:
    rng = np.random.default_rng(seed)
    made = {}
    for layer in range(LAYERS):
        path = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        made[f"{path}A.weight"] = rng.normal(size=(RANK, HIDDEN)).astype(kind)
        made[f"{path}B.weight"] = rng.normal(size=(HIDDEN, RANK)).astype(kind)
    folder.mkdir(exist_ok=True)
    save_file(made, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_a_changed_folder_is_read_again_though_its_size_and_time_are_as_before(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged one is not digested again."""
    monkeypatch.setattr(files, "SETTLED_NS", 5 * 10**7)
    digested, plain = [], tensors._digest
    monkeypatch.setattr(tensors, "_digest", lambda *parts: digested.append(1) or plain(*parts))
    for number in (1, 2):
        write_peft(tmp_path / str(number), number)
    time.sleep(2 * files.SETTLED_NS / 1e9)
    store, digests = open_store(model, 1, 1, prefetch_dir=tmp_path), {}
    for task_id in (1, 2, 1, 2):
        lease = take(store, LoraInput(task_id))
        assert digests.setdefault(task_id, lease.digest) == lease.digest
        store.release(lease)
    assert len(digested) == 2
    store.release(take(store, LoraInput(1)))
    written(store)
    file = tmp_path / "2" / "adapter_model.safetensors"
    before = file.stat()
    write_peft(tmp_path / "2", 3)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert take(store, LoraInput(2)).digest != digests[2]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("large", [False, True])
def test_pages_of_bfloat16_hold_what_those_of_float32_hold_under_the_same_digest(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool, kind: type
) -> None:
    """Also when it is read again and when several threads read."""
    monkeypatch.setattr(files, "SETTLED_NS", 5 * 10**7)
    monkeypatch.setattr(peft_rows, "NARROWED", 0)
    if large:
        monkeypatch.setattr(peft_rows, "PARALLEL", 0)
        monkeypatch.setattr(peft_rows, "PARALLEL_ROWS", 0)
        monkeypatch.setattr(staging, "LEAST", 0)
    for name in ("1", "2"):
        write_peft(tmp_path / name, int(name), kind)
    time.sleep(2 * files.SETTLED_NS / 1e9)
    wide = open_store(model, 1, 1, prefetch_dir=tmp_path)
    narrow = open_store(model, 1, 1, torch.bfloat16, prefetch_dir=tmp_path)
    for task_id in (1, 2, 1, 2):
        one, other = take(wide, LoraInput(task_id)), take(narrow, LoraInput(task_id))
        assert one.digest == other.digest
        assert wide.admit(one) and narrow.admit(other)
        expected = torch.from_numpy(on_device(wide, one)).bfloat16().float().numpy()
        np.testing.assert_array_equal(on_device(narrow, other), expected)
        wide.release(one)
        narrow.release(other)


def test_a_folder_that_was_just_written_is_not_known_by_its_times(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next writing may fall into the same tick of the clock."""
    write_peft(tmp_path / "1", 1)
    write_peft(tmp_path / "2", 2)
    frozen = {path: files.fingerprint(path) for path in tmp_path.iterdir()}
    monkeypatch.setattr(reader, "fingerprint", frozen.get)
    store = open_store(model, 1, 1, prefetch_dir=tmp_path)
    before = take(store, LoraInput(1))
    store.release(before)
    store.release(take(store, LoraInput(2)))
    write_peft(tmp_path / "1", 3)
    written(store)
    assert take(store, LoraInput(1)).digest != before.digest


def test_an_adapter_that_changes_nothing_is_counted_and_logged(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    store, lora = open_store(model, 2, 2), adapter(7)
    take(store, lora)
    assert store.stats().inert_loads == 0
    assert lora.weights is not None
    take(store, LoraInput(8, np.zeros_like(lora.weights), CONFIG))
    assert store.stats().inert_loads == 1 and "lora task 8: it changes nothing" in caplog.text

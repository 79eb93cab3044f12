"""Protects the catalog's tables: many threads at once, ids that never come back, files that change."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from manylora.lora.library import library
from manylora.lora.library.library import MAX_IDS, PRUNE, AdapterLibrary


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterLibrary:
    made = AdapterLibrary(None)  # type: ignore[arg-type]
    made.open(tmp_path)
    return made


@pytest.fixture
def nervous():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("nervous")
def test_new_names_from_many_threads_while_names_are_looked_up(
    catalog: AdapterLibrary, tmp_path: Path
) -> None:
    names = [f"a{i}" for i in range(1500)]
    for name in names:
        (tmp_path / name).mkdir()
    first, ids, failures, done = catalog.id_of("a0", None), {}, [], threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                assert catalog.name_of(first) == "a0"
        except Exception as error:
            failures.append(error)

    def ask(part: int) -> None:
        for name in names[part::4] + names[: 100 * part]:
            ids.setdefault(name, set()).add(catalog.id_of(name, None))

    looking = [threading.Thread(target=look) for _ in range(2)]
    asking = [threading.Thread(target=ask, args=(part,)) for part in range(4)]
    for thread in looking + asking:
        thread.start()
    for thread in asking:
        thread.join()
    done.set()
    for thread in looking:
        thread.join()
    assert not failures
    assert len(set.union(*ids.values())) == len(names) == sum(map(len, ids.values()))
    assert all(catalog.name_of(min(ids[name])) == name for name in names)


def test_ids_without_number_for_one_adapter_are_forgotten_in_time(catalog: AdapterLibrary) -> None:
    most = 0
    for task_id in range(5 * MAX_IDS):
        catalog.bind(task_id, "same", lambda digest: True)
        most = max(most, len(catalog.bound()) if task_id % 1000 == 0 else 0)
    assert most <= MAX_IDS + PRUNE
    assert catalog.digest(5 * MAX_IDS - 1) == "same"
    assert catalog.digest(0) is None


def test_ids_whose_adapters_are_gone_go_first(catalog: AdapterLibrary) -> None:
    catalog.bind(2**63, "kept", lambda digest: True)
    for task_id in range(3 * PRUNE):
        catalog.bind(task_id, f"gone {task_id}", lambda digest: digest == "kept")
    assert len(catalog.bound()) <= PRUNE + 2
    assert catalog.digest(2**63) == "kept"


def test_a_name_whose_files_were_replaced_is_read_again(
    catalog: AdapterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "REFRESH_S", 0.0)
    folder = tmp_path / "a"
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "adapter_model.safetensors").write_text(version)
    (tmp_path / "one").rename(folder)
    number = catalog.id_of("a", None)
    catalog.bind(number, "first", lambda digest: True)
    assert catalog.id_of("a", None) == number
    assert catalog.digest(number) == "first"
    folder.rename(tmp_path / "old")
    assert catalog.id_of("a", None) == number
    assert catalog.digest(number) == "first"  # served while there are no files
    (tmp_path / "two").rename(folder)
    assert catalog.id_of("a", None) == number
    assert catalog.digest(number) is None

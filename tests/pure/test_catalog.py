"""Protects the catalog's tables: ids that never come back, files that change; names: they mean the same for
everybody and are found again after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manylora.adapters.catalog import files
from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.entry import CatalogError, Terms
from manylora.adapters.catalog.files import AdapterFolders, find_adapters, fingerprint
from manylora.adapters.catalog.library import MAX_IDS, PRUNE, AdapterLibrary
from manylora.adapters.catalog.names import LATEST, is_name, name_problem
from manylora.adapters.catalog.uploads import sent_file
from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.schema import AdapterFields
from manylora.doors.http.serving.inference import choose_adapter
from manylora.doors.http.serving.keys import ApiKey

BASES, PATHS = ("m", "m:x", "org/m"), ("models/m", "m.gguf")
PIECES = [*BASES, *PATHS, "a", "b", "x", "+", ":", ":", "/", ".", "@2", "..", LATEST, "c" * 90]


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterLibrary:
    return AdapterLibrary(None, folders=AdapterFolders(catalog=tmp_path))  # type: ignore[arg-type]


def test_ids_that_never_come_back_are_forgotten_in_time(catalog: AdapterLibrary) -> None:
    """Those whose adapters are gone go first, then the oldest of those that any number of ids mean."""
    catalog.bind(2**63, "kept", lambda digest: True)
    for task_id in range(3 * PRUNE):
        catalog.bind(task_id, f"gone {task_id}", lambda digest: digest == "kept")
    assert len(catalog.bound()) <= PRUNE + 2 and catalog.digest(2**63) == "kept"
    for task_id in range(3 * MAX_IDS):
        catalog.bind(task_id, "same", lambda digest: True)
    assert len(catalog.bound()) <= MAX_IDS + PRUNE
    assert (catalog.digest(3 * MAX_IDS - 1), catalog.digest(0)) == ("same", None)


def test_a_name_whose_files_were_replaced_is_read_again(
    catalog: AdapterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.0)
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


def names(picks: random.Random, count: int) -> list[str]:
    return ["".join(picks.choices(PIECES, k=picks.randint(1, 8))) for _ in range(count)]


def meanings(served: AdapterCatalog, keys: list[ApiKey], model: str) -> set[Any]:
    """What `model` can mean: the adapters with their scales, for the keys that may use them all."""

    def found(key: ApiKey) -> Any:
        def known(name: str) -> bool:
            exists = served.has(name) or name in served.aliases
            return exists and key.may_see(name, served.owner_of(name))

        choice = choose_adapter(AdapterFields(model=model), (*BASES, *PATHS), known, str)
        members = choice.adapters
        return (
            tuple((served.aliases.resolve(n), s) for n, s in members)
            if all(known(n) for n, _ in members)
            else None
        )

    meant = set()
    for key in keys:
        try:
            meant.add(found(key))
        except ApiError:
            meant.add(None)
    return meant - {None}


@pytest.mark.parametrize("seed", range(2))
def test_a_name_means_the_same_for_every_key_whatever_others_load(tmp_path: Path, seed: int) -> None:
    """A key that loaded `m:a` answered for those who asked the adapter `a` of the model `m`."""
    picks = random.Random(seed)
    reader: Any = SimpleNamespace(within=lambda roots: None)
    served = AdapterCatalog(reader, None, bases=BASES, paths=PATHS, aliases={"b": "a", "x": "m"})  # type: ignore[arg-type]
    served.put("a", tmp_path, Terms())
    keys = [ApiKey("one"), ApiKey("two"), ApiKey("some", ("a*", "m*")), ApiKey("admin", admin=True)]
    asked = ["m:a", "a+x", "m:a+a", f"a{LATEST}", "org/m:b", "m:x", *PATHS, *names(picks, 2000)]
    before = {model: meanings(served, keys, model) for model in asked}
    loaded = 0
    for name in [*asked, *names(picks, 2000)]:
        try:
            served.check_new(name, replace=False)
        except CatalogError:
            with pytest.raises(CatalogError):
                served.load_alias(name, "a", replace=False)
        else:
            served.put(name, tmp_path, Terms(owner=picks.choice(["one", "two"]), public=picks.random() < 0.5))
            loaded += 1
    assert loaded > 100
    for model in asked:
        after = meanings(served, keys, model)
        assert len(after) <= 1 and (not before[model] or after == before[model]), model


def test_what_an_upload_may_be_called_is_what_a_scan_finds(tmp_path: Path) -> None:
    odd = [".a", ".incoming/x", "x/.y", "a/.b/c", "a.", "a/b", "a/b/c/d/e/f", "a/b/c/d/e/f/g", "-", "a:b"]
    given = {name for name in [*odd, *names(random.Random(4), 3000)] if is_name(name)}
    for name in given:
        path = sent_file(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    known = {sent_file(tmp_path, name): fingerprint(sent_file(tmp_path, name)) for name in given}
    found = find_adapters(tmp_path, known, (), (*BASES, *PATHS), True)
    assert set(found) == {name for name in given if not name_problem(name, (*BASES, *PATHS))}
    assert {"a.", "a/b", "a/b/c/d/e/f", "-", "a:b"} <= set(found) and len(found) < len(given)

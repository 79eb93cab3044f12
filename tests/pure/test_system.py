"""Protects what the package asks of the operating system: threads that wait briefly or step back, the limits
of a container; and disks: a temporary folder goes with its process, however that ends, and nobody else's
ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manylora.system import resources
from manylora.system.folders import make_temporary, remove_temporary
from manylora.system.lifeline import OwnClock
from manylora.system.resources import UNLIMITED, available_memory, usable_processors
from manylora.system.threads import NICE, lower_priority


@pytest.mark.parametrize("said", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_spin_briefly_unless_the_environment_says_otherwise(said: dict[str, str]) -> None:
    told = {
        name: text for name, text in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = "import manylora, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run([sys.executable, "-c", shown], env=told | said, capture_output=True, text=True)
    assert found.stdout == ("None\n" if said else "1000\n"), found.stderr


def test_a_gap_counts_only_as_a_look_may_take() -> None:
    times = iter([100.0, 100.5, 102.0, 702.0, 702.25])
    clock = OwnClock(2.0, lambda: next(times))
    assert [clock.read() for _ in range(4)] == [0.5, 2.0, 4.0, 4.25]


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_that_steps_back_takes_its_own_threads_with_it_and_nobody_else() -> None:
    before = priority()
    with ThreadPoolExecutor(1, "back", lower_priority) as back, ThreadPoolExecutor(1) as beside:
        assert back.submit(priority).result() == max(before, NICE)
        with back.submit(ThreadPoolExecutor, 1).result() as own:
            assert back.submit(lambda: own.submit(priority).result()).result() == max(before, NICE)
        assert beside.submit(priority).result() == before
    assert priority() == before


GIB = 2**30


class Machine:
    """16 processors, and the files of its groups."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        monkeypatch.setattr(resources, "ROOT", path / "cgroup")
        monkeypatch.setattr(resources, "MEMBERSHIP", path / "membership")
        monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(16)), raising=False)

    def belongs(self, *lines: str) -> None:
        (self._path / "membership").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write(self, **files: object) -> None:
        """In one group; its folder is `at`."""
        folder = self._path / "cgroup" / str(files.pop("at", "."))
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n", encoding="utf-8")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_groups_without_limits_allow_all(machine: Machine) -> None:
    assert (usable_processors(), available_memory()) == (16, UNLIMITED)
    machine.belongs("0::/a")
    machine.write(at="a", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    assert (usable_processors(), available_memory()) == (16, UNLIMITED)
    machine.belongs("4:cpu,cpuacct:/b", "3:memory:/")
    machine.write(at="cpu/b", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert usable_processors() == 16


@pytest.mark.parametrize(("quota", "count"), [(400_000, 4), (150_000, 2), (20_000, 1), (9_900_000, 16)])
def test_a_quota_is_rounded_up_to_processors(machine: Machine, quota: int, count: int) -> None:
    machine.belongs("0::/")  # in a container
    machine.write(cpu__max=f"{quota} 100000")
    assert usable_processors() == count
    machine.write(cpu__max="max 100000")
    machine.belongs("4:cpu,cpuacct:/docker/1", "0::/")  # its own group is at the root here, too
    machine.write(at="cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert usable_processors() == count


def test_the_narrowest_of_all_levels_counts(machine: Machine) -> None:
    machine.belongs("0::/system.slice/our.service")
    machine.write(at="system.slice", cpu__max="300000 100000", memory__max=9 * GIB, memory__current=GIB)
    machine.write(
        at="system.slice/our.service", cpu__max="max 100000", memory__max=10 * GIB, memory__current=GIB
    )
    assert (usable_processors(), available_memory()) == (3, 8 * GIB)
    machine.belongs("0::/../elsewhere")  # a path out of what is mounted leads nowhere
    assert usable_processors() == 16


def test_what_was_read_of_files_is_free_again(machine: Machine) -> None:
    """Weights are read before the KV cache is sized, and what was read of their files stays in memory."""
    machine.belongs("0::/")
    machine.write(memory__max=4 * GIB, memory__current=4 * GIB, memory__stat=f"anon 9\ninactive_file {GIB}")
    assert available_memory() == GIB
    machine.belongs("5:memory:/a")
    machine.write(memory__max="max")
    machine.write(
        at="memory/a", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=4 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {2 * GIB}",
    )  # fmt: skip
    assert available_memory() == 2 * GIB


MAKES = """
from manylora.system.folders import make_temporary
print(make_temporary('test'), flush=True)
(made := make_temporary('test')).joinpath('file').touch()
print(made, flush=True)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def another(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKES + then], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("then", ["", "raise ValueError"])
def test_a_process_that_ends_leaves_nothing(base: Path, then: str) -> None:
    with another(then) as process:
        process.communicate(timeout=60)
    assert not list(base.iterdir())


def test_a_killed_process_leaves_what_the_next_one_removes(base: Path) -> None:
    with another("input()") as process:
        assert process.stdout is not None
        left = [Path(process.stdout.readline().strip()) for _ in range(2)]
        assert all(folder.is_dir() for folder in left)
        mine = make_temporary("other")
        assert sorted(base.iterdir()) == sorted([*left, mine]), "those of a living process stay"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert left[0].is_dir()
    remove_temporary(make_temporary("other"))
    assert list(base.iterdir()) == [mine]
    remove_temporary(mine)
    assert not list(base.iterdir())


def test_what_is_not_abandoned_by_this_user_stays(base: Path) -> None:
    user = os.getuid()
    kept = [base / name for name in (
        f"manylora-{user}-8000", "manylora-uploads-abcdefgh", f"manylora-{user + 1}-uploads-abcdefgh",
        f"manylora-{user}-uploads-abcdefghi",
    )]  # fmt: skip
    for folder in kept:
        folder.mkdir()
    target = base / "elsewhere"
    target.mkdir()
    link, file = base / f"manylora-{user}-uploads-bbbbbbbb", base / f"manylora-{user}-uploads-cccccccc"
    link.symlink_to(target)
    file.touch()
    kept += [target, link, file]
    if user == 0:
        foreign = base / f"manylora-{user}-uploads-dddddddd"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
        kept.append(foreign)
    (base / f"manylora-{user}-uploads-aaaaaaaa" / "deep").mkdir(parents=True)
    remove_temporary(make_temporary("test"))
    assert sorted(base.iterdir()) == sorted(kept)

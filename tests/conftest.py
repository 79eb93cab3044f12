"""Which tests run, in which order, and what is told of them. Nothing here imports torch: tests/pure runs
without it."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import durations
import pytest
import selection
from recorded import Replay

import manylora  # noqa: F401 before torch, whose threads then spin as briefly as those of a server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the commands that tests start inherit it

RECORD = Path(__file__).with_name("last_test_all.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("manylora")
    group.addoption("--all", action="store_true", help="every case: make test-all")
    group.addoption("--quick", action="store_true", help="tests/pure, and tests marked quick: make quick")
    group.addoption("--write-durations", action="store_true", help="write tests/durations.json")
    group.addoption("--record", action="store_true", help=f"write tests/{RECORD.name}")
    group.addoption("--record-replay", action="store_true", help="write tests/replay/records")
    group.addoption("--url", help="tests/conformance: the server, instead of ours")
    group.addoption("--hybrid-url", help="tests/conformance: the server of the model FOLDER/hybrid")
    group.addoption("--folder", type=Path, help="tests/conformance: its models, made where they are missing")
    group.addoption("--replay-bits", type=Path, help="folder to compare all bits with, or to write them to")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named on the command line runs with all its cases."""
    if config.option.all or any("::" in argument for argument in config.args):
        return
    kept = selection.select(items, config.option.quick)
    config.hook.pytest_deselected(items=list({*items} - {*kept}))
    items[:] = kept


@pytest.fixture(scope="module")
def replay(request: pytest.FixtureRequest) -> Iterator[Replay]:
    """The record of the door that the test's file is about, test_replay_DOOR.py."""
    door = request.path.stem.removeprefix("test_replay_")
    made = Replay(door, request.config.option.record_replay, request.config.option.replay_bits)
    yield made
    made.close()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return durations.ByDuration(config, log)


class Report:
    """Of the whole run, in the process that shows it: failures as they come, times, and the record."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._start = config, time.time()
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "call" or not report.passed:
            self._counts[report.outcome] += 1
        if report.failed:
            out = self._config.pluginmanager.get_plugin("terminalreporter")
            out.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", red=True)

    def pytest_sessionfinish(self) -> None:
        if self._config.option.write_durations:
            durations.write(self._seconds)
        if self._config.option.record:
            RECORD.write_text(json.dumps(self._record(), indent=1) + "\n", encoding="utf-8")

    def _record(self) -> dict[str, Any]:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        )
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processors = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._start)),
            "commit": commit.stdout.strip(),
            "machine": f"{len(processors)} × {processors[0] if processors else platform.machine()}",
            "seconds": round(time.time() - self._start),
            "counts": dict(sorted(self._counts.items())),
        }


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        config.pluginmanager.register(Report(config), "manylora-report")

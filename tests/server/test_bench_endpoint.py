"""Protects `manylora bench --endpoint`: a server gives the answers that the engine in this process gives,
with adapters that it has not seen before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servers import Running, World

from manylora import LoRARequest
from manylora.bench.datasets import BenchRequest, write_dataset
from manylora.cli import main


@pytest.mark.parametrize("streaming", [True, False])
def test_a_server_answers_as_the_engine_in_this_process(
    server: Running, world: World, tmp_path: Path, streaming: bool
) -> None:
    first = 7000 + 10 * streaming
    adapters = [LoRARequest(f"a{i}", first + i, str(world.adapters[i])) for i in (1, 2, 3)]
    requests = [
        BenchRequest(i, None if i % 2 else "Hi", (7, i + 1) if i % 2 else None, 6, [None, *adapters][i % 4])
        for i in range(12)
    ]
    write_dataset(tmp_path / "data", requests)
    base = ["bench", "--model", str(world.model), "throughput", "--dataset", str(tmp_path / "data")]
    found = {}
    for name, flags in (("here", ["--device", "cpu"]), ("there", ["--endpoint", f"localhost:{server.grpc}"])):
        files = ["--output_json", str(tmp_path / name), "--report_json", str(tmp_path / "report")]
        load = ["--concurrency", "4", *["--streaming"] * streaming]
        assert main([*base, *flags, *files, *load]) == 0
        found[name] = [answer["output_ids"] for answer in json.loads((tmp_path / name).read_text())]
    assert found["here"] == found["there"]
    report = json.loads((tmp_path / "report").read_text())
    assert (report["adapters"]["num_distinct"], report["adapters"]["num_requests"]) == (3, 9)
    assert sum(tier["num_requests"] for tier in report["adapters"]["tiers"].values()) == 12


def test_a_server_that_is_not_there_is_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "data", [BenchRequest(0, None, (1,), 1)])
    assert (
        main(["bench", "throughput", "--dataset", str(tmp_path / "data"), "--endpoint", "localhost:1"]) == 1
    )
    assert "--endpoint localhost:1 does not answer" in capsys.readouterr().err

"""Protects how ranks find each other: what torchrun and mpirun say, and that a rank which does not
belong to the others is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from manylora.config.engine import EngineConfig
from manylora.doors.triton.launcher.processes import free_port
from manylora.errors import ConfigError
from manylora.ranks.rank_info import RankInfo, ends_with_launcher, find_rank, started_rank
from manylora.ranks.rendezvous import check_identity, identity

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
SCRIPT = """
import sys
from manylora import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", max_batch_size=2) as llm:
    print(llm.generate("The", SamplingParams(max_tokens=8, temperature=0)).outputs[0].token_ids)
"""


def test_places_are_those_of_launchers() -> None:
    assert find_rank(2, {}) == RankInfo.alone(2)
    host = {"MASTER_ADDR": "host0"}
    assert find_rank(4, TORCHRUN | host | {"MASTER_PORT": "7"}) == RankInfo(3, 4, 1, 2, "host0", 7)
    assert find_rank(4, MPIRUN | host) == RankInfo(3, 4, 1, 2, "host0", 29500)
    assert find_rank(1, TORCHRUN) == RankInfo.alone(1), "each process has an engine of its own"
    assert (started_rank(TORCHRUN), started_rank({}), started_rank({"RANK": "0", "WORLD_SIZE": "1"})) == (
        3,
        0,
        0,
    )
    assert ends_with_launcher(MPIRUN) and not ends_with_launcher(TORCHRUN), "set by hand, nobody waits"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (TORCHRUN | {"MASTER_ADDR": "a", "WORLD_SIZE": "8"}, "torchrun has started 8 processes"),
        (MPIRUN, "ranks on several hosts need MASTER_ADDR"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host0"},
            "LOCAL_WORLD_SIZE is not: set it to the number of ranks on this host, and LOCAL_RANK to 0",
        ),
    ],
)
def test_places_that_cannot_be_are_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_rank(4, environment)


def test_a_rank_with_something_else_is_named(tmp_path: Path) -> None:
    config = EngineConfig(DEMO, tensor_parallel_size=2)
    expected = identity(config)
    check_identity(1, identity(replace(config, tokenizer_dir=Path("/elsewhere"))), expected)
    with pytest.raises(ConfigError, match="rank 1 was started with another max_batch_size than rank 0: 3,"):
        check_identity(1, identity(replace(config, max_batch_size=3)), expected)
    other = shutil.copytree(DEMO, tmp_path / "model")
    with (other / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match=r"another checkpoint than rank 0$"):
        check_identity(1, identity(replace(config, model_dir=other)), expected)


def test_two_processes_that_a_launcher_has_started_are_one_engine() -> None:
    """On two hosts: tests/server/test_ranks_on_hosts.py."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(DEMO)],
            env=os.environ | both | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        (answer, log), (nothing, _) = (process.communicate(timeout=100) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], log
    assert json.loads(answer) and not nothing

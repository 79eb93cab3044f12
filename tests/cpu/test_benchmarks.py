"""Protects what the CPU's benchmarks say: limits, files of figures, and a worker's answers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package

from limits import Limits  # noqa: E402
from peers.process import Worker  # noqa: E402
from peers.worker import Setup  # noqa: E402

DEMO = ROOT / "examples" / "demo"


def test_a_step_takes_the_larger_of_its_bytes_and_its_multiplications() -> None:
    model: Any = SimpleNamespace(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, intermediate_size=8,
        vocab_size=10,
    )  # fmt: skip
    weights, head = 4 * 4 * 4 + 3 * 4 * 8, 10 * 4
    slow_memory = Limits(model, "bfloat16", 4, 2, 1.0, 1e9)
    assert slow_memory.decode_step([5, 5], [7]) == 2 * (weights + head) + 4 * 2 * 4 * 10 + 2 * 7
    slow_units = Limits(model, "bfloat16", 4, 2, 1e9, 1.0)
    assert slow_units.decode_step([5, 5], [7], 14) == 2 * 2 * (weights + head) + 2 * 14 + 4 * 4 * 10
    prompt = slow_units.prefill(3)
    assert prompt == 2 * 3 * weights + 2 * head + 2 * 4 * 9
    # The first token of each comes with its prompt.
    step = slow_units.decode_step([3 + 2 / 2] * 2)
    assert slow_units.run([None, None], [], 3, 2, 2) == 2 * prompt + step


@pytest.mark.extended  # of the scripts that measure, nothing else starts one
def test_a_worker_answers_calls_and_requests_in_flight(tmp_path: Path) -> None:
    setup = Setup(
        str(DEMO / "base"), "int8", [str(DEMO / "adapters" / "chinese")], 8, 2, 1, 64, str(tmp_path)
    )
    script = ROOT / "benchmarks" / "peers" / "with_manylora.py"
    with Worker(sys.executable, script, setup, tmp_path / "log", 300) as worker:
        assert worker.versions["quant_algo for int8"] in ("W8A8", "W8A16")
        prompts = [[5, 6, 7], [8, 9, 10, 11]]
        answers, seconds = worker.run(prompts, [None, 0], 4)
        assert [len(answer) for answer in answers] == [4, 4]
        assert seconds > 0
        assert answers[0] != worker.run(prompts[:1], [0], 4)[0][0]
        memory = worker.resident()
        assert 0 < memory.own <= memory.all

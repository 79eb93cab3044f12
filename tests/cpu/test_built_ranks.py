"""Protects the ranks that `manylora build` records: `LLM` and `manylora serve` start them unasked, and answer
as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import ForkServer
from serving import DEMO, Running
from tiny_models import make_model

from manylora import LLM, LoRARequest, SamplingParams
from manylora.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTER, TEXT = DEMO / "adapters" / "chinese", "What is the capital of France?\nAnswer:"
PARAMS = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks that share each layer."""
    path = tmp_path_factory.mktemp("built") / "model"
    flags = ["--model_dir", str(DEMO / "base"), "--output_dir", str(path), "--max_seq_len", "128"]
    assert main(["build", *flags, "--tp_size", "2"]) == 0
    return path


@pytest.fixture(scope="module")
def expected(forked_ranks: ForkServer) -> list[str]:
    """Of the base and of the adapter, by one process."""
    return texts(forked_ranks, DEMO / "base", ranks=1)


def texts(forks: ForkServer, model: Path, ranks: int, **settings: int) -> list[str]:
    with LLM(model, device="cpu", dtype="float32", enable_lora=True, **settings) as llm:
        assert len(forks.running()) == ranks - 1
        adapters = [None, LoRARequest("chinese", 1, str(ADAPTER))]
        return [one.outputs[0].text for one in llm.generate([TEXT] * 2, PARAMS, adapters)]


def test_the_python_api_starts_them(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    assert expected[0] != expected[1]
    assert texts(forked_ranks, built, ranks=2) == expected
    assert not forked_ranks.running()


def test_others_that_are_asked_for_win(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    assert texts(forked_ranks, built, ranks=1, tensor_parallel_size=1) == expected


def test_the_server_starts_them(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    server = Running(model=built, dtype="float32", lora_root=(ADAPTER.parent,))
    try:
        assert len(forked_ranks.running()) == 1
        for name, text in zip(("demo", "chinese"), expected, strict=True):
            answer = server.post(model=name, prompt=TEXT, max_tokens=24, temperature=0)
            assert answer.json()["choices"][0]["text"] == text
    finally:
        server.close()
    assert not forked_ranks.running()


def test_a_build_for_ranks_that_cannot_share_the_model_says_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "granite4")
    assert main(["build", "--model_dir", str(model), "--output_dir", str(tmp_path / "out"), "--tp_size", "3"])
    assert "--tp_size must divide the model's 4 attention heads, got 3; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

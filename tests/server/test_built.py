"""Protects `manylora build` before a real server: what it writes is an `engine_dir`, with its limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launched import processes
from servers import World, fill_repo, new_server
from test_ranks import check_answers, follower
from test_server import PROMPT, ask, inputs, lora, new_ids
from tritonclient.utils import InferenceServerException

from manylora import LLM, LoRARequest, SamplingParams
from manylora.cli import main

NEW = 8


def test_a_built_directory_is_served(world: World, tmp_path: Path) -> None:
    built = tmp_path / "built"
    flags = ["--quant_algo", "W8A16", "--max_seq_len", "32", "--max_lora_rank", "16"]
    assert main(["build", "--model_dir", str(world.model), "--output_dir", str(built), *flags]) == 0
    with LLM(built, device="cpu") as llm:
        adapter = LoRARequest("a", 2, str(world.adapters[2]))
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=NEW, end_id=-1), adapter, False)
    running = new_server(fill_repo(tmp_path / "repo", built, lora_weights_data_type="TYPE_FP32"))
    started = running.launch()
    assert started.returncode == 0, started.stderr
    try:
        request = inputs(PROMPT, NEW, end_id=np.array([[-1]], np.int32), **lora(2, world))
        assert new_ids(ask(running, request))[-NEW:] == list(expected.outputs[0].token_ids)
        with pytest.raises(InferenceServerException, match=r"exceeds maximum input length \(31\)"):
            ask(running, inputs([5] * 33, 1))
    finally:
        assert running.launch("--stop").returncode == 0


def test_ranks_that_a_build_has_recorded_are_started(world: World, tmp_path: Path) -> None:
    """With no word of them to the launcher."""
    built = tmp_path / "built"
    flags = ["--max_seq_len", "64", "--max_lora_rank", "16", "--tp_size", "2"]
    assert main(["build", "--model_dir", str(world.model), "--output_dir", str(built), *flags]) == 0
    running = new_server(fill_repo(tmp_path / "repo", built, lora_weights_data_type="TYPE_FP32"))
    started = running.launch()
    assert started.returncode == 0, started.stderr
    try:
        assert follower(processes(running)["tensorrt_llm"])
        check_answers(running, world)
    finally:
        assert running.launch("--stop").returncode == 0

"""Protects `manylora build` before a real server: what it writes is an `engine_dir`, with its limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launched import processes
from servers import World, fill_repo, new_server
from test_ranks import follower
from test_server import PROMPT, ask, inputs, lora, new_ids
from tritonclient.utils import InferenceServerException

from manylora import LLM, LoRARequest, SamplingParams
from manylora.cli import main

NEW = 8


def test_a_built_directory_is_served(world: World, tmp_path: Path) -> None:
    """With the ranks that the build has recorded, and no word of them to the launcher. Answers are those of
    one rank."""
    flags = ["--quant_algo", "W8A16", "--max_seq_len", "32", "--max_lora_rank", "16"]
    built = {ranks: tmp_path / f"built-{ranks}" for ranks in ("1", "2")}
    for ranks, path in built.items():
        places = ["--model_dir", str(world.model), "--output_dir", str(path), "--tp_size", ranks]
        assert main(["build", *places, *flags]) == 0
    with LLM(built["1"], device="cpu") as llm:
        adapter = LoRARequest("a", 2, str(world.adapters[2]))
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=NEW, end_id=-1), adapter, False)
    running = new_server(fill_repo(tmp_path / "repo", built["2"], lora_weights_data_type="TYPE_FP32"))
    running.start()
    try:
        assert follower(processes(running)["tensorrt_llm"])
        request = inputs(PROMPT, NEW, end_id=np.array([[-1]], np.int32), **lora(2, world))
        assert new_ids(ask(running, request))[-NEW:] == list(expected.outputs[0].token_ids)
        with pytest.raises(InferenceServerException, match=r"exceeds maximum input length \(31\)"):
            ask(running, inputs([5] * 33, 1))
    finally:
        assert running.launch("--stop").returncode == 0

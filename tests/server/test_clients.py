"""Protects the client program: the seed's flow, tensors once, then the id alone; exit codes tell failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from servers import ROOT, Running, World
from tiny_models import reference_generate

from manylora.generation.tokenizer import Tokenizer


def end_to_end(server: Running, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "client/end_to_end_grpc_client.py", "-u", f"127.0.0.1:{server.grpc}"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)


def run(server: Running, world: World, *flags: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        ROOT / "client/inflight_batcher_llm_client.py",
        "-u",
        f"127.0.0.1:{server.grpc}",
    ]
    return subprocess.run(
        [*command, "--tokenizer-dir", world.model, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tensors_once_then_the_id_alone(server: Running, world: World, tmp_path: Path) -> None:
    text = "dummy"
    first = run(
        server, world, "--text", text, "--lora-path", str(world.converted / "2"), "--lora-task-id", "0"
    )
    assert first.returncode == 0, first.stdout
    prompt = Tokenizer(world.model).encode(text)
    expected = reference_generate(world.model, world.adapters[2], prompt, 10)
    if 257 in expected:
        expected = expected[: expected.index(257)]
    wanted = tmp_path / "expected.csv"
    wanted.write_text(",".join(map(str, expected)))
    flags = ["--text", text, "--lora-task-id", "0", "--request-output-len", "10"]
    for extra in ([], ["-S"]):
        answer = run(server, world, *flags, "--check-output", "--output-tokens-csv", str(wanted), *extra)
        assert answer.returncode == 0, answer.stdout
        assert f"Input sequence:  {prompt}" in answer.stdout
        assert f"Output sequence:  {prompt + expected}" in answer.stdout
        assert "PASS!" in answer.stdout
        assert ("Got completed request" in answer.stdout) == (not extra)


def test_errors_are_printed_and_end_with_status_1(server: Running, world: World) -> None:
    unknown = run(server, world, "--lora-task-id", "4711")
    assert unknown.returncode == 1
    assert "Encountered error: " in unknown.stdout
    assert "LoRA task 4711 not found in cache. Please send LoRA weights with request" in unknown.stdout
    assert run(server, world, "-u", "127.0.0.1:1").returncode == 1


def test_both_ways_of_stopping(server: Running, world: World) -> None:
    common = ["-S", "--request-output-len", "200", "--request-id", "halt", "--stop-after-ms", "20"]
    by_request = run(server, world, *common)
    assert by_request.returncode == 0, by_request.stdout
    by_cancel = run(server, world, *common, "--stop-via-request-cancel")
    assert by_cancel.returncode == 0, by_cancel.stdout


def test_text_in_and_text_out_whole_streamed_and_batched(server: Running, world: World) -> None:
    prompts = ["Hello", "美国"]
    tokenizer, wanted = Tokenizer(world.model), []
    for prompt in prompts:
        ids = reference_generate(world.model, world.adapters[4], tokenizer.encode(prompt), 9)
        wanted.append(tokenizer.decode(ids))
    flags = ["-p", json.dumps(prompts), "-o", "9", "--end-id", "-1", "--lora-task-id", "4"]
    flags += ["--check-outputs", "--expected-outputs", json.dumps(wanted)]
    for extra in (["--exclude-input-in-output"], ["-S"], ["--batch-inputs", "--exclude-input-in-output"]):
        answer = end_to_end(server, *flags, *extra)
        assert answer.returncode == 0, answer.stdout
    weights = ["--lora-path", str(world.converted / "3"), "--lora-task-id", "33"]
    assert end_to_end(server, "-p", "a", "-o", "2", *weights).returncode == 0
    refused = end_to_end(server, "-p", "a", "-b", "9")
    assert refused.returncode == 1
    assert "beam_width must be at most max_beam_width (4)" in refused.stdout


def test_drafts_prompt_tables_and_beams_from_files(server: Running, world: World, tmp_path: Path) -> None:
    prompt = [72, 101, 108, 108, 111]
    expected = reference_generate(world.model, None, prompt, 8)
    files = {"in": prompt, "draft": expected[:4], "out": expected}
    for name, ids in files.items():
        (tmp_path / f"{name}.csv").write_text(",".join(map(str, ids)))
    flags = ["--input-tokens-csv", tmp_path / "in.csv", "--output-tokens-csv", tmp_path / "out.csv"]
    flags = [*map(str, flags), "--request-output-len", "8", "--check-output"]
    draft = run(
        server, world, *flags, "--draft-tokens-csv", str(tmp_path / "draft.csv"), "--return-perf-metrics"
    )
    assert draft.returncode == 0, draft.stdout
    assert "total_accepted_draft_tokens: 4" in draft.stdout
    with safe_open(world.model / "model.safetensors", "np") as file:
        table = file.get_tensor("model.embed_tokens.weight")[[101]].astype(np.float16)
    np.save(tmp_path / "table.npy", table)
    (tmp_path / "in.csv").write_text("72,272,108,108,111")
    flags = [
        *flags,
        "--prompt-embedding-table-path",
        str(tmp_path / "table.npy"),
        "--exclude-input-in-output",
    ]
    virtual = run(server, world, *flags, "--prompt_table_extra_id", "7", "--vocab_size", "272")
    assert virtual.returncode == 0, virtual.stdout
    beams = run(server, world, "--text", "Hi", "-b", "3", "--return-log-probs", "--return-generation-logits")
    assert beams.returncode == 1
    assert "return_generation_logits needs beam_width 1" in beams.stdout
    beams = run(server, world, "--text", "Hi", "-b", "3", "--return-log-probs", "--return-context-logits")
    assert beams.returncode == 0, beams.stdout
    assert "Output beam 2:" in beams.stdout
    assert "context_logits.shape: (1, 3, 272)" in beams.stdout
    ahead = run(server, world, "--text", "Hi", "--lookahead_config", "7", "7", "7")
    assert ahead.returncode == 1
    assert "input lookahead_window_size is not supported" in ahead.stdout

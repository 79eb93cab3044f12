"""Protects `manylora bench` from end to end on the demo: the answers are the model's, every figure and file
is there, and what fails is said. And benchmarks/gpu.py runs with torch, triton and numpy alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manylora import LoRARequest
from manylora.cli import main
from manylora.doors.cli.prepare_dataset import BenchRequest, write_dataset

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
QUESTION = "Where is the capital of Japan? \\n答案:"
ADAPTERS = [
    None,
    *(LoRARequest(n, i, str(DEMO / "adapters" / n)) for i, n in enumerate(("chinese", "japanese"), 1)),
]
BASE = ["bench", "--model", "demo", "--model_path", str(DEMO / "base")]
PERFORMANCE = {
    "total_latency_ms", "avg_request_latency_ms", "request_throughput_req_s",
    "system_output_throughput_tok_s", "system_total_throughput_tok_s",
    "output_throughput_per_user_tok_s", "output_throughput_per_gpu_tok_s",
    "request_latency_percentiles_ms",
}  # fmt: skip


def write(path: Path, count: int, output_tokens: int = 8) -> Path:
    requests = [BenchRequest(i, QUESTION, None, output_tokens, ADAPTERS[i % 3]) for i in range(count)]
    write_dataset(path, requests)
    return path


def test_a_run_gives_the_models_answers_and_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data", 12), tmp_path / "out"
    out.mkdir()
    flags = f"--dataset {data} --concurrency 4 --streaming --no_skip_tokenizer_init --compare_base".split()
    flags += [f for n in ("report", "output", "request") for f in (f"--{n}_json", str(out / n))]
    (tmp_path / "options.yaml").write_text(
        "lora_config:\n  lora_target_modules: [attn_q, attn_k, attn_v]\n  max_lora_rank: 16\n  max_loras: 1\n"
        "  max_cpu_loras: 2\nmax_batch_size: 8\ndevice: cpu\n"
        "quant_config:\n  quant_algo: W8A16\n  kv_cache_quant_algo: FP8\n"
    )
    flags += ["--extra_llm_api_options", str(tmp_path / "options.yaml"), "--iteration-log", str(out / "log")]
    assert main([*BASE, "throughput", *flags]) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "report").read_text())
    assert set(report) == {
        "engine", "machine", "world_info", "request_info", "performance", "streaming_metrics",
        "decoding_stats", "dataset", "adapters",
    }  # fmt: skip
    assert set(report["performance"]) == PERFORMANCE
    assert set(report["performance"]["request_latency_percentiles_ms"]) == {
        "minimum", "maximum", "average", "p50", "p90", "p95", "p99",
    }  # fmt: skip
    assert (report["engine"]["quantization"], report["engine"]["kv_cache_dtype"]) == ("W8A16", "fp8")
    assert report["engine"]["dtype"] == "float32" and report["world_info"]["max_batch_size"] == 8
    assert report["request_info"]["num_requests"] == 12
    assert report["request_info"]["avg_output_length"] == 8
    assert 1 < report["request_info"]["avg_num_concurrent_requests"] <= 4
    throughput = report["performance"]["request_throughput_req_s"]
    assert re.search(rf"Request Throughput \(req/sec\): +{throughput:.4f}", printed)
    adapters = report["adapters"]
    assert (adapters["num_distinct"], adapters["num_requests"]) == (2, 8)
    assert set(adapters["tiers"]) >= {"base", "disk_cold"}
    assert sum(tier["num_requests"] for tier in adapters["tiers"].values()) == 12
    assert adapters["ratio"] > 0
    answers = json.loads((out / "output").read_text())
    for answer, expected in zip(answers, ["Tokyo", "东京", "東京"] * 4, strict=True):
        assert answer["output_text"].strip().startswith(expected) and len(answer["output_ids"]) == 8
    times = json.loads((out / "request").read_text())
    assert [entry["lora_name"] for entry in times[:3]] == [None, "chinese", "japanese"]
    assert all(0 < entry["ttft_ms"] < entry["latency_ms"] for entry in times)
    states = [json.loads(line) for line in (out / "log").read_text().splitlines()]
    assert states[-1]["requests_finished"] >= 12 and states[-1]["adapters"]["device_loads"] >= 2


def test_requests_that_fail_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = BenchRequest(0, QUESTION, None, 4)
    bad = BenchRequest(1, QUESTION, None, 4, LoRARequest("base", 3, str(DEMO / "base")))
    write_dataset(tmp_path / "data", [good, bad])
    flags = ["--dataset", str(tmp_path / "data"), "--device", "cpu"]
    assert main([*BASE, "throughput", *flags, "--report_json", str(tmp_path / "report")]) == 1
    assert "request 1: Failed to load LoRA adapter" in capsys.readouterr().err
    assert json.loads((tmp_path / "report").read_text())["request_info"]["num_failed"] == 1
    write_dataset(tmp_path / "data", [bad])
    assert main([*BASE, "throughput", *flags]) == 1
    assert "no request was answered: Failed to load" in capsys.readouterr().err


FOREIGN = ("safetensors", "tokenizers", "llguidance", "jinja2", "transformers", "peft", "pydantic", "tqdm")
SCRIPT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({FOREIGN!r}))  # as if they were not installed
sys.argv[0] = "benchmarks/gpu.py"
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.mark.extended
@pytest.mark.timeout(600)  # the machine may have much else to do
def test_the_benchmark_runs_without_any_other_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--device", "cpu", "--tiny", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    sections = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["sections"]
    assert "Skipped" not in sections, sections["Skipped"]
    assert [row["model"] for row in sections["Check"]] == ["tiny", "tiny experts", "tiny windows"]
    assert {"Decode step", "R_base", "Base-only tax", "Bandwidth"} <= sections.keys()
    few = sections["Throughput, rank 8, 7 modules, zipf"][1]
    assert few["on_the_device"] < few["adapters"] and few["loads"] > 0
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8").count("\n## ") == len(sections)
    assert "Targets" not in sections, "a CPU's figures get no verdict"

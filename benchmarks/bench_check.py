#!/usr/bin/env python3
"""Checks the throughput that `manylora bench throughput` reports against an independent measurement.

Runs the command in this process, measures the time from the first request to the last answer, and counts the
tokens in the answers that --output_json wrote. Prints both rates and their difference for each round. Exits
with status 1 if a difference is larger than 3 %.

    bench_check.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manylora.bench import system
from manylora.cli import main as manylora

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
LARGEST_GAP = 0.03


def write_dataset(path: Path, requests: int, tokens: int) -> None:
    lines = [
        {
            "task_id": number,
            "prompt": f"Where is the capital of country {number}? \\nAnswer:",
            "output_tokens": tokens,
        }
        for number in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def one_round(folder: Path, dataset: Path, model: Path) -> tuple[float, float]:
    """Tokens per second as reported, and as measured here."""
    spans: list[float] = []
    send = system._load

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = send(*arguments)
        spans.append(time.perf_counter() - start)
        return found

    system._load = timed
    try:
        report, answers = folder / "report.json", folder / "answers.json"
        flags = ["--dataset", str(dataset), "--report_json", str(report), "--output_json", str(answers)]
        code = manylora(["bench", "--model", str(model), "throughput", *flags])
    finally:
        system._load = send
    if code or len(spans) != 1:
        sys.exit(f"manylora bench ended with {code} after {len(spans)} runs")
    told = json.loads(report.read_text(encoding="utf-8"))["performance"]["system_output_throughput_tok_s"]
    outputs = json.loads(answers.read_text(encoding="utf-8"))
    return told, sum(len(answer["output_ids"]) for answer in outputs) / spans[0]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, default=DEMO / "base", help="directory (default: the demo's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    options = parser.parse_args()
    worst = 0.0
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "dataset.jsonl"
        write_dataset(dataset, options.requests, options.tokens)
        for _ in range(options.rounds):
            told, seen = one_round(Path(folder), dataset, options.model)
            worst = max(worst, abs(told / seen - 1))
            lines.append(
                f"reported {told:8.1f} tokens/s, measured {seen:8.1f}, {100 * (told / seen - 1):+.2f} %"
            )
    print("\n".join(lines))
    return 0 if worst <= LARGEST_GAP else 1


if __name__ == "__main__":
    sys.exit(main())

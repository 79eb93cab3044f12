#!/usr/bin/env python3
"""Measures n-gram drafting: tokens per second with and without drafts, for repetitive and for random answers.

Expected gain. A decode step of n sequences reads each weight once and does 2 n FLOPs for it. A draft of k
tokens adds k rows, which need FLOPs but no further bytes of weights. With few sequences a step is
memory-bound, so a row costs little, and each accepted token saves a step. With many sequences a row costs as
much as a token. The gain therefore falls with n. For unpredictable text the loss is the first drafts of each
request, after which drafting pauses.

    ngram.py                                  # small, float32, 1, 4 and 16 concurrent requests
    ngram.py --model small --dtype bfloat16 --at-once 1,8 --draft 5 --rounds 5 --json found.json

The models of loads.py have random weights, so sampling determines whether answers repeat:

    repeating  greedy, with only 8 allowed tokens: an answer soon repeats itself
    random     all tokens at temperature 1: an answer never repeats itself

Both engines are in one process, and each is idle while the other one runs. Figures are medians over the
rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from loads import prompts, save_model
from machine import see_machine

from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.model.checkpoint import read_model_config
from manylora.request import Request, SamplingConfig

WORDS = range(100, 108)
NEW = 128


def sampling(text: str, vocab: int, seed: int) -> SamplingConfig:
    if text == "random":
        return SamplingConfig(max_tokens=NEW, temperature=1.0, top_p=1.0, seed=seed)
    bias = np.full(vocab, -1000, np.float32)
    bias[list(WORDS)] = 0
    return SamplingConfig(max_tokens=NEW, logit_bias=bias)


def seconds(engine: Engine, requests: list[Request]) -> float:
    started = time.perf_counter()
    for request in requests:
        engine.submit(engine.prepare(request))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def measure(engines: dict[str, Engine], text: str, count: int, rounds: int, vocab: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["on"].stats()
    for number in range(rounds + 1):  # the first round only warms up
        made = [
            Request(tuple(ids), sampling(text, vocab, number * count + i))
            for i, ids in enumerate(prompts(count, 64, seed=number))
        ]
        for name, engine in engines.items():
            times[name].append(seconds(engine, made))
    after = engines["on"].stats()
    drafted = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
    speeds = {name: count * NEW / statistics.median(found[1:]) for name, found in times.items()}
    pairs = [off / on for off, on in zip(times["off"][1:], times["on"][1:], strict=True)]
    return {
        "text": text, "at_once": count, **speeds, "ratio": statistics.median(pairs),
        "drafted": drafted / ((rounds + 1) * count * NEW), "accepted": accepted / drafted if drafted else 0.0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--at-once", default="1,4,16")
    parser.add_argument("--draft", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = see_machine()
    print(machine)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", options.model, options.dtype)
        vocab = read_model_config(model).vocab_size
        shared = {"device": "cpu", "max_seq_len": 256, "max_batch_size": 16, "enable_kv_cache_reuse": False}
        engines = {
            name: Engine(EngineConfig(model, max_draft_len=length, **shared))
            for name, length in (("off", 0), ("on", options.draft))
        }
        found = []
        print("| text | at once | off, tok/s | on, tok/s | on / off | drafted per token | accepted |")
        print("|---|---|---|---|---|---|---|")
        for text in ("repeating", "random"):
            for count in map(int, options.at_once.split(",")):
                one = measure(engines, text, count, options.rounds, vocab)
                found.append(one)
                print(
                    f"| {text} | {count} | {one['off']:.0f} | {one['on']:.0f} | {one['ratio']:.2f} | "
                    f"{one['drafted']:.2f} | {one['accepted']:.2f} |",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

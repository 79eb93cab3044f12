#!/usr/bin/env python3
"""Measures the cost of replacing an adapter: the time from tensors in memory to the first token of the new
version, and throughput with and without a swap each second.

The model and the adapters are the demo's. Tensors are loaded with `LLM.load_adapter`. With --http, they are
sent with `PUT /v1/lora_adapters/NAME` over loopback to a server in a separate process. In the throughput test
all requests have `lora_version="follow"`, so that every swap affects all of them. Rounds with and without
swaps alternate, and the best round of each counts, because on a shared machine the median mostly reflects
other work.

    version_swaps.py --rounds 5 --seconds 4
    version_swaps.py --http
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "rl_loop")]
BASE, ADAPTERS = ROOT / "examples" / "demo" / "base", ROOT / "examples" / "demo" / "adapters"
LINE = "What is the capital of France?\nAnswer:"
NAMES = ("chinese", "japanese")
BATCH, LENGTH = 8, 64


def adapter(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = ADAPTERS / name
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def first_token_ms(swaps: int) -> list[float]:
    """Milliseconds from tensors to the first token, in this process."""
    from manylora import LLM, LoraConfig, LoRARequest, SamplingParams

    policy, params = LoRARequest("policy", 1, None), SamplingParams(max_tokens=1, temperature=0.0)
    found = []
    with LLM(BASE, lora_config=LoraConfig(), device="cpu") as llm:
        for number in range(swaps):
            given = adapter(NAMES[number % 2])
            begun = time.perf_counter()
            version = llm.load_adapter(policy, *given)
            output: Any = llm.generate(LINE, params, policy, use_tqdm=False)
            found.append(1000 * (time.perf_counter() - begun))
            assert output.outputs[0].lora_versions[0].version == version.number
    return found[1:]


def http_ms(swaps: int) -> list[float]:
    """Milliseconds from tensors to the complete answer of one token, over HTTP."""
    import train

    train.LENGTH, train.SAMPLES = 1, 1
    policy, found = train.OverHttp(), []
    try:
        for number in range(swaps):
            given = adapter(NAMES[number % 2])
            begun = time.perf_counter()
            version = policy.put(*given)
            [rollout] = policy.sample(LINE, seed=1)
            found.append(1000 * (time.perf_counter() - begun))
            assert rollout.versions == [version]
    finally:
        policy.close()
    return found[1:]


def throughput(seconds: float, rounds: int) -> dict[str, float]:
    """Tokens per second of BATCH concurrent requests that follow new versions, with and without swaps."""
    from manylora import LLM, LoraConfig, LoRARequest, SamplingParams

    policy = LoRARequest("policy", 1, None, lora_version="follow")
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    best = {"none": 0.0, "each second": 0.0}
    with LLM(BASE, lora_config=LoraConfig(), device="cpu", max_batch_size=BATCH) as llm:
        given = [adapter(name) for name in NAMES]
        llm.load_adapter(policy, *given[0])
        for turn in range(2 * rounds):
            swapping, ended, number = turn % 2 == 1, threading.Event(), turn

            def swap(ended: threading.Event = ended, number: int = number) -> None:
                while not ended.wait(1.0):
                    number += 1
                    llm.load_adapter(policy, *given[number % 2])

            thread = threading.Thread(target=swap)
            if swapping:
                thread.start()
            begun, made = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                outputs: Any = llm.generate([LINE] * BATCH, params, policy, use_tqdm=False)
                made += sum(one.outputs[0].length for one in outputs)
            name = "each second" if swapping else "none"
            best[name] = max(best[name], made / (time.perf_counter() - begun))
            ended.set()
            if swapping:
                thread.join()
        best["moved"] = llm.stats().adapters.sequence_swaps
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--http", action="store_true", help="measure the time to the first token over HTTP")
    parser.add_argument("--swaps", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    times = (http_ms if arguments.http else first_token_ms)(arguments.swaps)
    print(f"tensors to first token: best {min(times):.1f} ms, median {statistics.median(times):.1f} ms")
    if not arguments.http:
        found = throughput(arguments.seconds, arguments.rounds)
        print(
            f"tokens/s: {found['none']:.0f} without swaps, {found['each second']:.0f} with one a second; "
            f"{found['moved']:.0f} requests were moved"
        )


if __name__ == "__main__":
    main()

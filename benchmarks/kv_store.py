"""Time to the first token of a long prompt: computed, and from KV blocks on the device, in host memory, and
on disk after a restart. Rounds of all of them in turn; medians, and ratios to computing it, also of processor
time, which other work on the machine changes less.

    python benchmarks/kv_store.py MODEL --tokens 1500 --rounds 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from manylora import LLM, KvCacheConfig, SamplingParams

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for what, seconds in one_round(given.model, given.tokens, number, folder):
                times[what].append(seconds)
    for what, found in times.items():
        line = f"{what:8}"
        for index, name in enumerate(("", " of processor time")):
            pairs = [(one[index], whole[index]) for one, whole in zip(found, times["computed"], strict=True)]
            ratio = statistics.median(one / whole for one, whole in pairs)
            line += f"  {statistics.median(one for one, _ in pairs) * 1e3:7.1f} ms{name} ({ratio:.3f})"
        print(line)


def one_round(model: Path, count: int, seed: int, folder: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Seconds for each way, and seconds of processor time."""
    picks = random.Random(seed)

    def first_token(llm: LLM, prompt: list[int]) -> tuple[float, float]:
        started, used = time.perf_counter(), time.process_time()
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, temperature=0))
        return time.perf_counter() - started, time.process_time() - used

    def draw() -> list[int]:
        return [picks.randrange(1000, 40_000) for _ in range(count)]

    shared, room = draw(), count + 512  # so that another prompt evicts it
    on_disk = KvCacheConfig(disk_cache_path=folder, max_tokens=room)
    with LLM(model, kv_cache_config=KvCacheConfig(host_cache_size=GIB, max_tokens=room)) as llm:
        first_token(llm, draw())
        yield "computed", first_token(llm, shared)
        yield "device", first_token(llm, shared)
        first_token(llm, draw())
        yield "host", first_token(llm, shared)
    with LLM(model, kv_cache_config=on_disk) as llm:
        first_token(llm, shared)
    with LLM(model, kv_cache_config=on_disk) as llm:
        first_token(llm, draw()[:64])
        yield "disk", first_token(llm, shared)


if __name__ == "__main__":
    main()

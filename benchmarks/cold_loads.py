#!/usr/bin/env python3
"""Measures the time to first token of requests whose adapter was never used (OpenAI server).

Three kinds of requests take turns: without an adapter, with an adapter that was never used, and with the same
adapter again. A first use reads, checks, stores and copies the adapter, and otherwise computes the same.
Prompts have 64 tokens. The adapters have rank 8 on q, k, v, or rank 16 on all linear layers.

    cold_loads.py --first-use 10                # one request after the other, to an idle server
    cold_loads.py --first-use 10 --streams 16   # the same while 16 other requests are decoding

With --streams, also prints the longest time between two tokens of the other requests meanwhile.

The model is the 125M one in bfloat16. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loads import ALL, QKV, prompts, save_adapter, save_model

PORT = 8004
CACHE_BYTES = 2**28


@contextmanager
def served(model: Path, root: Path, work: Path) -> Iterator[None]:
    """A server that keeps no copies of adapters outside its cache."""
    config = work / "serve.yaml"
    # On a CPU the device level is a fraction of host memory, too. Make it as large as the host level.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = {"host_cache_size": CACHE_BYTES, "device_cache_percent": max(1e-4, CACHE_BYTES / total)}
    config.write_text(json.dumps({"peft_cache_config": sizes}), encoding="utf-8")
    command = [sys.executable, "-m", "manylora.doors.cli.serve", model, "--port", str(PORT)]
    command += ["--config", config, "--lora-root", root, "--lora-refresh-seconds", "3600"]
    command += ["--lora-keep-bytes", "1", "--lora-disk-bytes", "0", "--device", "cpu"]
    server = subprocess.Popen([*command, "--served-model-name", "model", "--log-level", "warning"])
    try:
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", PORT)).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


async def first_token(adapter: str, tokens: int, prompt: list[int], seen: list[float] | None = None) -> float:
    """Read a complete answer. Returns the seconds to its first text. seen: gets the time of each part."""
    body = json.dumps(
        {"model": adapter, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
         "ignore_eos": True, "logprobs": 0}
    ).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"data: ")
    found = time.perf_counter() - began
    while part := await reader.read(65536):
        answer += part
        if seen is not None:
            seen.append(time.perf_counter())
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"[DONE]" not in answer:
        raise RuntimeError(answer[:500].decode())
    return found


async def first_uses(names: list[str], streams: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds to the first token, and the longest gap in another stream meanwhile, by kind of request."""
    texts, found = prompts(3 * len(names) + streams, 64), dict[str, list[tuple[float, float]]]()
    for text in texts[:3]:
        await first_token("model", 2, text)
    seen: list[list[float]] = [[] for _ in range(streams)]
    others = [
        asyncio.create_task(first_token("model", 900, text, one))
        for text, one in zip(texts[3 * len(names) :], seen, strict=True)
    ]
    while any(len(one) < 3 for one in seen):
        await asyncio.sleep(0.05)
    asked = [(kind, name) for name in names for kind in ("none", "first use", "warm")]
    for (kind, name), text in zip(asked, texts, strict=False):
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        taken = await first_token("model" if kind == "none" else name, 1, text)
        await asyncio.sleep(0.1 if streams else 0)  # until delayed tokens of the other streams have arrived
        times = [[at for at in one if began - 0.2 < at < began + taken + 0.1] for one in seen]
        gaps = [later - at for one in times for at, later in itertools.pairwise(one) if later > began]
        found.setdefault(kind, []).append((taken, max(gaps, default=0.0)))
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return found


def measure_first_uses(options: argparse.Namespace, work: Path, model: Path) -> None:
    sets = {"rank 8 on q, k, v": (8, QKV), "rank 16 on all layers": (16, ALL)}
    names = {
        title: [f"r{rank}-{n}" for n in range(options.first_use + 1)] for title, (rank, _) in sets.items()
    }
    for title, (rank, modules) in sets.items():
        for seed, name in enumerate(names[title]):
            save_adapter(work / "adapters" / name, "small", rank, modules, seed, "bfloat16")
    with served(model, work / "adapters", work):
        for title, (one, *others) in names.items():
            asyncio.run(
                first_token(one, 2, prompts(1, 64)[0])
            )  # the first adapter of this kind also warms up the code
            found = asyncio.run(first_uses(others, options.streams))
            median = {
                kind: [1000 * statistics.median(part) for part in zip(*times, strict=True)]
                for kind, times in found.items()
            }
            pairs = zip(found["first use"], found["warm"], strict=True)
            beyond = [1000 * (first[0] - warm[0]) for first, warm in pairs]
            words = [f"{kind} {first:.1f} ms" for kind, (first, _) in median.items()]
            print(f"{title}: first token {', '.join(words)}")
            print(f"  first use minus warm {statistics.median(beyond):.1f} ms", flush=True)
            if options.streams:
                gaps = [f"{kind} {gap:.0f} ms" for kind, (_, gap) in median.items()]
                print(f"  longest gap in {options.streams} other streams: {', '.join(gaps)}", flush=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--first-use", type=int, default=10, metavar="N", help="adapters of each kind")
    parser.add_argument("--streams", type=int, default=0, help="other requests meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = save_model(work / "model", "small", "bfloat16")
        measure_first_uses(options, work, model)


if __name__ == "__main__":
    main()

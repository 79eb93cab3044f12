#!/usr/bin/env python3
"""Measures how cold loads affect the time to first token of requests with warm adapters (OpenAI server).

Warm requests arrive at equal intervals, for a few adapters that stay on the device. A second stream of
requests arrives at the same time. It alternates between two kinds within one run:

    calm  its adapters are warm, too
    cold  its adapters must be read from their files, checked, stored and copied every time, because there are
          more of them than the cache and the server's copies hold

Both kinds compute the same and differ only in the loading, so the ideal ratio of the warm requests' times is
1. Loading uses a CPU core, so the ideal can only be reached if a core is free.

    cold_loads.py --rounds 3
    cold_loads.py --first-use 10                # one request after the other, to an idle server
    cold_loads.py --first-use 10 --streams 16   # the same while 16 other requests are decoding

--first-use measures the time to first token of three kinds of requests in turn: without an adapter, with an
adapter that was never used, and with the same adapter again. Prompts have 64 tokens. The adapters have rank 8
on q, k, v, or rank 16 on all linear layers. With --streams, also prints the longest time between two tokens
of the other requests meanwhile.

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
TEXT = "Tell me about Japan. \nAnswer:"
WARM = [f"warm-{number}" for number in range(4)]
CALM = [f"calm-{number}" for number in range(2)]


@contextmanager
def served(model: Path, root: Path, work: Path, cache_bytes: int) -> Iterator[None]:
    """A server whose cache and in-memory copies cannot hold all adapters."""
    config = work / "serve.yaml"
    # On a CPU the device level is a fraction of host memory, too. Make it as large as the host level.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = {"host_cache_size": cache_bytes, "device_cache_percent": max(1e-4, cache_bytes / total)}
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


async def first_token(
    adapter: str, tokens: int, prompt: str | list[int] = TEXT, seen: list[float] | None = None
) -> float:
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


async def paced(names: list[str], per_second: float, seconds: float, tokens: int) -> list[float]:
    """Send requests in an open loop: the next request does not wait for the previous one."""
    began, tasks = time.perf_counter(), []
    for number in range(int(per_second * seconds)):
        await asyncio.sleep(max(0.0, began + number / per_second - time.perf_counter()))
        tasks.append(asyncio.create_task(first_token(names[number % len(names)], tokens)))
    return list(await asyncio.gather(*tasks))


async def together(beside: list[str], options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds to the first token of the warm requests, and of those beside them."""
    warm = paced(WARM, options.warm_per_second, options.seconds, options.tokens)
    others = paced(beside, options.cold_per_second, options.seconds, 1)
    times, beside_times = await asyncio.gather(warm, others)
    return times, beside_times


def measure_cold_loads(options: argparse.Namespace, work: Path, model: Path) -> None:
    cold = [f"cold-{number:03}" for number in range(options.adapters)]
    for seed, name in enumerate([*WARM, *CALM, *cold]):
        folder = save_adapter(work / "adapters" / name, "small", options.rank, ALL, seed, "bfloat16")
    size = (folder / "adapter_model.safetensors").stat().st_size
    # Room for the warm adapters and for a quarter of the cold ones.
    room = int(size * (len(WARM + CALM) + options.adapters / 4))
    found: dict[str, list[float]] = {"calm": [], "cold": []}
    ratios, first, turn = [], [], 0
    with served(model, work / "adapters", work, room):
        for name in WARM + CALM:
            asyncio.run(first_token(name, 2))
        for number in range(options.rounds):
            medians = {}
            for side in found:
                before = loads()
                times, others = asyncio.run(
                    together(CALM if side == "calm" else cold[turn:] + cold[:turn], options)
                )
                loaded = loads() - before
                if side == "cold":
                    turn = (turn + len(others)) % len(cold)
                    first += others
                    if loaded < 0.9 * len(others):
                        raise RuntimeError(f"only {loaded:.0f} of {len(others)} loads were cold")
                medians[side] = statistics.median(times)
                found[side] += times
                print(
                    f"round {number + 1}, {side}: P50 {1000 * medians[side]:.1f} ms, "
                    f"P95 {1000 * statistics.quantiles(times, n=20)[-1]:.1f} ms; {loaded:.0f} loads",
                    flush=True,
                )
            ratios.append(medians["cold"] / medians["calm"])
    p50 = {side: statistics.median(times) for side, times in found.items()}
    own = 1000 * statistics.median(first)
    print(f"adapters of {size / 2**20:.1f} MiB; time to first token of cold requests: P50 {own:.1f} ms")
    print(f"warm requests: {1000 * p50['calm']:.1f} ms calm, {1000 * p50['cold']:.1f} ms during cold loads")
    print(f"ratio {p50['cold'] / p50['calm']:.3f}; by round {', '.join(f'{one:.3f}' for one in ratios)}")


def loads() -> float:
    """Adapters that the server has put on the host level so far."""
    with socket.create_connection(("127.0.0.1", PORT)) as one:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: one.recv(65536), b"")).decode()
    name = 'manylora_lora_cache_loads_total{level="host"} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


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
    with served(model, work / "adapters", work, 2**28):
        for title, (one, *others) in names.items():
            asyncio.run(first_token(one, 2))  # the first adapter of this kind also warms up the code
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
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=40, help="number of cold adapters")
    parser.add_argument("--warm-per-second", type=float, default=4.0)
    parser.add_argument("--cold-per-second", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a warm request's answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each half of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--first-use", type=int, metavar="N", help="measure the first use of N adapters instead"
    )
    parser.add_argument("--streams", type=int, default=0, help="with --first-use: other requests meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = save_model(work / "model", "small", "bfloat16")
        (measure_first_uses if options.first_use else measure_cold_loads)(options, work, model)


if __name__ == "__main__":
    main()

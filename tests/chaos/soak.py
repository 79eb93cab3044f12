"""Many requests, a third of whose clients leave early; no process may grow with their number."""

from __future__ import annotations

import http.client
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from service import ANSWERS, Service, resident

AT_ONCE = 16
GROWTH = 1.10


def run(folder: Path, picks: random.Random, count: int) -> list[str]:
    """A fifteenth of the requests warm it up. Returns what went wrong."""
    service, wrong = Service(folder), []
    service.start()
    service.wait_until_right()
    seeds = [picks.getrandbits(32) for _ in range(count)]
    warm = max(count // 15, 200)
    before = sizes_after(service, seeds[:warm])
    after = sizes_after(service, seeds[warm:])
    for role, size in after.items():
        ratio = size / before.get(role, size)
        print(f"soak: {role}: {before.get(role, 0) / 2**20:.1f} -> {size / 2**20:.1f} MiB ({ratio:.2f})")
        if ratio > GROWTH:
            wrong.append(f"{role} grew to {ratio:.2f} times its memory after {warm} requests")
    if set(before) != set(after):
        wrong.append(f"the processes changed: {sorted(before)} and {sorted(after)}")
    service.wait_until_right()
    service.stop()
    return wrong


def sizes_after(service: Service, seeds: list[int]) -> dict[str, int]:
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        left = sum(pool.map(lambda seed: one(service, random.Random(seed)), seeds))
    print(f"soak: {len(seeds)} requests, {left} clients left, {time.monotonic() - began:.0f} s")
    time.sleep(5)  # what runs on after its client has left comes to its end
    return {
        role if not role.startswith("launcher") else "launchers": resident(pid)
        for role, pid in sorted(service.processes().items())
    }


def one(service: Service, picks: random.Random) -> bool:
    """Whether the client left."""
    leaves, pieces = picks.random() < 1 / 3, 0
    after = picks.randrange(1, 5)
    try:
        stream = service.stream(picks.choice(list(ANSWERS)), picks.randrange(8, 64))
        for _ in stream:
            pieces += 1
            if leaves and pieces == after:
                stream.close()  # type: ignore[attr-defined]
                return True
    except (OSError, ValueError, http.client.HTTPException):
        pass
    return False

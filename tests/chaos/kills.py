"""Random processes are killed at random moments; every time the service must come back by itself."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from statistics import median

from neighbour import clients
from service import Service

STREAMS = 8


def run(folder: Path, picks: random.Random, count: int) -> list[str]:
    """Kill `count` times; returns what went wrong."""
    service, wrong, times = Service(folder), [], []
    service.start()
    service.wait_until_right()
    with clients(STREAMS, service.stream) as watched:
        for number in range(count):
            victims = choose(service, picks)
            for pid in victims.values():
                kill(pid)
            if picks.random() < 0.3:  # the next one comes while this one is mended
                time.sleep(picks.uniform(0, 3))
                continue
            try:
                times.append(service.wait_until_right())
            except TimeoutError as error:
                wrong.append(f"kill {number} ({', '.join(victims)}): {error}")
                break
            time.sleep(picks.uniform(0, 1))
        if not wrong:
            times.append(service.wait_until_right())
    if watched.outcomes["silent"]:
        wrong.append(f"{watched.outcomes['silent']} streams heard nothing of it")
    wrong += watched.wrong
    service.stop()
    time.sleep(1)
    wrong += [f"left behind: {one}" for one in service.leftovers()]
    print(
        f"kills: {count}; right again after {median(times):.1f} s (median), {max(times):.1f} s (worst); "
        f"streams: {watched.outcomes}"
    )
    return wrong


def choose(service: Service, picks: random.Random) -> dict[str, int]:
    """One process or two in the same instant. The launcher is left: nothing would start the rest again."""
    alive = {name: pid for name, pid in service.processes().items() if not name.startswith("launcher")}
    names = picks.sample(sorted(alive), min(len(alive), picks.choice((1, 1, 2))))
    return {name: alive[name] for name in names}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

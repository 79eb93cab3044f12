"""Random hostile requests at every door, while neighbours stream; nobody else may notice."""

from __future__ import annotations

import http.client
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from doors import generate, infer, infer_grpc, manage
from neighbour import clients
from service import Service, resident

AT_ONCE = 8
GAP_S = 5.0
# tritonserver keeps about 90 MiB of large gRPC messages: after 1,000 requests, and no more after 2,000.
GROWTH, SLACK = 1.10, 2**27
SECRETS = ("Traceback", 'File "', "site-packages", "model.py", "manylora-chaos-", ".so:")
Door = Callable[[random.Random], str]


def run(folder: Path, picks: random.Random, count: int) -> list[str]:
    """`count` of them. Returns what went wrong."""
    service = Service(folder)
    service.start()
    service.wait_until_right()
    doors: list[Door] = [
        lambda picks: generate(service.server.http, picks),
        lambda picks: infer(service.server.http, picks),
        lambda picks: infer_grpc(service.server.grpc, picks),
        lambda picks: manage(service.server.http, picks),
    ]
    wrong = attack("requests: Triton", doors, picks, count, service.stream, service.processes)
    service.wait_until_right()
    service.stop()
    return wrong


def attack(
    name: str,
    doors: list[Door],
    picks: random.Random,
    count: int,
    stream: Callable[[str | None], Iterator[str]],
    processes: Callable[[], dict[str, int]],
) -> list[str]:
    """Returns what went wrong."""
    before, wrong = {pid: resident(pid) for pid in processes().values()}, []
    roles = {pid: role for role, pid in processes().items()}
    outcomes: Counter[str] = Counter()
    with clients(2, stream) as watched, ThreadPoolExecutor(AT_ONCE) as pool:
        for answer in pool.map(
            lambda seed: one(doors, random.Random(seed)), [picks.getrandbits(32) for _ in range(count)]
        ):
            outcomes["answered" if answer else "no answer"] += 1
            wrong += [
                f"an answer of {name} shows {secret!r}: {answer[:300]}"
                for secret in SECRETS
                if secret in answer
            ]
    time.sleep(5)
    after = {pid: resident(pid) for pid in processes().values()}
    wrong += [f"the process of {roles[pid]} is another" for pid in before if pid not in after]
    for pid, size in before.items():
        if after.get(pid, 0) > GROWTH * size + SLACK:
            wrong.append(f"{roles[pid]} grew from {size / 2**20:.0f} to {after[pid] / 2**20:.0f} MiB")
    if watched.worst_gap > GAP_S or watched.outcomes["silent"]:
        wrong.append(f"{name}: a neighbour waited {watched.worst_gap:.1f} s; {watched.outcomes}")
    if watched.outcomes["broken"]:
        wrong.append(f"{name}: {watched.outcomes['broken']} of the neighbours' streams broke")
    wrong += watched.wrong
    print(
        f"{name}: {count} sent, {dict(outcomes)}; neighbours' streams: {watched.outcomes}, "
        f"longest gap between two pieces {watched.worst_gap:.2f} s"
    )
    return wrong


def one(doors: list[Door], picks: random.Random) -> str:
    """The answer's text, empty when there was none."""
    try:
        return picks.choice(doors)(picks)
    except (OSError, http.client.HTTPException, grpc.RpcError, ValueError):
        return ""

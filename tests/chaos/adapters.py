"""Hostile adapters, one after another, through both servers' doors while neighbours stream."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from doors import post
from gateway import Gateway
from hostile import attack
from service import DEMO, ROOT, Service

sys.path.insert(0, str(ROOT / "tests" / "cpu"))

import hostile_adapters

hostile_adapters.HIDDEN, hostile_adapters.LAYERS = 192, 4  # of the demo model


def run(folder: Path, picks: random.Random, count: int) -> list[str]:
    """Half of `count` by name at Triton, half by path at `manylora serve`. Returns what went wrong."""
    root = folder / "adapters"
    shutil.copytree(DEMO / "adapters", root)
    service = Service(folder, lora_catalog_dir=str(root))
    service.start()
    service.wait_until_right()
    doors = [lambda picks: ask(service, root, picks)]
    wrong = attack("adapters: Triton", doors, picks, count // 2, service.stream, service.processes)
    service.wait_until_right()
    service.stop()
    with Gateway(folder, root) as gateway:
        doors = [lambda picks: load(gateway, root, picks)]
        wrong += attack("adapters: serve", doors, picks, count // 2, gateway.stream, gateway.processes)
        if not gateway.is_right():
            wrong.append("serve does not answer right afterwards")
    return wrong


@contextmanager
def made(root: Path, picks: random.Random) -> Iterator[Path]:
    """A hostile adapter right below the root."""
    number = picks.getrandbits(32)
    staging, place = root.parent / f"staging-{number}", root / f"h{number}"
    [(_, path)] = hostile_adapters.hostile(staging, 1, start=number)
    try:
        path.rename(place)
        yield place
    finally:
        for left in (staging, place):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def ask(service: Service, root: Path, picks: random.Random) -> str:
    with made(root, picks) as path:
        body = {"text_input": "a", "max_tokens": 2, "lora_name": path.name}
        return post(service.server.http, "/v2/models/ensemble/generate", json.dumps(body).encode())


def load(gateway: Gateway, root: Path, picks: random.Random) -> str:
    with made(root, picks) as path:
        body = {"lora_name": path.name, "lora_path": str(path)}
        headers = {"Content-Type": "application/json"}
        return post(gateway.port, "/v1/load_lora_adapter", json.dumps(body).encode(), headers)

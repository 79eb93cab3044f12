"""More connections than the HTTP proxy has places, of clients that wait, send slowly or do not read; requests
that two readers could understand differently, or that take the server long."""

from __future__ import annotations

import json
import random
import re
import resource
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from hostile import GAP_S
from neighbour import clients
from service import Service

HELD_S = 40  # longer than a server may be silent
GENERATE = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
JSON_LENGTH = b"Inference-Header-Content-Length: 2\r\n"
LONG = b'{"text_input":"a","max_tokens":200,"end_id":-1,"stream":true}'
STREAM = GENERATE.replace(b"generate", b"generate_stream")
WAITING = [b"", b"P", LIVE[:-2], LIVE, GENERATE + b"Content-Length: 9\r\n\r\n{", LIVE * 3 + b"GET"]


def run(folder: Path, picks: random.Random, count: int) -> list[str]:
    """Holds `count` connections. Returns what went wrong."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    service = Service(folder)
    service.start()
    service.wait_until_right()
    port, before = service.server.http, service.processes()
    with clients(2, service.stream) as watched, ExitStack() as stack:
        held = []
        for _ in range(min(count, hard - 200)):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)))
            held[-1].setblocking(False)
            is_stream = picks.random() < 0.005
            send(held[-1], with_body(STREAM, LONG) if is_stream else picks.choice(WAITING))
        wrong = [f"{name}: {said[:300]!r}" for name, said in odd(port).items()]
        began = time.monotonic()
        while time.monotonic() - began < HELD_S:
            for one in picks.sample(held, len(held) // 50):
                send(one, b"a")
            time.sleep(0.2)
    if watched.worst_gap > GAP_S or watched.outcomes["silent"] or watched.outcomes["broken"]:
        wrong.append(f"a neighbour waited {watched.worst_gap:.1f} s; {watched.outcomes}")
    wrong += watched.wrong
    service.wait_until_right(20)
    if service.processes() != before:
        wrong.append(f"the processes changed: {before} and {service.processes()}")
    service.stop()
    print(
        f"connections: {len(held)} held for {HELD_S} s; neighbours' streams: {watched.outcomes}, longest gap "
        f"between two pieces {watched.worst_gap:.2f} s"
    )
    return wrong


def odd(port: int) -> dict[str, bytes]:
    """By name, what was answered with other statuses than it should be."""
    keys = json.dumps({f"k{i}": 1 for i in range(200_000)}).encode()
    closing, tunnel = LIVE[:-2] + b"Connection: close\r\n\r\n", b"CONNECT x:80 HTTP/1.1\r\n\r\n"
    chunks = with_body(GENERATE + b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n")
    asked = {
        "keys": (with_body(GENERATE, keys), [b"400"]),
        "depth": (with_body(GENERATE + JSON_LENGTH, b"{}" + b"[" * 10**6), [b"400"]),
        "two lengths": (GENERATE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", [b"400"]),
        "chunks and a length": (chunks, [b"400"]),
        "a tunnel": (tunnel, [b"400"]),
        "an answer and a refusal": (LIVE + tunnel, [b"200", b"400"]),
        "three at once": (LIVE + LIVE + closing, [b"200"] * 3),
        "an upgrade": (closing.replace(b"close", b"Upgrade, close\r\nUpgrade: h2c"), [b"200"]),
    }
    found = {}
    for name, (sent, statuses) in asked.items():
        said = b""
        with socket.create_connection(("127.0.0.1", port), 30) as one, suppress(OSError):
            one.sendall(sent)
            said = b"".join(iter(lambda one=one: one.recv(65536), b""))
        if re.findall(rb"HTTP/1.1 (\d+) ", said) != statuses:
            found[name] = said
    return found


def with_body(head: bytes, body: bytes) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def send(client: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # it was closed
        client.send(data)

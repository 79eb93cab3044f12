"""What a hostile client sends to `manylora serve`: bodies that are dear to parse, names that mean another
model, offers of other protocols. Doors as in `doors`.
"""

from __future__ import annotations

import json
import random
import socket
from typing import Any

from doors import POST, post
from gateway import Gateway

JSON = {"Content-Type": "application/json"}
COUNTS = [100, 10_000, 16_000, 64_000, 250_000]
NAMES = [
    "demo:chinese",
    "demo",
    "chinese:latest",
    ".hidden",
    ".incoming/x",
    "x/.y",
    "a/b/c/d/e/f/g/h",
    "a+b",
    "..",
]


def large(gateway: Gateway, picks: random.Random) -> str:
    """A body of many values, most of which are too many."""
    count = picks.choice(COUNTS)
    fields: dict[str, Any] = {str(number): 1 for number in range(count)}
    message: dict[str, Any] = {"role": "user", "content": "a"}
    chat, text = {"model": "demo", "messages": [message], "max_tokens": 2}, {"model": "demo", "prompt": "a"}
    path, body = picks.choice(
        [
            ("/v1/completions", {**text, **fields}),
            ("/v1/completions", {**text, "logit_bias": fields}),
            ("/v1/completions", {**text, "guided_json": json.dumps(fields)}),
            ("/v1/completions", {**text, "prompt": picks.choice([[1], ["a"], [[1]]]) * count}),
            ("/v1/completions", {**text, "stop": ["a"] * count}),
            ("/v1/chat/completions", {**chat, "messages": [{**message, **fields}]}),
            ("/v1/chat/completions", {**chat, "messages": [message] * count}),
            (
                "/v1/chat/completions",
                {**chat, "messages": [{**message, "content": [{"type": "text"}] * count}]},
            ),
            ("/v1/chat/completions", {**chat, "tool_choice": fields}),
            ("/v1/embeddings", {"model": "demo", "input": ["a"] * count}),
            ("/api/chat", {**chat, "options": fields}),
        ]
    )
    return post(gateway.port, path, json.dumps(body).encode(), JSON)


def name(gateway: Gateway, picks: random.Random) -> str:
    """An adapter under a name that none may have."""
    asked = picks.choice(
        [{"lora_path": "japanese"}, {"alias_of": "japanese"}, {"lora_path": "japanese", "load_inplace": True}]
    )
    body = {"lora_name": picks.choice(NAMES), **asked}
    return post(gateway.port, "/v1/load_lora_adapter", json.dumps(body).encode(), JSON)


def offer(gateway: Gateway, picks: random.Random) -> str:
    """Another protocol, with a body in some pieces. Raises ValueError if it is not answered in HTTP/1.1."""
    body = b'{"model": "demo", "prompt": "a", "max_tokens": 2}'
    head = POST + b"Connection: Upgrade, close\r\nUpgrade: %s\r\n" % picks.choice(
        [b"h2c", b"websocket", b"x"]
    )
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent, cut = head + body, picks.randrange(len(head + body))
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(sent[:cut])
        connection.sendall(sent[cut:])
        answer = connection.recv(65536).decode(errors="replace")
    if not answer.startswith("HTTP/1.1 "):
        raise ValueError(answer[:200])
    return answer

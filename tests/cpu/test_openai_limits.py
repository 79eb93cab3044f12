"""Protects the server from single clients: what they send, how slowly, on how many connections, and whether
they read. The others are served meanwhile, and nothing of them stays."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest
from forked import ForkServer
from serving import DEMO, Running
from turned_away import all_of
from waiting import wait_for

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.serving.transport import SMALL, BodyMemory

MOST = 12  # connections
HOST = b"Host: localhost\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + JSON
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


HASTY = {"header_timeout": 0.6, "body_timeout": 0.6, "keep_alive_timeout": 0.4, "write_timeout": 0.6}


@contextlib.contextmanager
def limited(**limits: float) -> Iterator[Running]:
    running = Running(
        lora_root=(DEMO / "adapters",),
        max_connections=MOST,
        max_connections_per_address=MOST,
        max_header_bytes=8192,
        drain_seconds=1.0,
        **limits,
    )
    yield running
    running.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with limited() as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with limited(**HASTY) as running:
        yield running


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def send(client: socket.socket, *parts: bytes, pause: float = 0.0) -> None:
    with contextlib.suppress(OSError):  # the server need not read it all
        for part in parts:
            client.sendall(part)
            time.sleep(pause)


def completion(**fields: object) -> bytes:
    """A request for the base model's answer, with its length."""
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 2, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([b"GET / HTTP/1.1\r\nA: " + b"x" * 200000], "headers_too_large"),
        ([b"GET / HTTP/1.1\r\n", *[b"A: " + b"x" * 1000 + b"\r\n"] * 100], "headers_too_large"),
        ([b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 300 + b"\r\n"], "headers_too_large"),
        ([b"GET /" + b"x" * 100000], "uri_too_long"),
        ([CHUNKED, b"1\r\n \r\n" * 20000], "invalid_http"),
        ([CHUNKED, b"1;" + b"x" * 100000], "invalid_http"),
        ([CHUNKED, b"0\r\n" + b"A: b\r\n" * 20000], "invalid_http"),
        ([POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], "invalid_http"),
        ([b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], "invalid_http"),
        ([b"\x16\x03\x01\x02\x00\x01\x00"], "invalid_http"),
    ],
)
def test_a_request_that_is_too_large_or_none_is_refused(
    server: Running, sent: list[bytes], code: str
) -> None:
    check_refusal(server, sent, code)


@pytest.mark.parametrize(
    "sent", [[b"GET / HTTP/1.1\r\n"], [POST + b"Content-Length: 50\r\n\r\n{"]], ids=["head", "body"]
)
def test_a_request_that_is_never_whole_is_refused(hasty: Running, sent: list[bytes]) -> None:
    check_refusal(hasty, sent, "request_timeout")


def check_refusal(server: Running, sent: list[bytes], code: str) -> None:
    with connect(server) as client:
        send(client, *sent)
        head, _, body = all_of(client).partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["code"] == code
    assert b"connection: close" in head


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nA: ", POST + b"Content-Length: 5000\r\n\r\n", b"\r\n"])
def test_bytes_that_drip_do_not_keep_a_connection_open(hasty: Running, start: bytes) -> None:
    with connect(hasty) as client:
        send(client, start)
        client.settimeout(0.02)
        end = time.monotonic() + 60
        open_ = True
        while open_ and time.monotonic() < end:
            try:
                client.sendall(b"\r\n" if start == b"\r\n" else b"x")
                open_ = client.recv(65536) != b""
            except TimeoutError:
                pass
            except OSError:
                open_ = False
        assert not open_


@pytest.mark.parametrize(
    "sent", [b"", completion(), b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n"]
)
def test_a_connection_that_waits_for_nothing_is_closed(hasty: Running, sent: bytes) -> None:
    with connect(hasty) as client:
        send(client, sent)
        assert all_of(client).count(b"HTTP/1.1") == bool(sent)


def test_a_body_that_comes_after_its_answer_leaves_the_connection_of_use(server: Running) -> None:
    with connect(server) as client:
        send(client, b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n", pause=0.1)
        send(client, b"hello" + b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        found = all_of(client)
    assert b"404 Not Found" in found and found.endswith(b'{"status":"live"}')


def test_what_comes_behind_a_chunked_body_is_no_header(server: Running) -> None:
    body = b'{"model":"demo","prompt":"a","max_tokens":2}'
    with connect(server) as client:
        send(client, CHUNKED.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), b"%x\r\n" % len(body) + body)
        send(client, b"\r\n0\r\nContent-Type: text/plain\r\nHost: other\r\n\r\n")
        assert b"200 OK" in all_of(client)


@pytest.mark.usefixtures("slow_steps")
def test_idle_connections_give_way_and_busy_ones_do_not(
    server: Running, held_steps: Callable[[int], threading.Event]
) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(5 * MOST)]
        assert server.http.get("/health").status_code == 200
        assert all_of(idle[0]) == b""
    wait_for(lambda: server.clients.num_open <= 1)
    server.http.close()
    server.http = httpx2.Client(base_url=server.url, timeout=60)
    go_on = held_steps(300)
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(MOST)]
        for client in busy:
            send(client, completion(max_tokens=400, ignore_eos=True, stream=True))
        for client in busy:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with connect(server) as late:
            found = all_of(late)
        go_on.set()
        assert found.startswith(b"HTTP/1.1 503") and b"overloaded" in found
    wait_for(lambda: server.clients.num_open == 0)
    assert server.http.get("/health").status_code == 200


def test_who_never_reads_is_let_go_with_the_work_for_it(hasty: Running) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hasty.port))
        send(client, completion(max_tokens=450, ignore_eos=True, stream=True, n=8, logprobs=20))
        assert client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        wait_for(lambda: hasty.clients.num_open == 0)
        wait_for(lambda: hasty.metric("vllm:num_requests_running") == 0)


def ended(server: Running) -> dict[str, float]:
    """How many requests of the base model have ended how."""
    name = 'manylora_adapter_requests_total{adapter="base",finish_reason="%s"}'
    return {how: server.metric(name % how) for how in ("length", "cancelled")}


@pytest.mark.usefixtures("slow_steps")
def test_requests_that_were_sent_ahead_end_with_their_client(server: Running, hasty: Running) -> None:
    ahead = completion(max_tokens=450, ignore_eos=True, stream=True)
    before = ended(server)
    with connect(server) as client:
        send(client, ahead + ahead)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    wait_for(lambda: ended(server)["cancelled"] > before["cancelled"])
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    assert ended(server)["length"] == before["length"]
    with connect(server) as client:
        last = b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
        send(client, (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 2 + last)
        assert all_of(client).count(b'{"status":"live"}') == 3
    with connect(hasty) as client:
        send(client, (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 2000)
        assert all_of(client).count(b"200 OK") <= 20


def test_another_protocol_is_not_spoken(server: Running) -> None:
    with connect(server) as client:
        send(
            client, b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
        send(client, b"\x81\x05hello")
        assert b"invalid_http" in all_of(client)
    check_refusal(server, [b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\nhello"], "method_not_allowed")


@pytest.mark.parametrize("pause", [0, 0.1], ids=["one packet", "several"])
def test_who_offers_another_protocol_is_answered_in_this_one(server: Running, pause: float) -> None:
    """Java's HTTP client offers HTTP/2 with its first request. Its body was lost."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    first = completion().replace(JSON, JSON + offer)
    head, _, body = first.partition(b"\r\n\r\n")
    parts = [head[:100], head[100:] + b"\r\n\r\n", body[:9], body[9:], first, b""]
    last = completion().replace(HOST, HOST + b"Connection: close\r\n")
    with connect(server) as client:
        send(client, *(parts if pause else [b"".join(parts)]), pause=pause)
        send(client, CHUNKED.replace(JSON, JSON + offer) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), last)
        found = all_of(client)
    assert found.count(b"HTTP/1.1 200 OK") == found.count(b'"finish_reason":"length"') == 4


def test_without_descriptors_clients_are_turned_away_and_the_rest_goes_on(forks: ForkServer) -> None:
    assert forks.start("turned_away", []).wait(200) == 0


def test_large_bodies_wait_for_each_other_and_small_ones_for_nobody() -> None:
    bodies = BodyMemory(10)
    with bodies.reserve() as hold:
        hold(SMALL + 9)
        with bodies.reserve() as other:
            other(SMALL)
            with pytest.raises(ApiError, match="Too many large requests"):
                other(SMALL + 5)
        hold(SMALL + 10)
    assert bodies.num_bytes == 0
    with bodies.reserve() as hold:
        hold(SMALL + 10)

"""Protects tritonserver's readers of HTTP and JSON from what they could understand in another way than our
checks, or take too long for; and clients of the proxy from each other: each gets the answers to its own
requests, in order, and who opens many connections, or is slow, makes room."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from manylora.doors.triton.launcher import http_checks, http_proxy
from manylora.doors.triton.launcher.http_checks import (
    MAX_DEPTH,
    MAX_INFER_JSON,
    MAX_KEYS,
    RefusedError,
    check_json,
    forwarded_head,
    read_head,
)
from manylora.doors.triton.launcher.http_proxy import ClientConnection, HttpProxy
from manylora.system.connections import OpenConnections, address_of

GENERATE, INFER = b"/v2/models/m/generate", b"/v2/models/m/infer"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(body: bytes, *headers: bytes, path: bytes = GENERATE) -> bytes:
    lines = b"POST " + path + b" HTTP/1.1", b"Host: x", *headers, b"Content-Length: %d" % len(body)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Server:
    """Stands for tritonserver: answers a body with itself, `wait` when `go` is set, `big` with 64 MiB."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.opened = self.closed = 0
        self.go = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if b"/early/" in head:
                    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                    await reader.read()
                body = await reader.readexactly(int(head.rpartition(b"content-length: ")[2]))
                if body == b'"cut"':
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
                    return
                if body == b'"wait"':
                    await self.go.wait()
                if body == b'"big"':
                    body = bytes(2**26)
                chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


class Front:
    def __init__(self, proxy: HttpProxy, server: Server, port: int) -> None:
        self.proxy, self.server, self._port = proxy, server, port

    async def client(self, sent: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(sent)
        return reader, writer

    async def ask(self, sent: bytes) -> bytes:
        """All that comes until the connection closes."""
        reader, writer = await self.client(sent)
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def fronted() -> AsyncIterator[Front]:
    loop, server = asyncio.get_running_loop(), Server()
    async with await asyncio.start_server(server, "127.0.0.1", 0) as inner:
        proxy = HttpProxy(b"SECRET", inner.sockets[0].getsockname()[1], False)
        sweep = asyncio.create_task(proxy.close_silent())
        outer = await loop.create_server(lambda: ClientConnection(proxy), "127.0.0.1", 0)
        try:
            yield Front(proxy, server, outer.sockets[0].getsockname()[1])
        finally:
            server.go.set()
            sweep.cancel()
            outer.close()
            for client in list(proxy.clients):
                client.close()


Test = Callable[[Front], Awaitable[None]]
Run = Callable[[Test], None]


@pytest.fixture(params=[asyncio.run, http_proxy.run], ids=["asyncio", "uvloop"])
def front(request: pytest.FixtureRequest) -> Run:
    async def run(test: Test) -> None:
        async with fronted() as made:
            await asyncio.wait_for(test(made), 60)

    return lambda test: request.param(run(test))


async def answer(client: Client) -> bytes:
    """The body of one."""
    assert (await client[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    length = int(await client[0].readuntil(b"\r\n"), 16)
    return (await client[0].readexactly(length + 7))[:length]


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def test_requests_in_one_packet_are_answered_in_order(front: Run) -> None:
    async def test(made: Front) -> None:
        client = await made.client(b"".join(post(b'"%d"' % i) for i in range(50)))
        assert [await answer(client) for _ in range(50)] == [b'"%d"' % i for i in range(50)]
        assert made.server.opened == 1

    front(test)


@pytest.mark.parametrize(
    "second",
    [b"CONNECT x:80 HTTP/1.1\r\n\r\n", post(b"[" * 100), post(b"", b"Content-Length: 3"), b"\r\n\r\n\r\n"],
)
def test_a_refusal_comes_after_the_answers_before_it(front: Run, second: bytes) -> None:
    async def test(made: Front) -> None:
        said = await made.ask(post(b'"a"') + second + post(b'"c"'))
        first, _, rest = said.partition(b"0\r\n\r\n")
        assert first.endswith(b'"a"\r\n')
        assert rest.startswith(b"HTTP/1.1 400 ")
        assert rest.count(b"HTTP/1.1 ") == 1
        assert len(made.server.heads) == 1

    front(test)


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"x\r\n"])
def test_what_follows_chunks_is_not_answered(front: Run, end: bytes) -> None:
    chunked = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")

    async def test(made: Front) -> None:
        said = await made.ask(chunked + b'1\r\n"\r\n2;a=b\r\na"\r\n' + end + post(b'"b"'))
        assert said.count(b"HTTP/1.1 ") == 1
        assert said.startswith(b"HTTP/1.1 200 " if end == b"0\r\n\r\n" else b"HTTP/1.1 400 ")
        assert b'"b"' not in said

    front(test)


def test_a_request_may_come_in_any_pieces(front: Run) -> None:
    async def test(made: Front) -> None:
        client = await made.client()

        async def send(data: bytes) -> None:
            for piece in data:
                client[1].write(bytes([piece]))
                await asyncio.sleep(0.0001)

        await send(b"\r\n" + post(b'"a"', b"Expect: 100-continue")[:-3])
        assert await client[0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await send(b'"a"')
        assert await answer(client) == b'"a"'
        tensors = post(b'{"inputs":[]}' + bytes(2**20), b"Inference-Header-Content-Length: 13", path=INFER)
        client[1].write(tensors)
        assert await answer(client) == b'{"inputs":[]}' + bytes(2**20)

    front(test)


def test_who_waits_longest_makes_room_for_others(front: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_proxy, "MAX_CONNECTIONS", 4)

    async def test(made: Front) -> None:
        works = await made.client(post(b'"wait"'))
        await until(lambda: len(made.server.heads) == 1)
        clients = [await made.client(post(b'"%d"' % i)) for i in range(12)]
        assert await answer(clients[-1]) == b'"11"'
        await until(lambda: len(made.proxy.clients) == 4)
        made.server.go.set()
        assert await answer(works) == b'"wait"'

    front(test)


def test_when_all_work_a_new_client_hears_it(front: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_proxy, "MAX_CONNECTIONS", 2)

    async def test(made: Front) -> None:
        busy = [await made.client(post(b'"wait"')) for _ in range(2)]
        await until(lambda: len(made.server.heads) == 2)
        assert (await made.ask(b"")).startswith(b"HTTP/1.1 503 ")
        made.server.go.set()
        assert [await answer(one) for one in busy] == [b'"wait"'] * 2

    front(test)


@pytest.mark.parametrize("sent", [b"", b"POST ", post(b"abc")[:-1], post(b'"big"'), post(b'"a"')])
def test_who_does_not_go_on_is_closed(front: Run, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty or slow head or body, a response that is not read, or between two requests."""
    for name in ("HEAD_S", "SILENCE_S", "IDLE_S", "SWEEP_S"):
        monkeypatch.setattr(http_proxy, name, 0.02)

    async def test(made: Front) -> None:
        with socket.create_connection(("127.0.0.1", made._port)) as client:
            client.sendall(sent)
            if b"big" in sent:
                await until(lambda: made.server.heads != [])
            else:
                await until(lambda: bool(made.proxy.clients))
            await until(lambda: not made.proxy.clients)
            assert made.proxy.waiting_bytes == 0

    front(test)


def test_each_side_hears_that_the_other_has_gone(front: Run) -> None:
    async def test(made: Front) -> None:
        assert (await made.ask(post(b'"cut"'))).endswith(b"abc")
        _, writer = await made.client(post(b'"wait"'))
        await until(lambda: len(made.server.heads) == 2)
        writer.close()
        await until(lambda: not made.proxy.clients)
        made.server.go.set()
        await until(lambda: made.server.closed == made.server.opened == 2)

    front(test)


def test_an_answer_before_the_end_of_a_body_arrives(front: Run) -> None:
    async def test(made: Front) -> None:
        path, length = b"/v2/models/early/infer", b"Inference-Header-Content-Length: 2"
        said = await made.ask(post(b"{}" + bytes(2**20), length, path=path).replace(b"1048578", b"9999999"))
        assert said == b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"

    front(test)


def test_the_address_with_most_connections_gives_way() -> None:
    open_ones: OpenConnections[str] = OpenConnections(8)
    names = ["good 1", "many 1", "many 2", "many 3", "good 2", "else 1", "else 2", "some 1"]
    assert [open_ones.add(name, name[:4], number) for number, name in enumerate(names)] == [None] * 8
    assert open_ones.add("new", "new", 9) == "many 1"
    open_ones.mark_busy("good 1")
    assert open_ones.add("newer", "new", 10) == "many 2", "of those with two connections"
    assert open_ones.add("newest", "new", 11) == "good 2"
    open_ones.remove("else 1")
    assert open_ones.add("last", "last", 12) is None
    assert len(open_ones) == 8


def test_one_address_may_take_three_quarters_while_others_want_none() -> None:
    open_ones: OpenConnections[int] = OpenConnections(8)
    for number in range(6):
        assert open_ones.add(number, "a", number) is None
        open_ones.mark_busy(number)
    assert open_ones.add(6, "a", 6) == 6, "all of its own work"
    assert open_ones.add(7, "b", 7) is None
    open_ones.mark_idle(3, 8)
    assert open_ones.add(8, "a", 8) == 3
    assert len(open_ones) == 7


def test_addresses_of_one_customer_are_one() -> None:
    assert address_of(("1.2.3.4", 5)) == address_of(("::ffff:1.2.3.4", 5, 0, 0)) == "1.2.3.4"
    assert (
        address_of(("2001:db8::1", 5, 0, 0)) == address_of(("2001:db8::2%eth0", 5, 0, 0)) == "2001:db8::/64"
    )
    assert address_of(None) == ""


def nested(depth: int, inner: str = '"[[{{"') -> bytes:
    return b"[" * depth + inner.encode() + b"]" * depth


@pytest.mark.parametrize("size", [7, 64, 2**18])
def test_only_brackets_outside_of_texts_count(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slice a bracket, a quote or an escape lies in."""
    monkeypatch.setattr(http_checks, "SLICE", size)
    picks = random.Random(1)
    words = ["[", "{" * 90, "\\", '"', "]" * 70, 'a\\"[', "\\\\", "é", ""]
    for _ in range(50):
        text = json.dumps(["".join(picks.choices(words, k=9)) for _ in range(20)], ensure_ascii=False)
        check_json(nested(MAX_DEPTH - 1, text), False)
        with pytest.raises(RefusedError, match="nested more than 64 deep"):
            check_json(nested(MAX_DEPTH, text), False)
    check_json(b"[]" * 1000 + b"]" * 1000, False)  # not JSON, which is for the server to say


@pytest.mark.parametrize("inputs", [[1], [None], ["data"], [[]], {}, "a", [{"shape": 3, "data": []}]])
def test_inputs_that_are_no_tensors_are_left_to_the_server(inputs: object) -> None:
    check_json(json.dumps({"inputs": inputs}).encode(), True)


def test_json_that_is_read_here_has_a_bound_of_its_own() -> None:
    text = b'{"inputs":[]}' + b" " * MAX_INFER_JSON
    check_json(text, False)
    with pytest.raises(RefusedError, match="send binary tensors"):
        check_json(text, True)


JSON_LENGTH = b"Inference-Header-Content-Length: 3"


def head(*lines: bytes, first: bytes = b"POST " + INFER + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([first, b"Host: x", *lines])


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (head(b"Content-Length: 3", b"content-length: 3"), 400, "content-length comes twice"),
        (head(b"Content-Length: 3, 3"), 400, "must be a whole number"),
        (head(b"Content-Length: 0x3"), 400, "must be a whole number"),
        (head(b"Content-Length: %d" % 10**12), 413, "may be at most 1342177280"),
        (head(JSON_LENGTH, JSON_LENGTH), 400, "comes twice"),
        (head(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "excludes content-length"),
        (head(b"Transfer-Encoding: gzip, chunked"), 501, "may only be chunked"),
        (head(b"Transfer-Encoding:\x0bchunked"), 400, "one line NAME: VALUE"),
        (head(b"Transfer-Encoding: chunked", first=b"POST /v2 HTTP/1.0"), 400, "needs HTTP/1.1"),
        (head(b"Host: y"), 400, "host comes twice"),
        (head(b"manylora-management: a", b"Manylora-Management: b"), 400, "comes twice"),
        (head(b"a: b", b" c"), 400, "one line NAME: VALUE"),
        (head(b"Content-Length : 3"), 400, "one line NAME: VALUE"),
        (head(b"a b: c"), 400, "one line NAME: VALUE"),
        (head(b"a: b\nContent-Length: 3"), 400, "one line NAME: VALUE"),
        (head(b"a: \0"), 400, "one line NAME: VALUE"),
        (head(b"Content-Encoding: br"), 415, "gzip, deflate or identity"),
        (head(*[b"a: b"] * 128), 431, "at most 128 headers, got 129"),
        (head(b"Expect: a"), 417, "may only be 100-continue"),
        (head(b"Content-Length: %d" % 2**25), 413, "its part that is JSON"),
        (head(b"Content-Length: 17000000", JSON_LENGTH, first=b"POST /v2 HTTP/1.1"), 413, "that is JSON"),
        (head(first=b"CONNECT x:80 HTTP/1.1"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"CONNECT / HTTP/1.1"), 405, "use GET or POST"),
        (head(first=b"get / HTTP/1.1"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"GET / HTTP/1.2"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"PRI * HTTP/2.0"), 400, "must be METHOD /path HTTP/1.1"),
        *(
            (head(first=b"POST " + path + b" HTTP/1.1"), 400, "a path has no % and //")
            for path in (
                b"/v2/models/m/%69nfer", b"/v2/models/m//infer", b"/v2/../v2", b"http://x/v2", b"v2", b"*",
                b"/v2\\a", b"/v2/\xc3\xa9", b"/v2?a#b", b"/v2\ta",
            )
        ),
    ],
)  # fmt: skip
def test_what_two_readers_could_understand_differently_is_refused(
    text: bytes, status: int, words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        read_head(text)
    assert refused.value.status == status


def sent(text: bytes, length: int = 0) -> bytes:
    return forwarded_head(read_head(text), length, b"SECRET", False)


def test_the_server_gets_one_length_and_nothing_that_is_the_connections() -> None:
    own = [
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQAAP",
        b"TE: a",
    ]
    own += [
        b"Expect: 100-Continue",
        b"Keep-Alive: 5",
        b"Content-Encoding: gzip",
        b"Transfer-Encoding: chunked",
    ]
    assert sent(head(*own, b"X-A:  b c\t", b"manylora-management: mine"), 7) == (
        b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\nx-a: b c\r\n"
        b"manylora-management: SECRET\r\ncontent-length: 7\r\n\r\n"
    )
    assert b"mine" in sent(head(b"manylora-management: mine", first=b"POST /v2/logging HTTP/1.1"))
    assert b"SECRET" not in sent(head(first=b"POST /v2/logging HTTP/1.1"))


@pytest.mark.parametrize(
    ("path", "seen"),
    [(INFER, 3), (INFER.replace(b"m/", b"m/versions/1/"), 3), (INFER + b"?a=/generate", 3), (GENERATE, 9),
     (GENERATE + b"?a=/infer", 9), (b"/v2/logging/infer", 9), (INFER + b"/", 9)],
)  # fmt: skip
def test_a_length_of_json_counts_where_the_server_heeds_it(path: bytes, seen: int) -> None:
    text = head(b"Content-Length: 9", JSON_LENGTH, first=b"POST " + path + b" HTTP/1.1")
    assert read_head(text).checked_length == seen
    assert (b"inference-header-content-length: 3" in sent(text)) == (seen == 3)
    assert read_head(text + b"\r\nContent-Encoding: gzip").checked_length == 9


@pytest.mark.parametrize(
    ("first", "connection", "keeps"),
    [(b"GET / HTTP/1.1", b"keep-alive", True), (b"GET / HTTP/1.1", b"a , Close", False),
     (b"GET / HTTP/1.0", b"keep-alive", False)],
)  # fmt: skip
def test_who_wants_to_close_is_heard(first: bytes, connection: bytes, keeps: bool) -> None:
    assert read_head(head(b"Connection: " + connection, first=first)).keeps == keeps


@pytest.mark.parametrize("make", [
    lambda n: {f"k{i}": 1 for i in range(n)},
    lambda n: [{"a": 1}] * n,
    lambda n: {"a": {f":{i}": ":::" for i in range(n - 1)}},
])  # fmt: skip
def test_keys_are_counted_wherever_they_are(make: Callable[[int], object]) -> None:
    """The server takes a time for them that grows with their square."""
    check_json(json.dumps(make(MAX_KEYS)).encode(), False)
    with pytest.raises(RefusedError, match="at most 1000 keys together"):
        check_json(json.dumps(make(MAX_KEYS + 1)).encode(), False)
    check_json(json.dumps({"text": ":" * 5000 + '":' * 5000}).encode(), False)

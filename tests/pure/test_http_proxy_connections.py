"""Protects the clients of the HTTP proxy from each other: each gets the answers to its own requests, in
order; who opens many connections, or is slow, makes room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from manylora.doors.triton.launcher import http_proxy
from manylora.doors.triton.launcher.http_proxy import ClientConnection, HttpProxy
from manylora.system.connections import OpenConnections, address_of

GENERATE = b"/v2/models/m/generate"
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


INFER = b"/v2/models/m/infer"


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

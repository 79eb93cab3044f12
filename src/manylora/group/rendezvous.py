"""How ranks find each other: rank 0 starts the others and hands them its sockets, or torchrun or mpirun has
started all of them and they meet at a store of torch's."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore

from manylora.errors import ConfigError
from manylora.group.channel import Channel, ChannelClosedError, Message
from manylora.group.place import Place

COMMAND = "manylora.engine.follower"
START_S = 300.0  # for all ranks to come
HELLO_S = 30.0  # for one that has connected to say who it is
KEY = "manylora/rank0"
LOOPBACK = "127.0.0.1"
# A host that is gone answers nothing: after about so long its connections break.
KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


@dataclass
class Link:
    """One other rank, as rank 0 has it. process: None where somebody else has started it.

    steps: what ranks do one after the other, and from there what they say of themselves. adapters: requests
    and answers, so that a large adapter delays no step.
    """

    rank: int
    steps: Channel
    adapters: Channel
    process: subprocess.Popen | None = None

    def close(self) -> None:
        self.steps.close()
        self.adapters.close()


def spawn_ranks(size: int) -> list[Link]:
    """Processes that end with the thread that calls this, at the latest."""
    links: list[Link] = []
    for rank in range(1, size):
        pairs = [socket.socketpair() for _ in range(2)]
        ours, theirs = zip(*pairs, strict=True)
        numbers = [one.fileno() for one in theirs]
        command = [sys.executable, "-m", COMMAND, str(os.getpid()), *map(str, numbers)]
        cores = max(1, len(os.sched_getaffinity(0)) // size)
        environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
        process = subprocess.Popen(  # not in the terminal's process group: Ctrl-C is for rank 0
            command, pass_fds=numbers, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        for one in theirs:
            one.close()
        links.append(Link(rank, Channel(ours[0]), Channel(ours[1]), process))
    return links


def open_store(place: Place) -> Store:
    """For torch's collectives. Raises ConfigError."""
    if not place.address:
        return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=START_S)
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        return TCPStore(place.address, place.port, None, serves, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(
            f"rank {place.rank} does not find rank 0 at {place.address}:{place.port} "
            f"(MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
        ) from error


def meet_ranks(place: Place, store: Store) -> list[Link]:
    """The others, which were started elsewhere. Raises ConfigError that names those that did not come."""
    token, found = secrets.token_hex(16), dict[int, dict[str, Channel]]()
    deadline = time.monotonic() + START_S
    with socket.create_server((place.address, 0), backlog=2 * place.size) as server:
        store.set(KEY, f"{server.getsockname()[1]} {token}")
        while sum(map(len, found.values())) < 2 * (place.size - 1):
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, place.size) if len(found.get(rank, {})) < 2]
                text = (
                    f"of {place.size} ranks these did not come within {START_S:.0f} s: {', '.join(missing)}"
                )
                raise ConfigError(text) from None
            channel = _prepared(connection)
            try:
                hello = channel.receive().values
            except (ChannelClosedError, TimeoutError, ValueError):
                channel.close()
                continue
            if not hmac.compare_digest(str(hello.get("token")), token):
                channel.close()
                continue
            rank, name = int(hello["rank"]), str(hello["name"])
            if not 0 < rank < place.size or name in found.setdefault(rank, {}):
                raise ConfigError(
                    f"rank {rank} of {place.size} came twice: each process needs a RANK of its own"
                )
            channel.set_timeout(None)
            found[rank][name] = channel
    return [Link(rank, found[rank]["steps"], found[rank]["adapters"]) for rank in sorted(found)]


def join(place: Place, store: Store) -> tuple[Channel, Channel]:
    """The other side of `meet_ranks`: the channels of steps and adapters. Raises ConfigError."""
    store.set_timeout(timedelta(seconds=START_S))
    try:
        port, token = store.get(KEY).decode().split()
        made = []
        for name in ("steps", "adapters"):
            channel = _prepared(socket.create_connection((place.address, int(port)), HELLO_S))
            channel.send(hello(rank=place.rank, name=name, token=token))
            channel.set_timeout(None)
            made.append(channel)
        return made[0], made[1]
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"rank {place.rank} came too late, or rank 0 is gone: start all ranks together "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


def hello(**values: str | int) -> Message:
    return Message("hello", values)


def _prepared(connection: socket.socket) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.settimeout(HELLO_S)
    return Channel(connection)

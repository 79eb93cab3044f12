"""How ranks find each other, and what must be equal on all of them: configuration, and checkpoint's files.

Either rank 0 starts the others and passes them its sockets, or torchrun or mpirun started all of them and
they meet at a torch store.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.settings import CONVERTERS
from manylora.errors import ConfigError
from manylora.ranks.channel import Channel, ChannelClosedError, Message
from manylora.ranks.rank_info import RankInfo
from manylora.system.resources import usable_processors
from manylora.version import __version__

WEIGHTS = (".safetensors", ".bin", ".gguf")
CHECKPOINT = "checkpoint"
OF_RANK_0 = (
    "model_dir", "tokenizer_dir", "prefetch_dir", "catalog_dir", "names_file", "allowed_paths",
    "disk_cache_dir",
)  # fmt: skip
"""Paths, which may differ between hosts. Those of adapters are read only by rank 0."""


def to_values(config: EngineConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config), default=str))


def from_values(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration from which `to_values` made these."""
    given = dict(values)
    lora, quant = _typed(LoraCacheConfig, given.pop("lora")), given.pop("quant")
    own = _typed(EngineConfig, given)
    made = None if quant is None else QuantConfig(**quant)
    return EngineConfig(**own, quant=made, lora=LoraCacheConfig(**lora))


def _typed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    types = {one.name: str(one.type).removesuffix(" | None") for one in fields(kind)}
    convert = {name: CONVERTERS.get(text, lambda value: value) for name, text in types.items()}
    return {name: None if value is None else convert[name](value) for name, value in values.items()}


def identity(config: EngineConfig) -> dict[str, str]:
    """What ranks compare: each part of what they serve, as text."""
    values = asdict(config)
    lora = values.pop("lora")
    settings = {name: value for name, value in {**lora, **values}.items() if name not in OF_RANK_0}
    return {
        "version of manylora": __version__,
        CHECKPOINT: checkpoint_digest(config.model_dir),
        **{name: json.dumps(value, default=str) for name, value in sorted(settings.items())},
    }


def check_identity(rank: int, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raises ConfigError that says what differs from rank 0."""
    for name, value in expected.items():
        if found.get(name) != value:
            more = "" if name == CHECKPOINT else f": {found.get(name)}, rank 0 has {value}"
            raise ConfigError(f"rank {rank} was started with another {name} than rank 0{more}")


def checkpoint_digest(folder: Path) -> str:
    """Digest of config.json, and of names and sizes of the weight files. Their contents are not read."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes() if folder.is_dir() else b"")
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        for file in files:
            if file.suffix in WEIGHTS:
                digest.update(f"\0{file.name}\0{file.stat().st_size}".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


logger = logging.getLogger("manylora")

COMMAND = "manylora.engine.follower"
START_S = 240.0  # for all ranks to join: less than the launcher's start timeout
PAUSE_S = 0.5  # between attempts of a rank to find rank 0
HELLO_S = 30.0  # for a connected rank to identify itself
KEY = "manylora/rank0"
AGREED, REFUSED = "agreed", "refused"  # rank 0's answers to a rank's description
LOOPBACK = "127.0.0.1"
# A host that is gone does not respond: after about this time its connections break.
KEEP_ALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


@dataclass
class Link:
    """Another rank. process: None if it was started elsewhere. steps: operations in order, and reports from
    there. adapters: requests with answers, so that a large adapter does not delay a step.
    """

    rank: int
    steps: Channel
    adapters: Channel
    process: subprocess.Popen | None = None

    def close(self) -> None:
        self.steps.close()
        self.adapters.close()


def spawn_ranks(size: int) -> list[Link]:
    """Processes that end with the calling thread, at the latest."""
    links: list[Link] = []
    for rank in range(1, size):
        pairs = [socket.socketpair() for _ in range(2)]
        ours, theirs = zip(*pairs, strict=True)
        numbers = [one.fileno() for one in theirs]
        command = [sys.executable, "-m", COMMAND, str(os.getpid()), *map(str, numbers)]
        cores = max(1, usable_processors() // size)
        environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
        process = subprocess.Popen(  # outside the terminal's process group: Ctrl-C is for rank 0
            command, pass_fds=numbers, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        for one in theirs:
            one.close()
        links.append(Link(rank, Channel(ours[0]), Channel(ours[1]), process))
    return links


def open_store(info: RankInfo) -> TCPStore:
    """Rank 0's store for torch's collectives. For ranks that rank 0 starts itself, it listens on the loopback
    interface only: by itself, torch listens on all of them. Raises ConfigError.
    """
    if not info.address:
        server = socket.create_server((LOOPBACK, 0))
        port, number = server.getsockname()[1], server.detach()
        return TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=number)
    try:
        return _open_store(info, START_S)
    except RuntimeError as error:
        raise ConfigError(
            f"rank 0 cannot be found at {info.address}:{info.port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _open_store(info: RankInfo, seconds: float) -> TCPStore:
    serves = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    timeout = timedelta(seconds=seconds)
    return TCPStore(info.address, info.port, None, serves, timeout, wait_for_workers=False)


def group_store(store: Store, token: str = "") -> Store:
    """A store that only this start of the group sees. torchrun's own store outlives it."""
    return PrefixStore(f"manylora/{token}", store)


def meet_ranks(info: RankInfo, store: Store, token: str) -> list[Link]:
    """The other ranks, which were started elsewhere. token: identifies this start, for `group_store` of all
    ranks, and to reject strangers. Raises ConfigError that names those that did not join.
    """
    found: dict[int, dict[str, Channel]] = {}
    deadline = time.monotonic() + START_S
    try:
        server = socket.create_server((info.address, 0), backlog=2 * info.size)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR must be an address of rank 0's host, got {info.address}: {error.strerror}"
        ) from error
    with server:
        store.set(KEY, f"{server.getsockname()[1]} {token}")
        logger.info("waiting for %d other ranks at %s:%d", info.size - 1, info.address, info.port)
        while sum(map(len, found.values())) < 2 * (info.size - 1):
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, info.size) if len(found.get(rank, {})) < 2]
                text = f"of {info.size} ranks these did not come within {START_S:.0f} s: {', '.join(missing)}"
                raise ConfigError(text) from None
            channel = _prepared(connection)
            try:
                hello = channel.receive().values
                known = hmac.compare_digest(str(hello.get("token")), token)
            except (ChannelClosedError, TimeoutError, ValueError):
                known = False
            if not known:
                channel.close()
                continue
            rank, name = int(hello["rank"]), str(hello["name"])
            if any(one.is_closed() for one in found.get(rank, {}).values()):
                for one in found.pop(rank).values():  # it ended meanwhile and was restarted
                    one.close()
            if not 0 < rank < info.size or name in found.setdefault(rank, {}):
                raise ConfigError(
                    f"rank {rank} of {info.size} came twice: each process needs a RANK of its own"
                )
            channel.set_timeout(None)
            found[rank][name] = channel
    return [Link(rank, found[rank]["steps"], found[rank]["adapters"]) for rank in sorted(found)]


def join(info: RankInfo) -> tuple[Channel, Channel, Store]:
    """The counterpart of `meet_ranks`, with the store for torch's collectives. Retries, because what it finds
    may be left over from a rank 0 that has just ended. Raises ConfigError.
    """
    deadline = time.monotonic() + START_S
    while True:
        opened: list[Channel] = []
        try:
            store = _open_store(info, max(1.0, deadline - time.monotonic()))
            store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
            port, token = store.get(KEY).decode().split()
            for name in ("steps", "adapters"):
                channel = _prepared(socket.create_connection((info.address, int(port)), HELLO_S))
                opened.append(channel)
                channel.send(Message("hello", {"rank": info.rank, "name": name, "token": token}))
            opened[0].set_timeout(START_S)
            opened[0].receive()  # sent once all have joined
            for channel in opened:
                channel.set_timeout(None)
            return opened[0], opened[1], group_store(store, token)
        except (OSError, RuntimeError, ValueError) as error:
            for channel in opened:
                channel.close()
            if time.monotonic() < deadline - PAUSE_S:
                time.sleep(PAUSE_S)
                continue
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"rank {info.rank} has not found rank 0 at {info.address}:{info.port} within "
                f"{START_S:.0f} s (MASTER_ADDR, MASTER_PORT): {said}"
            ) from error


def _prepared(connection: socket.socket) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.settimeout(HELLO_S)
    return Channel(connection)


GLOO = "GLOO_SOCKET_IFNAME"  # otherwise Gloo uses the host name's address, often the loopback's
SIOCGIFADDR, NAME_SIZE = 0x8915, 16  # from linux/sockios.h and linux/if.h


@contextmanager
def interface_of(info: RankInfo) -> Iterator[None]:
    """Inside, Gloo uses the interface to rank 0's host, or the loopback, unless the user chose one."""
    name = "lo" if info.local_size == info.size else interface_towards(info.address)
    if name is None or GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = name
    try:
        yield
    finally:
        del os.environ[GLOO]


def join_collectives(info: RankInfo, store: Store, backend: str) -> None:
    """All ranks call this at the same time; it waits for all. backend: torch's. Raises ConfigError."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already: one engine of several ranks at a time"
        )
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.size)


def interface_towards(address: str) -> str | None:
    """The network interface of this host that reaches an address, or that has it. None: not found."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            ours = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
            return next((name for name, its in _addresses(probe) if its == ours), None)
    return None


def _addresses(probe: socket.socket) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    if probe.family == socket.AF_INET6:
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.ip_address(bytes.fromhex(digits))
        return
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # it has no address
            request = struct.pack(f"{NAME_SIZE}s24x", name.encode())
            yield name, ipaddress.ip_address(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])


def leave_group() -> None:
    """Call this once nothing is computed any more, or ranks are gone. Idempotent."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()

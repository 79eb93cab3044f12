"""Follower: a rank that executes what rank 0 tells it. It has a part of the model and of each adapter, and
makes no decisions.

`python -m manylora.engine.follower PARENT STEPS ADAPTERS` is started by rank 0, with the numbers of two
sockets; `… REPOSITORY REPORT` by the supervisor of another host, see `run_in_repository`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import Store, TCPStore

from manylora.adapters.cache.pool import (
    AdapterPool,
    LoadedAdapter,
    Mixes,
    build_parts,
    lora_batch,
    with_virtual,
)
from manylora.adapters.geometry import Layout
from manylora.adapters.tensors import Adapter
from manylora.config.engine import EngineConfig
from manylora.config.repository import repository_config
from manylora.engine import step_messages
from manylora.engine.build import RankParts, build_rank, leave_group, meet_group
from manylora.errors import ConfigError
from manylora.kernels.transfer import to_device, upload
from manylora.model.batch import copy_blocks
from manylora.model.decoder import Decoder
from manylora.ranks.channel import Channel, ChannelClosedError, Message
from manylora.ranks.rank_info import RANK_0_GONE, RankInfo, find_rank
from manylora.ranks.rendezvous import LOOPBACK, REFUSED, from_values, group_store, identity, join

logger = logging.getLogger("manylora")

PR_SET_PDEATHSIG = 1
ALIVE_S = 0.5
LAST_WORDS_S = 0.5  # to read what rank 0 sent before it closed the channel


@dataclass
class _Held:
    """An adapter in its host pages. loaded: whether it is on the device; event: of the copy."""

    layout: Layout
    pages: Sequence[int]
    loaded: LoadedAdapter | None = None
    event: torch.Event | None = None


class Follower:
    """Executes messages until the channel ends or `end` arrives."""

    def __init__(self, parts: RankParts) -> None:
        self._parts, self._pool = parts, open_pool(parts)
        self._held: dict[str, _Held] = {}
        self._mixes = Mixes()
        self._kept: dict[str, tuple[Adapter, Layout]] = {}  # adapters without pages, for waiting requests
        self._num_done, self._progress = 0, threading.Condition()  # messages on the steps channel
        self._do = {
            step_messages.FORWARD: self._forward,
            step_messages.ENCODE: self._forward,
            step_messages.COPY_BLOCKS: self._copy,
            step_messages.COPY_STATES: self._copy,
            step_messages.LOAD: self._load,
            step_messages.WRITE: self._write,
            step_messages.KEEP: self._keep,
            step_messages.RESTORE: self._restore,
            step_messages.DROP: self._drop,
        }
        parts.device.ops.reserve(parts.limits, parts.device.torch)

    def run(self, steps: Channel) -> bool:
        """Returns whether rank 0 has ended for good."""
        self._parts.device.activate()
        while (message := steps.receive()).what != step_messages.END:
            self._do[message.what](message)
            with self._progress:
                self._num_done += 1
                self._progress.notify_all()
        return message.values["for_good"]

    def take_adapters(self, channel: Channel) -> None:
        """Runs on a separate thread beside the steps. Each message waits for the steps sent before it."""
        with suppress(ChannelClosedError):
            while True:
                message, error = channel.receive(), None
                with self._progress:
                    while self._num_done < message.values["after"]:
                        self._progress.wait()
                try:
                    self._do[message.what](message)
                except Exception as raised:
                    logger.exception("an adapter could not be written into the cache")
                    error = type(raised).__name__
                channel.send(Message("done", {"error": error}))

    def _write(self, message: Message) -> None:
        slicer, pages = self._parts.slicer, message.values["pages"]
        assert slicer is not None
        whole = step_messages.written_adapter(message)
        layout = slicer.layout(whole, self._pool.geometry, self._pool.element_bytes)
        self._put(slicer.slice(whole), layout, pages)

    def _keep(self, message: Message) -> None:
        digest = message.values["digest"]
        held = self._held[digest]
        found = self._pool.read_host(digest, held.layout, held.pages)
        self._kept[digest] = found, held.layout

    def _restore(self, message: Message) -> None:
        self._put(*self._kept[message.values["digest"]], message.values["pages"])

    def _drop(self, message: Message) -> None:
        self._kept.pop(message.values["digest"], None)

    def _put(self, part: Adapter, layout: Layout, pages: Sequence[int]) -> None:
        for digest in [one for one, held in self._held.items() if not set(pages).isdisjoint(held.pages)]:
            del self._held[digest]  # rank 0 has evicted it
        self._pool.write_host(part, layout, pages)
        self._held[part.digest] = _Held(layout, pages)

    def _load(self, message: Message) -> None:
        held, pages = self._held[message.values["digest"]], message.values["pages"]
        held.event = self._pool.load(held.layout, held.pages, pages)
        held.loaded = self._pool.loaded(held.layout, self._pool.read_pages(held.pages, pages))

    def _forward(self, message: Message) -> None:
        inputs, parts, device = step_messages.step_inputs(message), self._parts, self._parts.device.torch
        segments = []
        for start, stop, members in inputs.adapters:
            loaded = [(self._loaded(digest), scale) for digest, scale in members]
            segments.append((start, stop, self._mixes.find(loaded)))
        lora = with_virtual(lora_batch(self._pool, segments), inputs.virtual)
        batch = replace(inputs, lora=lora).plan(parts.device.ops)
        if inputs.embeddings is not None:
            rows, vectors = inputs.embeddings
            batch = replace(batch, embeddings=(rows.to(device), vectors.to(parts.decoder.dtype).to(device)))
        moved = to_device(batch, device)
        if isinstance(parts.decoder, Decoder):
            parts.decoder.forward(moved, parts.kv, parts.states)
        elif message.what == step_messages.ENCODE:
            parts.decoder.encode(moved, parts.kv)
        else:
            parts.decoder.forward(moved, parts.kv)

    def _copy(self, message: Message) -> None:
        columns = zip(*message.values["pairs"], strict=True)
        source, target = (upload(list(one), torch.long, self._parts.device.torch) for one in columns)
        if message.what == step_messages.COPY_BLOCKS:
            copy_blocks(self._parts.kv, source, target)
        elif self._parts.states is not None:  # rank 0 has states, so all ranks do
            self._parts.states.copy(source, target)

    def _loaded(self, digest: str) -> LoadedAdapter:
        held = self._held[digest]
        assert held.loaded is not None
        if held.event is not None:
            self._pool.hold(held.event)
        return held.loaded


def open_pool(parts: RankParts) -> AdapterPool:
    """The adapter pages of a rank other than 0. Raises ConfigError."""
    sizes = parts.device.torch, parts.pages_dtype, parts.free_bytes
    return build_parts(parts.model, parts.config.lora, *sizes, base=None, slicer=parts.slicer).pool


def follow(
    config: EngineConfig,
    info: RankInfo,
    ready: Callable[[], None] = lambda: None,
    joined: tuple[Channel, Channel, Store] | None = None,
) -> bool:
    """Act as a rank until rank 0 ends; if it is lost, end the process with RANK_0_GONE. Returns whether it
    ended for good, or will start again. ready: called when this rank has its part. Raises ConfigError.
    """
    steps, adapters, store = joined or join(info)
    threading.Thread(target=_say_alive, args=(steps,), name="manylora-alive", daemon=True).start()
    try:
        steps.send(Message("hello", dict(identity(config))))
        if (answer := steps.receive()).what == REFUSED:
            raise ConfigError(answer.values["reason"])
        comm = meet_group(config, info, store)
        follower = Follower(build_rank(config, info, comm))
        threading.Thread(target=follower.take_adapters, args=(adapters,), daemon=True).start()
        ready()
        for_good = follower.run(steps)
        leave_group()
        return for_good
    except ChannelClosedError:
        os._exit(RANK_0_GONE)
    except BaseException as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        with suppress(ChannelClosedError):
            steps.send(Message("failed", {"reason": reason}))
        raise


def _say_alive(steps: Channel) -> None:
    """Report until rank 0 is gone. Then end this process."""
    with suppress(ChannelClosedError):
        while True:
            steps.send(Message("alive"))
            time.sleep(ALIVE_S)
    time.sleep(LAST_WORDS_S)
    os._exit(RANK_0_GONE)


def run_in_repository(repository: Path, report: int) -> int:
    """One rank of the engine of a Triton model repository, where tritonserver and rank 0 are those of another
    process, perhaps on another host. The environment says which, as torchrun's or mpirun's does. report: the
    number of a file that takes one line: why this rank does not start, or nothing, when it has its part.
    Returns the exit status: 0 after rank 0 has ended for good, RANK_0_GONE if it is about to start again.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def tell(line: str) -> None:
        os.write(report, f"{' '.join(line.split())}\n".encode()[:4000])

    try:
        config = repository_config(repository)
        for_good = follow(config, find_rank(config.world_size), lambda: tell(""))
    except (ConfigError, ValueError) as error:
        logger.error("%s", error)
        tell(str(error))
        return 1
    return 0 if for_good else RANK_0_GONE


def main(arguments: Sequence[str]) -> None:
    if len(arguments) == 2:
        status = run_in_repository(Path(arguments[0]), int(arguments[1]))
        logging.shutdown()
        os._exit(status)  # a thread may wait for rank 0
    parent, *numbers = map(int, arguments)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    steps, adapters = (Channel(socket.socket(fileno=number)) for number in numbers)
    values = steps.receive().values
    rank, size = values["rank"], values["size"]
    logging.basicConfig(stream=sys.stderr, format=f"%(levelname)s rank {rank}: %(message)s")
    store = group_store(TCPStore(LOOPBACK, values["port"], is_master=False))
    try:
        info = RankInfo(rank, size, rank, size)
        follow(from_values(values["config"]), info, joined=(steps, adapters, store))
    except Exception as error:
        logger.debug("this rank ends", exc_info=error)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ChannelClosedError:
        os._exit(1)

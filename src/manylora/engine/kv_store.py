"""KvStore: copies of full KV blocks beside the device's cache, in host memory and in a folder.
IdleBlocks: the order in which blocks are evicted."""

from __future__ import annotations

import heapq
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from manylora.config.engine import EngineConfig
from manylora.config.model_folder import weight_files
from manylora.config.settings import read_json
from manylora.errors import ConfigError
from manylora.kernels.device import CopyStream, host_tensor
from manylora.model.batch import KvTensors, copy_block, num_block_bytes
from manylora.stats import KvStoreStats
from manylora.system.folders import CopyFolder
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

DEFAULT_PRIORITY = 35
T = TypeVar("T", bound=Hashable)


class IdleBlocks(Generic[T]):
    """KV blocks for reuse that no sequence uses, by number or by name. The lowest priority is evicted first,
    and of equal ones the block that is idle for longest. A priority may be limited in time; then the default
    follows.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[T, None]] = {}
        self._priority: dict[T, int] = {}
        self._expiries: list[tuple[float, T, int]] = []  # time, block, its priority until then

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, block: T) -> bool:
        return block in self._priority

    def __iter__(self) -> Iterator[T]:
        return iter(self._priority)

    def add(self, block: T, priority: int = DEFAULT_PRIORITY, duration_ms: int | None = None) -> None:
        self._levels.setdefault(priority, OrderedDict())[block] = None
        self._priority[block] = priority
        if duration_ms is not None and priority != DEFAULT_PRIORITY:
            heapq.heappush(self._expiries, (time.monotonic() + duration_ms / 1000, block, priority))

    def discard(self, block: T) -> None:
        priority = self._priority.pop(block, None)
        if priority is not None:
            level = self._levels[priority]
            del level[block]
            if not level:
                del self._levels[priority]

    def refresh(self, block: T) -> None:
        """It was used: of equal priorities it is now the last to be evicted."""
        self._levels[self._priority[block]].move_to_end(block)

    def pop(self) -> T:
        """Remove and return the block to evict next."""
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            _, block, priority = heapq.heappop(self._expiries)
            if self._priority.get(block) == priority:
                self.discard(block)
                self.add(block)
        block = next(iter(self._levels[min(self._levels)]))
        self.discard(block)
        return block


MAGIC = b"manylora KV 1\n"
OURS = r"[0-9a-f]{64}\.kv"  # files that may be deleted in the folder
DIGESTS = "checkpoints.json"  # in the folder: digests of weight files that were read before
PASSING = 32  # blocks in host memory on their way to the disk, if no more were asked for
CLOSE_S = 10.0  # how long the end of a process waits for the disk
READERS = 2
AHEAD = 8  # blocks that one of them has in host memory at a time


@dataclass(frozen=True)
class BlockKey:
    """header: all that determines the content of a block, as JSON: what computed it, the name of the block
    before it or the root of its sequence, and its tokens. name: the digest of that.
    """

    name: str
    header: bytes


class _Copy:
    """A block in host memory, which is free again when nobody refers to this. event: of the copy from the
    device.
    """

    def __init__(self, memory: Tensor, free: deque[int]) -> None:
        slot = free.pop()
        self.data = memory[slot]
        self.event: torch.Event | None = None
        weakref.finalize(self, free.append, slot).atexit = False

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.data


class KvStore:
    """Copies of full blocks of `kv`, [block bytes] uint8 each, by `BlockKey`.

    Blocks are copied to host memory, in slots allocated at the start, by priority and least recently used.
    From there they are written to the folder, if there is one, where they survive the process. The engine's
    thread calls the methods and never waits for the disk. What is read is compared with its key and its
    checksum; what differs is deleted and counts as absent.

    made_by: everything else that determines the content of blocks. Raises ConfigError.
    """

    def __init__(
        self, kv: KvTensors, device: torch.device, config: EngineConfig, made_by: Sequence[object]
    ) -> None:
        self._kv: KvTensors | None = kv
        self._block_bytes = num_block_bytes(kv)
        num_slots = config.kv_cache_host_memory_bytes // self._block_bytes
        if config.kv_cache_host_memory_bytes and not num_slots:
            raise ConfigError(
                f"kv_cache_host_memory_bytes {config.kv_cache_host_memory_bytes} holds no block: one of "
                f"{config.tokens_per_block} tokens takes {self._block_bytes} bytes"
            )
        self._keeps_read = bool(num_slots)
        self._files: CopyFolder | None = None
        self._config, self._parts, self._since_reset = config, made_by, ""
        folder = config.kv_disk_cache_dir
        if folder is not None:
            num_slots = max(num_slots, PASSING)
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"kv_disk_cache_dir {folder} cannot be made: {error.strerror}") from error
            self._files = CopyFolder(config.kv_disk_cache_bytes, folder, OURS, "KV disk cache")
            self._files.scan()
        self._made_by = self._identity()
        self._memory = host_tensor((num_slots, self._block_bytes), torch.uint8, device)
        self._free = deque(range(num_slots))
        self._most_pending = -(-num_slots // 2) if self._keeps_read else num_slots
        self._copies = CopyStream(device)
        self._lock = threading.Lock()  # held while these change
        self._held: dict[str, tuple[BlockKey, _Copy]] = {}  # blocks in host memory,
        self._order: IdleBlocks[str] = IdleBlocks()  # and which is evicted next
        self._counts: Counter[str] = Counter()
        self._writing: set[Future[None]] = set()
        self._scanning: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "manylora-kv-write", lower_priority)
        self._readers = ThreadPoolExecutor(READERS, "manylora-kv-read")

    def use(self, kv: KvTensors | None, *, reloaded: bool) -> None:
        """Copy blocks of other tensors from now on; None: of none, until the next call. reloaded: the weights
        may have changed since, so what host memory holds is of no use.
        """
        self._wait_for_copies()
        self._kv = kv
        if reloaded:
            self._drop_all()

    def reset(self) -> None:
        """Let nothing that was copied before be found by this process."""
        self._since_reset = secrets.token_hex(16)
        self._drop_all()

    def key(self, parent: BlockKey | None, root: str, adapter: str, tokens: Sequence[int]) -> BlockKey:
        """The key of a block after `parent`, None: the first one. root, adapter: `Sequence.root` and
        `kv_key_suffix`.
        """
        before = {"root": root} if parent is None else {"after": parent.name}
        header = json.dumps({"by": self._made_by, **before, "adapter": adapter, "tokens": list(tokens)})
        return BlockKey(blake3(header.encode()).hexdigest(), header.encode())

    def has(self, key: BlockKey) -> bool:
        return key.name in self._held or self.is_saved(key)

    def is_saved(self, key: BlockKey) -> bool:
        """Whether there probably is a copy on the disk or, without one, in host memory."""
        files = self._files
        if files is None:
            return key.name in self._held
        if files.is_outdated and (self._scanning is None or self._scanning.done()):
            self._scanning = self._writer.submit(files.scan)
        return files.knows(f"{key.name}.kv")

    @property
    def is_ready(self) -> bool:
        """Whether the disk keeps up with `save`."""
        return len(self._writing) < self._most_pending

    def save(self, key: BlockKey, block: int, priority: int, duration_ms: int | None) -> None:
        """Copy a block, whose content is complete when the work queued on the device is done."""
        held = self._held.get(key.name)
        copy = self._claim() if held is None else held[1]
        if copy is None:
            return
        if held is None:
            assert self._kv is not None
            copy_block(self._kv, block, copy.data, store=True)
            copy.event = self._copies.queued()
            self._hold(key, copy, priority, duration_ms)
        if self._files is not None and self.is_ready and not self.is_saved(key):
            future = self._writer.submit(self._write, key, copy)
            self._writing.add(future)
            future.add_done_callback(self._writing.discard)

    def restore(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Future[int]:
        """Start to fill blocks, which nobody else may use meanwhile. The result: how many of the first are
        filled. The rest are absent after all.
        """
        assert self._kv is not None
        return self._readers.submit(self._fill, self._kv, keys, blocks, self._copies.queued())

    def stats(self) -> KvStoreStats:
        files, counts = self._files, self._counts
        return KvStoreStats(
            host_bytes=len(self._held) * self._block_bytes,
            disk_bytes=files.num_bytes if files is not None else 0,
            host_hits=counts["found"] - counts["disk"],
            disk_hits=counts["disk"],
            host_evictions=counts["evicted"],
            disk_evictions=files.num_evicted if files is not None else 0,
            damaged=counts["damaged"],
        )

    def close(self) -> None:
        """Wait for writes, CLOSE_S at most, and end the threads. Idempotent."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        wait(set(self._writing), CLOSE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _wait_for_copies(self) -> None:
        with self._lock:
            for _, copy in self._held.values():
                copy.wait()

    def _drop_all(self) -> None:
        self._wait_for_copies()  # into memory that is free from now on
        with self._lock:
            self._held.clear()
            self._order = IdleBlocks()
        self._made_by = self._identity()

    def _identity(self) -> str:
        """Digest of all that determines the content of blocks beside their sequence and adapter."""
        parts: list[object] = [*self._parts, self._block_bytes]
        if self._since_reset:
            parts.append(self._since_reset)
        folder = self._config.kv_disk_cache_dir
        if folder is not None:
            parts.append(_digest_checkpoint(self._config.model_dir, folder / DIGESTS))
        return blake3(repr(parts).encode()).hexdigest()

    def _claim(self) -> _Copy | None:
        """Memory for one more block. None: what has it is still being read or written."""
        with self._lock:
            while not self._free and self._held:
                self._held.pop(self._order.pop())[1].wait()
                self._counts["evicted"] += 1
            return _Copy(self._memory, self._free) if self._free else None

    def _hold(self, key: BlockKey, copy: _Copy, priority: int, duration_ms: int | None = None) -> None:
        with self._lock:
            self._order.discard(key.name)
            self._order.add(key.name, priority, duration_ms)
            self._held[key.name] = key, copy

    # Methods of the other threads.

    def _fill(
        self, kv: KvTensors, keys: Sequence[BlockKey], blocks: Sequence[int], start: torch.Event | None
    ) -> int:
        sources: list[tuple[object, Tensor]] = []  # they stay until the copies are done
        count = 0

        def write() -> None:
            copy_block(kv, blocks[count], sources[-1][1], store=False)

        try:
            for key in keys:
                found = self._find(key)
                if found is None:
                    break
                sources.append(found)
                self._copies.start(write, start)
                count += 1
                if len(sources) == AHEAD:
                    self._copies.finish()
                    sources.clear()
        except Exception:
            logger.exception("KV blocks could not be copied back")
        self._copies.finish()
        with self._lock:
            self._counts["found"] += count
            for key in reversed(keys[:count]):  # of a prompt the last blocks are evicted first
                if key.name in self._held:
                    self._order.refresh(key.name)
        return count

    def _find(self, key: BlockKey) -> tuple[object, Tensor] | None:
        """The copy of a block, and what keeps its memory."""
        with self._lock:
            held = self._held.get(key.name)
        if held is not None and held[0].header == key.header:
            return held[1], held[1].wait()
        copy = self._claim()
        data = torch.empty(self._block_bytes, dtype=torch.uint8) if copy is None else copy.data
        if not self._read(key, data):
            return None
        with self._lock:
            self._counts["disk"] += 1
        if copy is not None and self._keeps_read:
            self._hold(key, copy, DEFAULT_PRIORITY)
        return copy, data

    def _write(self, key: BlockKey, copy: _Copy) -> None:
        assert self._files is not None
        data = copy.wait().numpy().data

        def write(path: Path) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(_start(key, data))
                file.write(data)

        self._files.put(f"{key.name}.kv", len(_start(key, b"")) + len(data), write)

    def _read(self, key: BlockKey, data: Tensor) -> bool:
        """Fill `data` from a file of this user with exactly this key, whose checksum is right."""
        files, name = self._files, f"{key.name}.kv"
        path = files.path(name) if files is not None else None
        if files is None or path is None:
            return False
        if not files.has(name):
            files.remove(name)
            return False
        view, flags = data.numpy().data, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        reason = "it is damaged, of another content, or another user's"
        try:
            with os.fdopen(os.open(path, flags), "rb") as file:
                about, expected = os.fstat(file.fileno()), len(_start(key, b"")) + len(view)
                if about.st_uid == os.geteuid() and about.st_size == expected:
                    start = file.read(expected - len(view))
                    if file.readinto(view) == len(view) and start == _start(key, view):
                        return True
        except OSError as error:
            reason = str(error.strerror)
        logger.warning("KV disk cache: %s is computed again: %s", name, reason)
        self._counts["damaged"] += 1
        files.remove(name)
        return False


def _start(key: BlockKey, data: bytes | memoryview) -> bytes:
    """What a file has before the data."""
    checksum = blake3(key.header).update(data).digest()
    return MAGIC + len(key.header).to_bytes(4, "little") + key.header + checksum


def _digest_checkpoint(folder: Path, known: Path) -> str:
    """Digest of the settings and weights in a model's folder. Weights are read unless `known`, a file, has
    their digests and they have not changed since.
    """
    own = known.is_file() and known.stat().st_uid == os.geteuid()
    before, digest = (read_json(known) if own else None) or {}, blake3()
    for path in sorted(folder.glob("*config.json")):
        if not path.name.startswith(("generation_", "tokenizer_")):
            digest.update(path.read_bytes())
    for path in weight_files(folder):
        about = path.stat()
        state = [about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]
        found = before.get(str(path.resolve()))
        if not isinstance(found, list) or found[:-1] != state:
            found = [*state, blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()]
        before[str(path.resolve())] = found
        digest.update(f"{path.name} {found[-1]}\n".encode())
    with suppress(OSError):
        part = known.with_name(f"{known.name}.part-{secrets.token_hex(8)}")
        part.write_text(json.dumps(before), encoding="utf-8")
        part.replace(known)
    return digest.hexdigest()

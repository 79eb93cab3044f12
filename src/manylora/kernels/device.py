"""Opens a device and chooses the implementation of its operations. Only this module makes that choice."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manylora.errors import ConfigError, DeviceLostError
from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.transfer import huge_zeros
from manylora.system.resources import available_memory, release_free_memory, usable_processors

logger = logging.getLogger("manylora")

ALIGN_BYTES = 64
ABSENT = ("No CUDA GPUs are available", "Found no NVIDIA driver")  # torch's messages if there is no GPU

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records what a function runs on the device. The result replays it on the current contents of the same
tensors, and returns the same output tensor.
"""


class CudaCapture:
    """A `Capture` that records CUDA graphs on one device. All graphs share a memory pool, so a replay may
    overwrite another graph's output. Each output must be used before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs, because memory allocated on a stream is reused only on that stream.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """function: reads and writes tensors at fixed addresses. It runs once before the recording, to
        compile kernels and allocate workspaces.
        """
        stream, present = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            function()
        present.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may wait for adapter copies meanwhile, which `global` forbids.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = function()
        finally:  # if ending a failed recording fails, torch leaves the thread on its stream
            torch.cuda.set_stream(present)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class CopyStream:
    """Copies from pinned host memory, concurrent with computation and in the order of `start`.

    Copies do not wait for queued kernels, which must not need the targets' old contents. On a device other
    than CUDA, copies are done when `start` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def queued(self) -> torch.Event | None:
        """An event that is set when the kernels queued so far are done. None: they already are."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def start(self, copy: Callable[[], None], after: torch.Event | None = None) -> torch.Event | None:
        """Start copies after an event. Returns one that is set when they are done. None: they are."""
        if self._stream is None:
            copy()
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            copy()
        return self._stream.record_event()

    def hold(self, event: torch.Event) -> None:
        """Make kernels queued from now on wait for these copies. The caller does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Wait for all copies, so that their sources may change."""
        if self._stream is not None:
            self._stream.synchronize()


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, which `CopyStream` can copy to the device asynchronously.

    On a CPU, memory is allocated at the first write; beside a GPU at once. torch's pinned memory is not used,
    because its allocator rounds sizes up to a power of two. Raises RuntimeError, MemoryError.
    """
    if device.type != "cuda":
        return huge_zeros(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGN_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGN_BYTES
    cuda, start = torch.cuda.cudart(), memory.ctypes.data
    torch.cuda.check_error(cuda.cudaHostRegister(start, memory.nbytes, 0))
    weakref.finalize(memory, cuda.cudaHostUnregister, start).atexit = False
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)


class Arrival:
    """A tensor being copied to the host, queued after the kernels that compute it. On a CPU: the tensor
    itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> Tensor:
        """The tensor, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(frozen=True)
class Device:
    """A torch device and its operations.

    capture: records steps as graphs; None: not supported. overlaps: whether it computes while the host
    continues.
    """

    torch: torch.device
    ops: ReferenceOps
    name: str
    capture: Capture | None = None
    overlaps: bool = False

    def activate(self) -> None:
        """Make it the calling thread's current device, on which kernels are launched."""
        if self.torch.type == "cuda":
            torch.cuda.set_device(self.torch)

    def probe(self) -> None:
        """Raises DeviceLostError if the device no longer responds, as a GPU after an illegal access: only a
        new process can use it again.
        """
        if self.torch.type != "cuda":
            return
        try:
            torch.ones(1, device=self.torch).item()
        except torch.OutOfMemoryError:
            return
        except RuntimeError as error:
            raise DeviceLostError(f"{self.name} is lost to this process: {error}") from error

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Peak memory of `run` beyond what is allocated. 0 on a CPU, where it is not run."""
        if self.torch.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        run()
        torch.cuda.synchronize(self.torch)
        peak = torch.cuda.max_memory_allocated(self.torch) - before
        torch.cuda.empty_cache()
        return peak

    def release_memory(self) -> None:
        """Return freed memory to the system, and to other processes on the GPU."""
        release_free_memory()
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Bytes that can still be allocated on the GPU, or on the host within its cgroup's limit."""
        if self.torch.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.torch)
            cached = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
            return free + cached
        return min(_meminfo_available(), available_memory())

    def total_bytes(self) -> int:
        """Total bytes of the GPU or of the host."""
        if self.torch.type == "cuda":
            return torch.cuda.mem_get_info(self.torch)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def open_device(name: str) -> Device:
    """name: auto (a GPU if there is one), cpu, cuda, cuda:N. Raises ConfigError if it is not available."""
    name = _resolved(name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        _limit_threads()
        library = native.load()
        ops = CpuOps() if library is None else CompiledOps(library)
        return Device(device, ops, f"CPU ({torch.get_num_threads()} threads)")
    if device.type != "cuda":
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        reason = _why_no_gpu() or "no CUDA GPU is available"
        raise ConfigError(f"device {name!r} was asked for, but {reason}; use device cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} does not exist: there are {torch.cuda.device_count()} GPUs")
    return _open_cuda(device)


def _limit_threads() -> None:
    """torch counts the processors, not the time that a container's limit leaves of them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))


def _resolved(name: str) -> str:
    """Resolve auto: a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if _has_gpu() else "cpu"


def device_of_rank(name: str, rank: int, count: int) -> str:
    """The device name for one of `count` ranks on this host, each with its own GPU. name: as in
    `open_device`. Raises ConfigError.
    """
    if name.startswith("cuda:"):
        raise ConfigError(
            f"device {name} is one device, and each of {count} ranks has its own: say cuda, and choose with "
            "CUDA_VISIBLE_DEVICES"
        )
    name = _resolved(name)
    if name != "cuda":
        return name
    found = torch.cuda.device_count()
    if count > found:
        raise ConfigError(f"{count} ranks on this host need a GPU each, and it has {found}")
    return f"cuda:{rank}"


def _has_gpu() -> bool:
    """Raises ConfigError for a GPU that cannot be used: falling back to a CPU would be slow without any
    notice.
    """
    if torch.cuda.is_available():
        return True
    reason = _why_no_gpu()
    if reason is not None:
        raise ConfigError(f"there may be a GPU, but it cannot be used: {reason}. Or serve with device cpu")
    return False


def _why_no_gpu() -> str | None:
    """CUDA's own reason, on one line. None if there is simply no GPU, or torch is built without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        return None if reason.startswith(ABSENT) else reason.rstrip(".")
    return None


def _check_launch(ops: ReferenceOps, device: torch.device) -> None:
    """Launch a kernel, for which triton first compiles a helper module. Raises ConfigError."""
    try:
        ops.rms_norm(torch.ones((1, 16), device=device), torch.ones(16, device=device), 1e-5)
    except Exception as error:
        raise ConfigError(
            f"triton cannot launch a kernel ({type(error).__name__}: {error}): it needs a C compiler and "
            "Python's headers (Debian: gcc, python3-dev)"
        ) from error


def _open_cuda(device: torch.device) -> Device:
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    try:
        from manylora.kernels.cuda.ops import CudaOps
    except ImportError as error:
        logger.warning(
            "the GPU's kernels cannot be used (%s); the reference runs, slowly: install triton", error
        )
        return Device(device, ReferenceOps(), name)
    ops = CudaOps()
    _check_launch(ops, device)
    return Device(device, ops, name, CudaCapture(device), overlaps=True)


def _meminfo_available() -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not tell how much memory is available: is /proc mounted?")

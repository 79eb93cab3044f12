"""A fake GPU driver: triton binds and launches kernels as on a GPU, but they do nothing.

triton's own C code runs, linked with a stub of the driver library that only records its arguments. Kernels
are not compiled, so this does not test them. Needs a C compiler and Python's headers, like triton. Call
`install` before the first launch, in a separate process without TRITON_INTERPRET.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A launch is recorded as four bytes of length, the configuration (48 bytes), the ids of its attributes and
# the values of its parameters. A function's handle is the address of an array: the number of parameters, then
# the size of each.
SOURCE = """
#include <stdint.h>
#include <string.h>
typedef struct { unsigned id; char pad[4]; char value[64]; } Attribute;
typedef struct {
  unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count;
} Config;
static char *notes; static uint64_t room, used;
void fake_notes(char *where, uint64_t size) { notes = where; room = size; used = 0; }
uint64_t fake_used(void) { return used; }
static void put(const void *from, uint64_t size) {
  if (used + size <= room) memcpy(notes + used, from, size);
  used += size;
}
int cuLaunchKernelEx(const Config *config, const int *sizes, void **values, void **extra) {
  if (!room) return 0;
  uint64_t began = used;
  uint32_t length = 0;
  put(&length, 4);
  put(&sizes, 8); put(config->grid, 28); put(&config->stream, 8); put(&config->count, 4);
  for (unsigned i = 0; i < config->count; i++) put(&config->attributes[i].id, 4);
  for (int i = 0; i < sizes[0]; i++) put(values[i], sizes[i + 1]);
  length = used - began - 4;
  if (began + 4 <= room) memcpy(notes + began, &length, 4);
  return 0;
}
int cuPointerGetAttribute(uint64_t *to, int name, uint64_t address) { *to = address; return 0; }
int cuCtxGetCurrent(void **to) { *to = (void *)1; return 0; }
int cuGetErrorString(int code, const char **to) { *to = "none"; return 0; }
"""
OTHERS = (
    "cuCtxSetCurrent cuCtxSetLimit cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxRetain "
    "cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuModuleGetFunction cuModuleLoadData "
    "cuOccupancyMaxActiveClusters cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuCtxGetLimit "
    "cuDriverGetVersion"
)
SIZES = {"i1": 1, "u1": 1, "i32": 4, "u32": 4, "fp32": 4, "f32": 4, "i64": 8, "u64": 8}
NOTED_BYTES = 2**24
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
"""The compiler that triton would use."""


def why_not() -> str | None:
    """The reason why this machine cannot use the fake driver, or None if it can."""
    if COMPILER is None:
        return "no C compiler was found"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers were not found"
    return None


def _build(folder: Path) -> Path:
    assert COMPILER is not None, why_not()
    folder.mkdir(parents=True, exist_ok=True)
    stubs = "".join(f"int {name}(void) {{ return 0; }}\n" for name in OTHERS.split())
    (folder / "fake.c").write_text(SOURCE + stubs, encoding="utf-8")
    library = folder / "libcuda.so.1"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "fake.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


class FakeDriver:
    """The stub library, and the launches that it records."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_used.restype = ctypes.c_uint64
        self._library.fake_notes.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        self._buffer = ctypes.create_string_buffer(NOTED_BYTES)
        self.compiled: list[Any] = []
        self.device = 0

    def noted(self, run: Callable[[], object]) -> list[bytes]:
        """What the driver receives for each launch in `run`: configuration, attributes, parameters."""
        self._library.fake_notes(self._buffer, NOTED_BYTES)
        try:
            run()
        finally:
            used = int(self._library.fake_used())
            self._library.fake_notes(self._buffer, 0)
        assert used <= NOTED_BYTES, "the buffer for recorded launches is too small"
        found, at = [], 0
        while at < used:
            length = int.from_bytes(self._buffer[at : at + 4], "little")
            found.append(self._buffer[at + 4 : at + 4 + length])
            at += 4 + length
        return found


def install(folder: Path) -> FakeDriver:
    """Make the fake driver triton's active driver. folder: where libraries are built."""
    library = _build(folder)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
    driver = FakeDriver(library)

    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.compiler import ASTSource, CompiledKernel, make_backend
    from triton.runtime import driver as triton_driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    numbers = itertools.count(1)

    class Gpu(CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = lambda: driver.device
            self.get_current_stream = lambda device: 1000 + device

        def get_current_target(self) -> GPUTarget:
            return target

    class Kernel:
        launch_metadata = CompiledKernel.launch_metadata

        def __init__(self, source: Any, options: Any) -> None:
            fields = {"shared": next(numbers), "launch_cooperative_grid": False, "tensordesc_meta": None}
            for kind in ("global", "profile"):
                fields |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}
            self.src, self.name = source, source.fn.__name__
            self.metadata = SimpleNamespace(**options.__dict__ | fields)
            self.packed_metadata = backend.pack_metadata(self.metadata)
            types = [t for t in source.signature.values() if t != "constexpr"]
            sizes = [8 if t.startswith("*") else SIZES[t] for t in types] + [8, 8]
            self._sizes = (ctypes.c_int * (len(sizes) + 1))(len(sizes), *sizes)
            self.function = ctypes.addressof(self._sizes)
            self.run = CudaLauncher(source, self.metadata)

        def _init_handles(self) -> None:
            pass

    def compile_nothing(
        kernel: Any, key: str, types: Any, device: int, constants: Any, options: Any, attrs: Any, warm: bool
    ) -> Kernel:
        made = Kernel(ASTSource(kernel, types, constants, attrs), options)
        kernel.device_caches[device][0][key] = made
        driver.compiled.append(made)
        return made

    JITFunction._do_compile = compile_nothing
    triton_driver.set_active(Gpu())
    return driver

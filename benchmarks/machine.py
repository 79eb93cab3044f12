"""Describes the machine of a measurement, and the CPU time of other processes meanwhile. Linux only."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

QUIET = 0.25
"""CPUs that other processes may use during a run; above this, its figures are marked as unreliable."""

# Flags of /proc/cpuinfo and their common names. Of WIDTHS, the first one found is used.
WIDTHS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("sve", "SVE"), ("asimd", "NEON"))
EXTRAS = (
    ("avx512_vnni", "VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx512_bf16", "BF16"), ("amx_tile", "AMX"),
    ("asimddp", "dot product"), ("i8mm", "I8MM"), ("bf16", "BF16"),
)  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Machine:
    """cores: those that this process may use. caches: such as "L2 512 KiB", per core or group of cores."""

    processor: str
    instructions: str
    cores: int
    caches: tuple[str, ...]
    memory_gib: float
    huge_pages: str
    virtual: bool
    date: str

    @property
    def short(self) -> str:
        """A short description for captions and headings."""
        plural = "core" if self.cores == 1 else "cores"
        return f"{self.processor} ({self.instructions}), {self.cores} {plural}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"short": self.short}

    def __str__(self) -> str:
        where = "virtual machine" if self.virtual else "no virtual machine"
        return (
            f"{self.short}, {where}; {', '.join(self.caches)}; {self.memory_gib:.0f} GiB, "
            f"transparent huge pages: {self.huge_pages}; {self.date}"
        )


def see_machine() -> Machine:
    cpu = _cpuinfo()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    width = next((name for flag, name in WIDTHS if flag in flags), platform.machine())
    names = [width, *dict.fromkeys(name for flag, name in EXTRAS if flag in flags)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return Machine(
        _processor(cpu), ", ".join(names), len(os.sched_getaffinity(0)), _caches(), round(memory, 1),
        pages.partition("[")[2].partition("]")[0] or "none", "hypervisor" in flags,
        datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _processor(cpu: dict[str, str]) -> str:
    """The processor's own name. AMD's generation is added, because a virtual machine may hide the model."""
    name = cpu.get("model name") or cpu.get("Model") or f"an {platform.machine()} processor"
    for mark in ("(R)", "(TM)", "(tm)", "Processor"):
        name = name.replace(mark, "")
    name = " ".join(name.split())
    if cpu.get("vendor_id") == "AuthenticAMD" and "Zen" not in name:
        family, model = int(cpu.get("cpu family", 0)), int(cpu.get("model", 0))
        newer = family == 25 and (0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or model >= 0xA0)
        zen = {23: "Zen 1 or 2", 25: "Zen 4" if newer else "Zen 3", 26: "Zen 5"}.get(family)
        return f"{name} {zen}" if zen else name
    return name


def _caches() -> tuple[str, ...]:
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(folder / "type")
        if kind != "Instruction":
            size, level = int(_read(folder / "size").rstrip("K") or 0), _read(folder / "level")
            found.append(f"L{level} {size} KiB" if size < 1024 else f"L{level} {size // 1024} MiB")
    return tuple(found)


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor."""
    first = _read("/proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def family(root: int) -> set[int]:
    """The ids of a process and all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat(stat):
            parents[int(stat.parent.name)] = int(fields[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _stat(path: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if the process has ended."""
    return _read(path).rpartition(")")[2].split()


class Others:
    """Measures the CPUs that others use, from the creation of this object on: other processes, and other
    virtual machines on the same host (steal).

    A child process that starts and ends in between counts as ours only if its parent has waited for it.
    """

    def __init__(self) -> None:
        self._all, self._ours, self._start = all_ticks(), own_ticks(), time.monotonic()

    def cpus(self) -> float:
        seconds = time.monotonic() - self._start
        others = (all_ticks() - self._all) - (own_ticks() - self._ours)
        return max(0.0, others / TICKS / seconds) if seconds > 0 else 0.0


def all_ticks() -> int:
    """Busy ticks of all processors: user, nice, system, interrupts, steal."""
    fields = [int(field) for field in _read("/proc/stat").splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4]


def own_ticks() -> int:
    """Ticks of this process and its descendants, including children that have ended."""
    return sum(
        sum(map(int, fields[11:15]))
        for pid in family(os.getpid())
        if (fields := _stat(Path(f"/proc/{pid}/stat")))
    )


def wait_for_quiet(seconds: float) -> float:
    """Wait until others use at most QUIET CPUs during one second, but not longer than `seconds`.

    Returns the CPUs that others used in the last second."""
    end = time.monotonic() + seconds
    while True:
        others = Others()
        time.sleep(1)
        share = others.cpus()
        if share <= QUIET or time.monotonic() >= end:
            return share

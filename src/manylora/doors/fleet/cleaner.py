"""Cleaner: a process beside `manylora fleet` that cleans up after it, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manylora.doors.triton.launcher.processes import end_all, marked
from manylora.system.folders import remove_unless_held

MARK = "MANYLORA_FLEET"  # environment variable of every process that Ray starts for a fleet: its folder
TITLE = b"ray::"
ORDERLY = b"."
TRIES, PAUSE_S = 50, 0.1  # for the system to release the lock of a killed process
END_S = 15.0


@contextmanager
def cleaned(folder: Path) -> Iterator[None]:
    """Processes started within the block, and the folder, end with it, or with this process."""
    # In its own session, so that signals of the terminal do not end it.
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    # Temporary files of a killed replica are removed with ours.
    given, own = dict(os.environ), {MARK: str(folder), "TMPDIR": str(folder)}
    os.environ |= own
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
        os.environ |= {name: given[name] for name in own if name in given}
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(ORDERLY, END_S)


def end_started(folder: Path) -> None:
    """Kill the processes that Ray started within `cleaned`."""
    mark = f"{MARK}={folder}".encode()

    def started() -> list[int]:
        found = list(marked(mark))
        for path in Path("/proc").glob("[0-9]*"):  # a process title of Ray has overwritten the environment
            with suppress(OSError):
                is_ray = (path / "cmdline").read_bytes().startswith(TITLE)
                if is_ray and any(one.readlink().is_relative_to(folder) for one in (path / "fd").iterdir()):
                    found.append(int(path.name))
        return found

    end_all(started)


def main() -> None:
    folder = Path(sys.argv[1])
    orderly = sys.stdin.buffer.read(1)  # end of input means that the other process ended
    end_started(folder)
    for _ in range(0 if orderly else TRIES):
        if remove_unless_held(folder) or not folder.exists():
            return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()

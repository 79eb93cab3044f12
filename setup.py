"""Compiles the C code for every level of instruction sets. The rest of the build is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

SRC = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SRC))
from manylora.kernels import native
from manylora.system.compiler import Compiler, Source, compile_library, find_zig
from manylora.system.processor import LEVELS, Level

PACKAGE = SRC / "manylora"
# Libraries other than the kernels. They are compiled only for the lowest level of each architecture.
GUARDS = [
    Source(Path(name).name, (PACKAGE / f"{name}.c",))
    for name in ("system/lifeline", "wire/shape_guard", "wire/lock_guard")
]
MADE = [
    *((native.SOURCE, level) for level in LEVELS),
    *((guard, level) for guard in GUARDS for level in LEVELS if not level.options),
]


def make(zig: Compiler, source: Source, level: Level, path: Path) -> None:
    """Compile a library to `path`, or copy it if it exists. The name contains a digest of everything that a
    library is made from, so an existing library is up to date."""
    there = source.prebuilt / path.name
    if not there.exists():
        compile_library(zig, source, level, path)
    elif path != there:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(there, path)


class BuildKernels(Command):
    """Cross-compiles the libraries with zig. Without zig, they are compiled at the first start."""

    editable_mode = False
    build_lib = ""

    def initialize_options(self) -> None:
        self.build_lib = ""

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        zig = find_zig()
        if zig is None:
            self.warn("the package ziglang is missing: the C code will be compiled at the first start")
            return
        wanted = {self._path(source, level): (source, level) for source, level in MADE}
        for old in {old for path in wanted for old in path.parent.glob("*.so")} - wanted.keys():
            old.unlink()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {path: pool.submit(make, zig, *made, path) for path, made in wanted.items()}
        for path, job in jobs.items():
            try:
                job.result()
            except (OSError, subprocess.SubprocessError) as error:
                self.warn(f"{path.name} will be compiled at the first start: {error}")

    def _path(self, source: Source, level: Level) -> Path:
        root = SRC if self.editable_mode else Path(self.build_lib)
        return root / source.prebuilt.relative_to(SRC) / source.file_name(level)

    def get_source_files(self) -> list[str]:
        return [os.path.relpath(file) for source in (native.SOURCE, *GUARDS) for file in source.files]

    def get_outputs(self) -> list[str]:
        paths = [] if self.editable_mode else [self._path(*made) for made in MADE]
        return [str(path) for path in paths if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012


setup(cmdclass={"build": Build, "build_kernels": BuildKernels})

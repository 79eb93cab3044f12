"""Compiles the C code of a wheel, for every level of instruction sets. The rest is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

SRC = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SRC))
from manylora.kernels import native
from manylora.system.compiler import LEVELS, Level, Source, compile_library, find_zig

PACKAGE = SRC / "manylora"
# Libraries other than the kernels. They are compiled only for the lowest level of each architecture.
GUARDS = [
    Source(Path(name).name, (PACKAGE / f"{name}.c",))
    for name in (
        "system/lifeline",
        "doors/triton/shape_guard",
        "doors/triton/lock_guard",
        "doors/triton/launcher/request_guard",
    )
]
MADE = [
    *((native.SOURCE, level) for level in LEVELS),
    *((guard, level) for guard in GUARDS for level in LEVELS if not level.options),
]


class BuildKernels(Command):
    """Cross-compiles the libraries with zig. Without zig they are compiled at the first start, as those of
    an editable installation are: for its machine alone.
    """

    editable_mode = False
    build_lib = ""

    def initialize_options(self) -> None:
        self.build_lib = ""

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        if self.editable_mode:
            return
        zig = find_zig()
        if zig is None:
            self.warn("the package ziglang is missing: the C code will be compiled at the first start")
            return
        for source, level in MADE:
            path = self._path(source, level)
            try:
                compile_library(zig, source, level, path)
            except (OSError, subprocess.SubprocessError) as error:
                self.warn(f"{path.name} will be compiled at the first start: {error}")

    def _path(self, source: Source, level: Level) -> Path:
        return Path(self.build_lib) / source.prebuilt.relative_to(SRC) / source.file_name(level)

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

"""Protects the documents: what they show as commands and programs runs as it stands, in its order.

Blocks of Markdown say what they are: `bash` and `python` are run, `text` below one is what it prints (numbers
may differ, `…` stands for any text). Others are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from selection import extended
from servers import ROOT, free_ports
from waiting import answers

NOT_RUN = {
    "CONTRIBUTING.md": "the checks of a change",
    "docs/extending.md": "code to write",
    "docs/deploy.md": "needs a container engine, systemd, or Ray (the extra `fleet`)",
    "docs/hardware.md": "needs a GPU",
    "examples/demo/README.md": "trains for an hour",
    "examples/smollm2/README.md": "trains for half an hour",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
SERVER = re.compile(r"(\S*/)?manylora serve |make serve")
LAUNCH = re.compile(r"manylora triton (?!--stop)")  # takes the port of a server that was started before
SKIPPED = re.compile(r"make (?!serve)|pip install")  # other tests run what is behind these
HTTP_PORTS = (8000, 8003)
PORTS = (*HTTP_PORTS, 8001, 8002)
READY = ("/v2/health/ready", "/health")
START_S, COMMAND_S = 180, 240


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


RUN = [
    str(page.relative_to(ROOT))
    for page in PAGES
    if str(page.relative_to(ROOT)) not in NOT_RUN
    and any(kind in ("bash", "python") for kind, _ in blocks(page))
]
FIRST = "README.md"  # the others run in `make test-all`, two of them for a minute or more


class Shell:
    """A clone in which a page's commands run one after the other; servers are left running."""

    def __init__(self, clone: Path) -> None:
        self._clone = clone
        self._server: subprocess.Popen[bytes] | None = None
        self._assigned = ""  # variables of the commands so far
        self._programs = ""
        self._env = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}

    def bash(self, text: str) -> str:
        output = ""
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if SERVER.match(line):
                self._serve(line)
            elif line.strip() and not SKIPPED.match(line):
                if LAUNCH.match(line):
                    self.close()
                output += self._run(["bash", "-euo", "pipefail", "-c", f"{self._assigned}\n{line}"])
            if re.match(r"\w+=", line):
                self._assigned += f"{line}\n"
        return output

    def python(self, text: str) -> str:
        """Programs of one page share their names, as in a notebook."""
        before, self._programs = self._programs, f"{self._programs}\n{text}"
        silent = (
            f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n exec({before!r})\n"
        )
        return self._run([str(ROOT / ".venv/bin/python"), "-c", f"{silent}\n{text}"])

    def close(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGINT)
            self._server.wait(120)
            self._server = None

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self._clone, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        return done.stdout

    def _serve(self, line: str) -> None:
        self.close()
        port = int((re.search(r"--(?:http[-_])?port[ =](\d+)", line) or [0, 8000])[1])
        log = self._clone / "server.log"
        command = ["bash", "-c", f"{self._assigned}\nexec {line}"]
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                command, cwd=self._clone, env=self._env, stdout=file, stderr=file, start_new_session=True
            )
        end = time.monotonic() + START_S
        while not any(answers(f"http://localhost:{port}{path}") for path in READY):
            assert self._server.poll() is None and time.monotonic() < end, f"{line}\n{log.read_text()}"
            time.sleep(0.1)


def free(port: int) -> bool:
    with closing(socket.socket()) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    taken = [port for port in PORTS if not free(port)]
    if taken:
        pytest.skip(f"the documents' commands need port {taken[0]}, which is in use")
    clone = tmp_path / "manylora"
    leave = shutil.ignore_patterns(".*", "__pycache__", "build", "tests", "*.egg-info")
    shutil.copytree(ROOT, clone, ignore=leave)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    shell = Shell(clone)
    yield shell
    shell.close()
    for port in HTTP_PORTS:
        subprocess.run([ROOT / ".venv/bin/manylora", "triton", "--stop", f"--http_port={port}"], check=False)


def as_pattern(line: str) -> str:
    words = re.split(r"\d+(?:\.\d+)?", line.strip())
    return r"\d+(?:\.\d+)?".join(".*".join(map(re.escape, part.split("…"))) for part in words)


@pytest.mark.parametrize("name", [FIRST, *extended(*(name for name in RUN if name != FIRST))])
@pytest.mark.timeout(600)
def test_what_a_page_shows_runs(name: str, shell: Shell) -> None:
    output = ""
    for kind, text in blocks(ROOT / name):
        if kind == "bash":
            output = shell.bash(text)
        elif kind == "python":
            output = shell.python(text)
        elif kind == "text" and output:
            for line in filter(str.strip, text.splitlines()):
                assert re.search(as_pattern(line), output), f"{name} shows {line!r}, but it printed\n{output}"


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert all(kind for kind, _ in blocks(page)), f"{page.name} has a block without a language"
        rest = BLOCK.sub("", text)
        indented = [line for line in re.findall(r"(?:\n\n) {4}(\S.*)", rest) if not line.startswith("-")]
        assert not indented, f"{page.name}: {indented[0]!r} is no ``` block, so nothing runs it"


def test_the_demo_from_end_to_end() -> None:
    """`make demo`, with the toy: it replaces and adds an adapter while Triton serves, and leaves nothing."""
    flags = [
        f"--{kind}_port={port}" for kind, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/demo/run.py", "demo", "--offline", *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("While it serves")
    assert re.search(r"base model +chinese\n[- ]+\nWashington, D\.C\. +华盛顿\n", before), done.stdout
    assert re.search(r"japanese +chinese\n[- ]+\nワシントンD\.C\. +Washington, D\.C\.\n", after), done.stdout
    assert "nothing is left: no process, no port, no shared memory" in after
    assert "日本はアジアにある国です。日本の首都は東京です。" in after

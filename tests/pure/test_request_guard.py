"""Protects request_guard: what it refuses in tritonserver, and that no other process has it."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from manylora.launcher import installation
from manylora.launcher.installation import KNOWN, preload_guard
from manylora.system.compiler import find_compiler

CORE = """
#include <string.h>
#include <stdint.h>
const char *TRITONSERVER_ErrorNew(int code, const char *text) { return strdup(text); }
const char *TRITONSERVER_ServerNew(void) { return 0; }
const char *TRITONSERVER_InferenceRequestNew(void **r, void *s, const char *m, int64_t v) { return "new"; }
const char *TRITONSERVER_InferenceRequestSetId(void *r, const char *id) { return "id"; }
const char *TRITONSERVER_InferenceRequestAddInput(void *r, const char *n, int t, const int64_t *s, uint64_t d)
{ return "input"; }
const char *TRITONSERVER_InferenceRequestSetDoubleParameter(void *r, const char *n, double v)
{ return v == 0.5 ? "parameter" : "changed"; }
const char *TRITONSERVER_ServerModelBatchProperties(void *s, const char *m, int64_t v, uint32_t *f, void **p)
{ return "properties"; }
"""
FRONT = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
const char *TRITONSERVER_ServerNew(void);
const char *TRITONSERVER_InferenceRequestNew(void **, void *, const char *, int64_t);
const char *TRITONSERVER_InferenceRequestSetId(void *, const char *);
const char *TRITONSERVER_InferenceRequestAddInput(void *, const char *, int, const int64_t *, uint64_t);
const char *TRITONSERVER_InferenceRequestSetDoubleParameter(void *, const char *, double);
const char *TRITONSERVER_ServerModelBatchProperties(void *, const char *, int64_t, uint32_t *, void **);
static int64_t shape[32] = {1, 65536, 1, 1};
static char id[1026];
static void input(int type, int dimensions)
{ puts(TRITONSERVER_InferenceRequestAddInput(0, "a", type, shape, dimensions)); }
int main(void)
{
    TRITONSERVER_ServerNew();
    puts(TRITONSERVER_InferenceRequestNew(0, 0, "m", 1));
    memset(id, 'x', 1024);
    puts(TRITONSERVER_InferenceRequestSetId(0, id));
    id[1024] = 'x';
    puts(TRITONSERVER_InferenceRequestSetId(0, id));
    for (int i = 4; i < 32; i++) shape[i] = 1;
    input(13, 16); input(13, 17);
    shape[2] = 2; input(13, 4); input(8, 4);
    shape[2] = INT64_MAX; input(13, 4);
    shape[2] = -1; input(13, 4);
    for (int i = 0; i < 1020; i++) TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5);
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    TRITONSERVER_InferenceRequestNew(0, 0, "m", 1);
    puts(TRITONSERVER_InferenceRequestSetDoubleParameter(0, "p", 0.5));
    puts(TRITONSERVER_ServerModelBatchProperties(0, "m", 1, 0, 0));
    puts(getenv("LD_PRELOAD") ? getenv("LD_PRELOAD") : "nothing");
}
"""
EXPECTED = [
    "new", "id", "the id of a request has at most 1024 bytes", "input",
    "input 'a' has 17 dimensions, of at most 16", "input 'a' has 131072 strings, of at most 65536", "input",
    "input 'a' has 9223372036854775807 strings, of at most 65536", "input", "parameter",
    "a request has at most 1024 inputs, outputs and parameters", "parameter",
    "outputs cannot be classified: leave out their parameter 'classification'",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that calls a library as tritonserver's front ends call its core."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no compiler")
    folder = tmp_path_factory.mktemp("server")
    (folder / "core.c").write_text(CORE)
    (folder / "front.c").write_text(FRONT)
    core = str(folder / "libcore.so")
    quiet = [*compiler.command, "-w"]
    subprocess.run([*quiet, "-shared", "-fPIC", str(folder / "core.c"), "-o", core], check=True)
    program = folder / "front"
    link = [core, f"-Wl,-rpath,{folder}"]
    subprocess.run([*quiet, str(folder / "front.c"), *link, "-o", str(program)], check=True)
    return program


def lines(server: Path, environment: dict[str, str]) -> list[str]:
    ran = subprocess.run([server], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


@pytest.mark.parametrize("others", ["", "libc.so.6:libm.so.6"])
def test_it_refuses_in_the_server_and_leaves_its_environment(
    server: Path, tmp_path: Path, others: str
) -> None:
    given = dict(os.environ) | ({"LD_PRELOAD": others} if others else {})
    assert lines(server, given)[2:4] == ["id", "input"]
    environment = preload_guard(server, given, tmp_path)
    assert lines(server, environment) == [*EXPECTED, others or "nothing"]
    shell = subprocess.run(
        ["sh", "-c", "printenv LD_PRELOAD"], env=environment, capture_output=True, text=True, check=True
    )
    assert shell.stdout.strip() == environment["LD_PRELOAD"], "a script that starts tritonserver passes it on"


@pytest.mark.parametrize(
    ("why", "text"),
    [("form", "another form"), ("compiler", "no C compiler"), ("folder", "a space or a colon")],
)
def test_without_it_the_server_starts_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, text: str
) -> None:
    server, folder = tmp_path / "tritonserver", tmp_path / ("a b" if why == "folder" else "a")
    server.write_bytes(b"" if why == "form" else b"\x7fELF" + KNOWN)
    folder.mkdir()
    library = None if why == "compiler" else server
    monkeypatch.setattr(installation, "find_common_library", lambda source: library)
    with caplog.at_level(logging.WARNING, "manylora.launcher"):
        assert preload_guard(server, {"a": "b"}, folder) == {"a": "b"}
    assert len(caplog.messages) == 1
    assert text in caplog.text

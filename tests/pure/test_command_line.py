"""Protects the parser of command lines: spellings, suggestions, what it says of other programs' flags; and
the command lines that people have for tools/fill_template.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manylora.doors.cli import triton
from manylora.system.command_line import Parser


def refused(parser: Parser, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def parser() -> Parser:
    found = Parser(prog="it", instead={"other_flag": "use --num_things"})
    found.add_argument("--num_things", type=int)
    found.add_argument("--with-dashes")
    found.add_argument_group("more").add_argument("--in_group", action="append")
    commands = found.add_subparsers(dest="command")
    commands.add_parser("one").add_argument("--in_command")
    return found


def test_dashes_and_underscores_are_the_same_in_names_and_not_in_values(parser: Parser) -> None:
    line = ["--num-things=3", "--with_dashes", "a_b-c", "--in-group=x_y-z", "one", "--in-command", "v"]
    found = parser.parse_args(line)
    assert (found.num_things, found.with_dashes, found.in_group) == (3, "a_b-c", ["x_y-z"])
    assert (found.command, found.in_command) == ("one", "v")


def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(parser, capsys, "--num-thing=3")
    told = "it: unrecognized arguments: --num-thing=3; did you mean --num_things? (the options: it --help)\n"
    assert said == told
    assert "did you mean --in_command?" in refused(parser, capsys, "one", "--in_comand", "3")
    assert "did you mean" not in refused(parser, capsys, "--zzz")
    assert "--num_things: invalid int value" in refused(parser, capsys, "--num_things", "many")


def test_a_flag_of_another_program_is_answered_with_what_to_use(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--other-flag=1", "--other_flag"):
        assert f"{flag.partition('=')[0]} is not taken here: use --num_things" in refused(
            parser, capsys, flag
        )


@pytest.mark.parametrize(
    ("flag", "use"),
    [
        ("--port", "use --http_port, --grpc_port and --metrics_port"),
        ("--max_lora_rank", "use --set max_lora_rank=VALUE"),
        ("--model-control-mode", "--triton-arg=--model-control-mode=VALUE"),
    ],
)
def test_the_triton_launcher_knows_what_other_servers_call_its_settings(
    flag: str, use: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert use in refused(triton.argument_parser(), capsys, "MODEL", flag, "1")


def test_a_command_of_another_program_is_answered_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="it", instead={"two_things": "give one"})
    parser.add_subparsers(metavar="COMMAND").add_parser("one")
    assert "(choose from" in (said := refused(parser, capsys, "two-things")) and "; give one (the" in said


TOOL = Path(__file__).resolve().parents[2] / "tools" / "fill_template.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from fill_template import split

    assert split("a,b,c", ",") == ["a", "b", "c"]
    assert split("a\\,b\\,c", ",") == ["a,b,c"]
    assert split("a\\,b\\,c", ":") == ["a,b,c"]


def test_prints_or_writes_and_leaves_what_is_not_named(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one} y: ${two} q: ${max_queue_size} d: ${max_queue_delay_microseconds}\n")
    printed = run(str(file), "one:1;2")
    assert printed.stdout == "x: 1;2 y: ${two} q: 1024 d: 0\n\n"
    assert "${one}" in file.read_text()
    assert run("-i", str(file), "one:C\\\\:d\\,e").stdout == ""
    assert file.read_text() == "x: C:d,e y: ${two} q: 1024 d: 0\n"
    assert run("-i", str(file), "two:").returncode == 0
    assert file.read_text() == "x: C:d,e y:  q: 1024 d: 0\n"


def test_runs_on_a_python_that_has_nothing_installed(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one}")
    subprocess.run([sys.executable, "-S", TOOL, "-i", file, "one:1"], check=True)
    assert file.read_text() == "x: 1"


def test_refuses_unknown_keys_and_missing_colons(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one}")
    unknown = run("-i", str(file), "three:1")
    assert unknown.returncode == 1
    assert f"key 'three' does not exist in the file {file}." in unknown.stderr
    assert run(str(file), "one").returncode == 1
    assert file.read_text() == "x: ${one}"

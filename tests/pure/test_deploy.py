"""Protects those who build an image, or copy a unit or the compose file: these programs take the commands in
them, and what they name is there."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from manylora.cli import main
from manylora.doors.cli import triton
from manylora.doors.http import arguments, options

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
UNITS = [DEPLOY / f"manylora-{name}.service" for name in ("triton", "serve")]
IMAGES = ("Dockerfile", "Dockerfile.cuda")


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser["Service"]


def instructions(image: str) -> list[tuple[str, str]]:
    """(name, rest) of each instruction of a Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / image).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def copied(image: str) -> list[str]:
    """What it copies from the repository."""
    lines = [rest.split() for name, rest in instructions(image) if name == "COPY"]
    return [source for words in lines if not words[0].startswith("--from") for source in words[:-1]]


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied(image):
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    # Links of the package lead to folders that are copied beside it.
    for link in (ROOT / "src" / "manylora").iterdir():
        if link.is_symlink():
            assert link.resolve().relative_to(ROOT).parts[0] in copied(image)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_what_is_pinned_and_runs_as_nobody_special(image: str) -> None:
    found = instructions(image)
    installs = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    torch = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    assert torch in installs[0]
    assert "-c /opt/manylora/constraints.txt" in installs[1]
    assert ("COPY", "constraints.txt /opt/manylora/") in found
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[([\w,]+)\]", installs[1])[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert next(rest for name, rest in found if name == "USER") == "manylora"
    for _, rest in (one for one in found if one[0] == "RUN"):
        subprocess.run(["sh", "-n", "-c", rest], check=True)


def test_the_entry_point_is_a_command(capsys: pytest.CaptureFixture) -> None:
    for image in IMAGES:
        said = dict(instructions(image))
        entry, default = yaml.safe_load(said["ENTRYPOINT"]), yaml.safe_load(said["CMD"])
        assert entry == ["manylora"]
        assert main(default) == 0
        assert "usage: manylora" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [shlex.split(unit(UNITS[0])["ExecStart"])[1:], SERVICES["triton"]["command"]]
)
def test_the_launcher_takes_its_command(command: list[str]) -> None:
    assert command[0] == "triton"
    given = triton.argument_parser().parse_args(command[1:])
    assert given.foreground
    assert given.lora_root


@pytest.mark.parametrize(
    "command", [shlex.split(unit(UNITS[1])["ExecStart"])[1:], SERVICES["serve"]["command"]]
)
def test_serve_takes_its_command(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The folders named are those of the machine it runs on.
    monkeypatch.setattr(options.Path, "is_dir", lambda _: True)
    assert command[0] == "serve"
    assert arguments.parse_options(command[1:]).lora_root


def test_they_come_back_and_may_drain() -> None:
    for path, drain in zip(UNITS, (30, 30), strict=True):
        service = unit(path)
        assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
        assert int(service["TimeoutStopSec"]) > drain
        assert service["ExecStart"].split()[0].endswith("bin/manylora")
    for one in SERVICES.values():
        assert one["restart"] == "unless-stopped"
        assert int(one["stop_grace_period"].removesuffix("s")) > 30


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_sees_what_its_command_names(name: str) -> None:
    service: dict[str, Any] = SERVICES[name]
    mounts = {re.sub(r":ro$", "", volume).rpartition(":")[2] for volume in service["volumes"]}
    words = {word.rpartition("=")[2] for word in service["command"]}
    assert {word for word in words if word.startswith("/")} <= mounts
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "home" in COMPOSE["volumes"]
    compile(service["healthcheck"]["test"][3], name, "exec")
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("/opt/manylora/.venv/bin/manylora", "/bin/true")
    (tmp_path / path.name).write_text(text.replace("User=manylora\n", ""), encoding="utf-8")
    said = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / path.name], capture_output=True, text=True, check=False
    )
    assert path.name not in said.stderr, said.stderr

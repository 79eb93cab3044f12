"""Protects those who copy a unit or the compose file: their commands are ones that these programs take."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest
import yaml

from manylora.launcher.arguments import argument_parser
from manylora.openai import options

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
UNITS = [DEPLOY / f"manylora-{name}.service" for name in ("triton", "serve")]


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser["Service"]


@pytest.mark.parametrize("command", [shlex.split(unit(UNITS[0])["ExecStart"]), COMPOSE["triton"]["command"]])
def test_the_launcher_takes_its_command(command: list[str]) -> None:
    assert command[1] == "launch_triton_server.py"
    assert argument_parser().parse_args(command[2:]).foreground


@pytest.mark.parametrize("command", [shlex.split(unit(UNITS[1])["ExecStart"]), COMPOSE["serve"]["command"]])
def test_serve_takes_its_command(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folders named are those of the machine it runs on.
    monkeypatch.setattr(options.Path, "is_dir", lambda _: True)
    assert command[0].endswith("manylora")
    assert options.parse_options(command[2:]).lora_root


def test_they_come_back_and_may_drain() -> None:
    for path, drain in zip(UNITS, (30, 30), strict=True):
        service = unit(path)
        assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
        assert int(service["TimeoutStopSec"]) > drain
    for one in COMPOSE.values():
        assert one["restart"] == "unless-stopped"
        assert int(one["stop_grace_period"].removesuffix("s")) > 30

"""Arguments of launch_triton_server.py, and the checks before a start."""

from __future__ import annotations

import errno
import re
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping
from pathlib import Path

from manylora.config.foreign import LAUNCH_SCRIPT, LAUNCHER
from manylora.config.repository import ENGINE, repository_config
from manylora.errors import ConfigError
from manylora.group.rank_info import RankInfo, find_rank, is_one_of_several
from manylora.launcher.processes import why_taken
from manylora.launcher.templates import FOLDER, check_filled
from manylora.system.command_line import Parser

PORTS = ("http_port", "grpc_port", "metrics_port")


def argument_parser(instead: Mapping[str, str] | None = None) -> Parser:
    """instead: further flags that are not accepted, with what to use."""
    parser = Parser(
        description="Start tritonserver with a model repository and keep it alive.",
        instead={**LAUNCHER.refused, **(instead or {})},
    )
    parser.add_argument(
        "--world_size",
        type=int,
        metavar="N",
        help="number of engine ranks, each with its own GPU; they share every layer, unless the parameters "
        "tensor_parallel_size and pipeline_parallel_size say otherwise; default: their product",
    )
    parser.add_argument("--tritonserver", help="the executable; default: the container's, PATH, or the wheel")
    parser.add_argument("--grpc_port", type=int, default=8001, metavar="N", help="default: 8001")
    parser.add_argument("--http_port", type=int, default=8000, metavar="N", help="default: 8000")
    parser.add_argument("--metrics_port", type=int, default=8002, metavar="N", help="default: 8002")
    parser.add_argument(
        "--address",
        default="0.0.0.0",
        help="address of all three ports, IPv6 without brackets; default: 0.0.0.0, all interfaces",
    )
    parser.add_argument(
        "--force", "-f", action="store_true", help="start even if another tritonserver is running"
    )
    parser.add_argument("--log", action="store_true", help="write a verbose server log to --log-file")
    parser.add_argument("--log-file", default="triton_log.txt")
    parser.add_argument(
        "--no-mpi",
        action="store_true",
        help="no effect: the launcher never calls mpirun, but mpirun may call it",
    )
    parser.add_argument(
        "--model_repo", type=Path, default=FOLDER, metavar="DIR", help="a filled model repository"
    )
    parser.add_argument("--tensorrt_llm_model_name", default="tensorrt_llm", help=SUPPRESS)
    parser.add_argument("--multi-model", action="store_true", help=SUPPRESS)
    parser.add_argument("--disable-spawn-processes", action="store_true", help=SUPPRESS)
    parser.add_argument("--multimodal_gpu0_cuda_mem_pool_bytes", type=int, default=0, help=SUPPRESS)
    parser.add_argument("--oversubscribe", action="store_true", help=SUPPRESS)
    parser.add_argument("--trtllm_llmapi_launch", action="store_true", help=SUPPRESS)
    parser.add_argument(
        "--foreground", action="store_true", help="stay in the foreground and forward signals"
    )
    parser.add_argument("--stop", action="store_true", help="drain and end the server on --http_port")
    parser.add_argument("--status", action="store_true", help="print the state of the server on --http_port")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for models to load; default: 300",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that running requests have when the server stops; default: 30",
    )
    parser.add_argument(
        "--exit_timeout",
        type=int,
        default=5,
        metavar="SECONDS",
        help="time that an idle tritonserver has to exit",
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="restart an engine that makes no step for this long while requests are open, or a server that "
        "does not respond for this long (30 s at most); 0: never",
    )
    parser.add_argument(
        "--server-memory",
        type=int,
        default=4096,
        metavar="MIB",
        help="restart tritonserver (which holds no model itself) when its memory exceeds this limit and it "
        "is idle, or at twice the limit; 0: never; default 4096",
    )
    parser.add_argument("--no-restart", action="store_true", help="exit with the reason when a process dies")
    parser.add_argument(
        "--restart-tries",
        type=int,
        default=0,
        metavar="N",
        help="exit with the reason after N failed restarts in a row; 0: never",
    )
    parser.add_argument(
        "--open-management",
        action="store_true",
        help="let all clients register shared memory, load models, and change logging and tracing",
    )
    parser.add_argument(
        "--management-secret-file",
        type=Path,
        metavar="FILE",
        help="holds the secret that clients send for this in header manylora-management; default: a new one",
    )
    parser.add_argument(
        "--triton-arg", action="append", default=[], help="passed to tritonserver; may be repeated"
    )
    return parser


def check_arguments(options: Namespace) -> RankInfo:
    """Returns the rank to start here; ranks other than 0 have no server.

    Raises ConfigError for arguments that cannot work, and for anything that prevents a start.
    """
    for name, text in LAUNCH_SCRIPT.refused.items():
        if getattr(options, name):
            raise ConfigError(text)
    for name, flag in (("restart_tries", "restart-tries"), ("server_memory", "server-memory")):
        _check_least(options, name, flag, 0)
    _check_least(options, "exit_timeout", "exit_timeout", 1)
    _check_ports(options)
    if options.world_size is not None:
        _check_least(options, "world_size", "world_size", 1)
    if options.tensorrt_llm_model_name != "tensorrt_llm":
        raise ConfigError(
            "--tensorrt_llm_model_name must be tensorrt_llm: its engine starts the ranks, which load no other"
        )
    repo = options.model_repo.resolve()
    configs = sorted(repo.glob("*/config.pbtxt"))
    if not configs:
        raise ConfigError(f"--model_repo {repo} holds no <model>/config.pbtxt")
    for path in (repo, Path(sys.prefix)):
        if re.search(r"\s", str(path)):
            raise ConfigError(
                f"the path '{path}' contains a space, which Triton's Python backend cannot handle"
            )
    for config in configs:
        check_filled(config)
    place = _find_place(repo, options.world_size)
    if not place.rank:
        _check_nothing_in_the_way(options)
    return place


def _find_place(repo: Path, world_size: int | None) -> RankInfo:
    """From the variables of torchrun or mpirun, if they are set and the engine has several ranks."""
    if not is_one_of_several() or not (repo / ENGINE).is_dir():
        return RankInfo.alone(world_size or 1)
    try:
        return find_rank(repository_config(repo, world_size).world_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_nothing_in_the_way(options: Namespace) -> None:
    for name in PORTS:
        port = getattr(options, name)
        error = why_taken(port, options.address)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--{name} {port} is in use: stop what listens there or choose another")
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"--{name} {port}: {error.strerror}; ports below 1024 are the system's: choose another"
            )
        raise ConfigError(
            f"--address {options.address}: {error.strerror}; it must be an address of this machine: "
            "127.0.0.1 for itself, 0.0.0.0 for every interface, :: for every interface with IPv6"
        )
    if pids := _busy_servers():
        text = (
            f"tritonserver process(es) already found with PID(s): {', '.join(pids)}.\n"
            f"\tUse `kill {' '.join(pids)}` to stop them."
        )
        if not options.force:
            raise ConfigError(text + " Or use --force.")
        print(text, file=sys.stderr)


def _check_least(options: Namespace, name: str, flag: str, least: int) -> None:
    if getattr(options, name) < least:
        raise ConfigError(f"--{flag} must be at least {least}, got {getattr(options, name)}")


def _check_ports(options: Namespace) -> None:
    """Ports must be distinct. Otherwise a service would fail with an error of Triton's, or be unreachable."""
    flags: dict[int, str] = {}
    for name in PORTS:
        port = getattr(options, name)
        if not 0 < port < 2**16:
            raise ConfigError(f"--{name} must be in 1 to 65535, got {port}")
        if port in flags:
            raise ConfigError(f"--{flags[port]} and --{name} are both {port}: each needs its own")
        flags[port] = name


def _busy_servers() -> list[str]:
    """Like `pgrep -r R tritonserver`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)
        except OSError:
            continue
        if name.endswith("(tritonserver") and rest.split()[0] == "R":
            found.append(path.parent.name)
    return found

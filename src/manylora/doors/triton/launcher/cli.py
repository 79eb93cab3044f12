"""launch_triton_server.py, `manylora triton`: starts a supervisor, stops it, or shows its state."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manylora.config.foreign import LAUNCH_SCRIPT, LAUNCHER
from manylora.config.repository import ENGINE, repository_config
from manylora.doors.triton.launcher.processes import why_taken
from manylora.doors.triton.launcher.run_directory import (
    RunDirectory,
    open_log,
    rank_directories,
    temporary_folder,
)
from manylora.doors.triton.launcher.server import TritonServer
from manylora.doors.triton.launcher.server_command import (
    describe_access,
    find_tritonserver,
    management_secret,
    remove_leftovers,
)
from manylora.doors.triton.launcher.supervisor import FollowerProgram, Service, Supervisor
from manylora.doors.triton.launcher.templates import FOLDER, check_filled, with_defaults
from manylora.errors import ConfigError
from manylora.ranks.rank_info import RankInfo, ends_with_launcher, find_rank, is_one_of_several, started_rank
from manylora.system.command_line import Parser

PORTS = ("http_port", "grpc_port", "metrics_port")
LAST_S = 5.0  # extra time for rank 0 to exit, after its own timeouts


# Flags, type, default, unit and help. bool: a switch. SUPPRESS: flags of upstream's script.
OPTIONS: tuple[tuple[str, type, Any, str | None, str | None], ...] = (
    ("--world_size", int, None, "N", "number of engine ranks, each with its own GPU; they share every layer, "
     "unless the parameters tensor_parallel_size and pipeline_parallel_size say otherwise; default: their "
     "product"),
    ("--tritonserver", str, None, None, "the executable; default: the container's, PATH, or the wheel"),
    ("--grpc_port", int, 8001, "N", "default: 8001"),
    ("--http_port", int, 8000, "N", "default: 8000"),
    ("--metrics_port", int, 8002, "N", "default: 8002"),
    ("--address", str, "0.0.0.0", None,
     "address of all three ports, IPv6 without brackets; default: 0.0.0.0, all interfaces"),
    ("--force -f", bool, False, None, "start even if another tritonserver is running"),
    ("--log", bool, False, None, "write a verbose server log to --log-file"),
    ("--log-file", str, "triton_log.txt", None, None),
    ("--no-mpi", bool, False, None, "no effect: the launcher never calls mpirun, but mpirun may call it"),
    ("--model_repo", Path, FOLDER, "DIR", "a filled model repository"),
    ("--tensorrt_llm_model_name", str, "tensorrt_llm", None, SUPPRESS),
    *((f"--{flag}", bool, False, None, SUPPRESS) for flag in (
        "multi-model", "disable-spawn-processes", "oversubscribe", "trtllm_llmapi_launch")),
    ("--multimodal_gpu0_cuda_mem_pool_bytes", int, 0, None, SUPPRESS),
    ("--foreground", bool, False, None, "stay in the foreground and forward signals"),
    ("--stop", bool, False, None, "drain and end the server on --http_port"),
    ("--status", bool, False, None, "print the state of the server on --http_port"),
    ("--start-timeout", float, 300.0, "SECONDS", "for models to load; default: 300"),
    ("--drain-timeout", float, 30.0, "SECONDS",
     "that running requests have when the server stops; default: 30"),
    ("--exit_timeout", int, 5, "SECONDS", "time that an idle tritonserver has to exit"),
    ("--hang-timeout", float, 300.0, "SECONDS", "restart an engine that makes no step for this long while "
     "requests are open, or a server that does not respond for this long (30 s at most); 0: never"),
    ("--server-memory", int, 4096, "MIB", "restart tritonserver (which holds no model itself) when its "
     "memory exceeds this limit and it is idle, or at twice the limit; 0: never; default 4096"),
    ("--no-restart", bool, False, None, "exit with the reason when a process dies"),
    ("--restart-tries", int, 0, "N", "exit with the reason after N failed restarts in a row; 0: never"),
    ("--open-management", bool, False, None,
     "let all clients register shared memory, load models, and change logging and tracing"),
    ("--management-secret-file", Path, None, "FILE",
     "holds the secret that clients send for this in header manylora-management; default: a new one"),
)  # fmt: skip


def argument_parser(instead: Mapping[str, str] | None = None) -> Parser:
    """instead: further flags that are not accepted, with what to use."""
    parser = Parser(
        description="Start tritonserver with a model repository and keep it alive.",
        instead={**LAUNCHER.refused, **(instead or {})},
    )
    for flags, kind, default, unit, text in OPTIONS:
        how: dict[str, Any] = {"type": kind, "default": default, "metavar": unit}
        how = {"action": "store_true"} if kind is bool else how
        parser.add_argument(*flags.split(), help=text, **how)
    text = "passed to tritonserver; may be repeated"
    parser.add_argument("--triton-arg", action="append", default=[], help=text)
    return parser


def check_arguments(options: Namespace) -> RankInfo:
    """Returns the rank to start here; ranks other than 0 have no server.

    Raises ConfigError for arguments that cannot work, and for anything that prevents a start.
    """
    for name, text in LAUNCH_SCRIPT.refused.items():
        if getattr(options, name):
            raise ConfigError(text)
    for flag, least in (("restart-tries", 0), ("server-memory", 0), ("exit_timeout", 1), ("world_size", 1)):
        value = getattr(options, flag.replace("-", "_"))
        if value is not None and value < least:
            raise ConfigError(f"--{flag} must be at least {least}, got {value}")
    flags: dict[int, str] = {}
    for name in PORTS:
        port = getattr(options, name)
        if not 0 < port < 2**16:
            raise ConfigError(f"--{name} must be in 1 to 65535, got {port}")
        if port in flags:
            raise ConfigError(f"--{flags[port]} and --{name} are both {port}: each needs its own")
        flags[port] = name
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
    place = RankInfo.alone(options.world_size or 1)
    if is_one_of_several() and (repo / ENGINE).is_dir():  # started by torchrun or mpirun
        try:
            place = find_rank(repository_config(repo, options.world_size).world_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if not place.rank:
        _check_nothing_in_the_way(options)
    return place


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
    pids = []  # as of `pgrep -r R tritonserver`
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, rest = path.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)
            if name.endswith("(tritonserver") and rest.split()[0] == "R":
                pids.append(path.parent.name)
    if pids:
        text = (
            f"tritonserver process(es) already found with PID(s): {', '.join(pids)}.\n"
            f"\tUse `kill {' '.join(pids)}` to stop them."
        )
        if not options.force:
            raise ConfigError(text + " Or use --force.")
        print(text, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    return run(argument_parser().parse_args(arguments))


def run(options: Namespace, write: Callable[[Path], Path] | None = None) -> int:
    """Run the launcher and return its exit status. options: of argument_parser.

    write: writes the repository to serve, instead of options.model_repo. It gets the run directory and
    returns the folder; it is called once it is certain that no server runs there.
    """
    try:
        run_dir = RunDirectory(options.http_port, started_rank())
        if options.stop or options.status:
            run_dir.check_owner()
            # The server's, or else those of this host's ranks without a server. To stop, both.
            chosen = [run_dir] if run_dir.path.exists() else []
            if not run_dir.rank and (options.stop or not chosen):
                chosen += rank_directories(run_dir.http_port)
            act = _stop if options.stop else _status
            return max(act(options, one) for one in chosen or [run_dir])
        os.umask(0o077)  # logs and traces may hold what clients send
        return _start(options, run_dir, write)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def _start(options: Namespace, run_dir: RunDirectory, write: Callable[[Path], Path] | None) -> int:
    run_dir.claim()
    try:
        try:
            _remove_leftovers(run_dir)
            run_dir.prepare()
            if write is not None:
                options.model_repo = write(run_dir.path)
            place = check_arguments(options)
            # Otherwise torchrun or mpirun would take the launcher's exit for the end of the server.
            options.foreground = options.foreground or (bool(place.address) and ends_with_launcher())
            if not place.rank:
                options.management_secret = management_secret(run_dir.path, options.management_secret_file)
            tries = 0 if options.no_restart else options.restart_tries or None
            supervisor = Supervisor(_service(options, place, run_dir), tries, run_dir)
        except OSError as error:
            raise ConfigError(f"{error.filename or run_dir.path}: {error.strerror}") from error
        what = f"the Triton server for {getattr(options, 'model', None) or options.model_repo}"
        print(f"starting {what}: the log is {run_dir.log}", file=sys.stderr, flush=True)
        if not place.rank:
            print(describe_access(options.address, run_dir.path, options.open_management), file=sys.stderr)
        if not options.foreground:
            return _background(options, supervisor, run_dir)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        code = supervisor.run()
        if code:
            _report_failure(supervisor.status["reason"], run_dir)
        run_dir.remove()
        return code
    except ConfigError:
        run_dir.remove()
        raise


def _remove_leftovers(run_dir: RunDirectory) -> None:
    remove_leftovers(run_dir.path, None if run_dir.rank else run_dir.http_port)


def _service(options: Namespace, place: RankInfo, run_dir: RunDirectory) -> Service:
    repo = with_defaults(options.model_repo.resolve(), run_dir.path)
    if place.rank:
        stop_s = options.drain_timeout + options.exit_timeout + LAST_S
        return FollowerProgram(repo, options.world_size, run_dir, stop_s, options.hang_timeout)
    given = vars(options) | {
        "model_repo": repo,
        "server_memory": options.server_memory << 20,
        "verbose_log": str(Path(options.log_file).resolve()) if options.log else None,
    }
    installation = find_tritonserver(options.tritonserver, run_dir.path)
    return TritonServer(installation, Namespace(**given), run_dir.path)


def _background(options: Namespace, supervisor: Supervisor, run_dir: RunDirectory) -> int:
    """Fork a supervisor into its own session, and wait until the server is ready or given up."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, nobody hears how the child ended
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            log, null = open_log(run_dir.path / "supervisor.log"), os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, null), (1, log), (2, log)):
                os.dup2(source, target)
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            code = supervisor.run()
            if code == 0:  # otherwise --status shows the reason
                run_dir.remove()
        except BaseException:
            logging.exception("the supervisor failed")
        finally:
            os._exit(code)
    signals: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, _: signals.append(number))
    started, forwarded = time.monotonic(), 0
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if len(signals) > forwarded:  # a second one makes the supervisor hurry
            forwarded = len(signals)
            os.kill(child, signal.SIGTERM)
        if run_dir.read_state().get("state") == "ready" and not signals:
            waited = f"ready after {time.monotonic() - started:.1f} s"
            if run_dir.rank:
                print(f"{waited}, rank {run_dir.rank}")
                return 0
            ports = ", ".join(f"{name.replace('_', ' ')} {getattr(options, name)}" for name in PORTS)
            print(f"{waited} on {ports}")
            print(f"log: {run_dir.log}; to end it: --stop --http_port={options.http_port}")
            return 0
        time.sleep(0.2)
    code = os.waitstatus_to_exitcode(ended[1])
    if signals or code == 0:
        print("stopped while starting", file=sys.stderr)
    elif code > 0:
        _report_failure(run_dir.read_state().get("reason"), run_dir)
    else:
        _report_failure("the supervisor was killed while the server was starting", run_dir)
        _remove_leftovers(run_dir)
    run_dir.remove()
    return 1


def _report_failure(reason: str | None, run_dir: RunDirectory) -> None:
    print(reason or "the server did not start", file=sys.stderr)
    kept = run_dir.path.with_suffix(".log")
    with suppress(OSError):  # a rename needs no disk space and follows no symlink
        run_dir.log.replace(kept)
        print(f"the server's log: {kept}", file=sys.stderr)


def _nothing_here(options: Namespace) -> str:
    names = (path.name for path in temporary_folder().glob(f"manylora-{os.getuid()}-*"))
    ports = (int(port) for name in names if (port := name.rpartition("-")[2]).isdecimal())
    others = ", ".join(str(port) for port in sorted(ports) if RunDirectory(port).supervisor())
    text = f"no server was launched on http port {options.http_port}"
    return text + (f", but on {others}: give --http_port" if others else "")


def _stop(options: Namespace, run_dir: RunDirectory) -> int:
    """Make the supervisor stop the service in order, and wait for it. End what a killed one has left."""
    pid = run_dir.supervisor()
    if not pid:
        print(_nothing_here(options))
        if run_dir.path.exists():
            with suppress(ConfigError):  # a launcher is about to start a server
                run_dir.claim()
                _remove_leftovers(run_dir)  # but not its log
        return 0
    for number in (signal.SIGTERM, signal.SIGCONT) if pid > 0 else ():
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + options.drain_timeout + options.exit_timeout + LAST_S + 20
    while run_dir.supervisor() == pid:
        if time.monotonic() > deadline:
            raise ConfigError(f"the launcher's process {pid} does not end")
        time.sleep(0.1)
    print("stopped")
    return 0


def _status(options: Namespace, run_dir: RunDirectory) -> int:
    status = run_dir.status()
    print(json.dumps(status) if status else _nothing_here(options))
    return 0 if status.get("state") == "ready" else 1

"""launch_triton_server.py, `manylora triton`: starts a supervisor, stops it, or shows its state."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from manylora.errors import ConfigError
from manylora.group.rank_info import RankInfo, ends_with_launcher, started_rank
from manylora.launcher.arguments import argument_parser, check_arguments
from manylora.launcher.installation import find_tritonserver
from manylora.launcher.logs import open_log
from manylora.launcher.management_access import describe_access, management_secret
from manylora.launcher.programs import FollowerProgram
from manylora.launcher.run_directory import RunDirectory, rank_directories, running_ports
from manylora.launcher.server import TritonServer
from manylora.launcher.server_command import ServerOptions, remove_leftovers
from manylora.launcher.supervisor import Service, Supervisor
from manylora.launcher.templates import with_defaults

LAST_S = 5.0  # extra time for rank 0 to exit, after its own timeouts


def main(arguments: list[str] | None = None) -> int:
    return run(argument_parser().parse_args(arguments))


def run(options: Namespace, write: Callable[[Path], Path] | None = None) -> int:
    """Run the launcher and return its exit status. options: of argument_parser.

    write: writes the repository to serve, used instead of options.model_repo. It gets the run directory and
    returns the folder of the repository, in the run directory or elsewhere. It is called before the start,
    once it is certain that no server runs there.
    """
    try:
        run_dir = RunDirectory(options.http_port, started_rank())
        if options.stop or options.status:
            act = _stop if options.stop else _status
            return max(act(options, one) for one in _chosen(run_dir, options))
        os.umask(0o077)  # logs and traces may hold what clients send
        return _start(options, run_dir, write)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def _chosen(run_dir: RunDirectory, options: Namespace) -> list[RunDirectory]:
    """Run directories to stop or to show: the server's, or else those of this host's ranks without a server.

    To stop, both.
    """
    run_dir.check_owner()
    found = [run_dir] if run_dir.path.exists() else []
    if not run_dir.rank and (options.stop or not found):
        found += rank_directories(run_dir.http_port)
    return found or [run_dir]


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
        if options.foreground:
            return _foreground(supervisor, run_dir)
        return _background(options, supervisor, run_dir)
    except ConfigError:
        run_dir.remove()
        raise


def _remove_leftovers(run_dir: RunDirectory) -> None:
    """Of a server that was killed."""
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
        "triton_args": tuple(options.triton_arg),
    }
    settings = ServerOptions(**{field.name: given[field.name] for field in fields(ServerOptions)})
    return TritonServer(find_tritonserver(options.tritonserver, run_dir.path), settings, run_dir.path)


def _foreground(supervisor: Supervisor, run_dir: RunDirectory) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    code = supervisor.run()
    if code:
        _report_failure(supervisor.status["reason"], run_dir)
    run_dir.remove()
    return code


def _background(options: Namespace, supervisor: Supervisor, run_dir: RunDirectory) -> int:
    """Fork a supervisor into its own session, and wait until the server is ready or given up."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, nobody hears how the child ended
    child = os.fork()
    if child == 0:
        _be_supervisor(supervisor, run_dir)
    signals: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, _: signals.append(number))
    started, forwarded = time.monotonic(), 0
    is_terminal = sys.stdout.isatty()
    lead = "\r" if is_terminal else ""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if len(signals) > forwarded:  # a second one makes the supervisor hurry
            forwarded = len(signals)
            os.kill(child, signal.SIGTERM)
        said = run_dir.read_state().get("state", "starting")
        waited = time.monotonic() - started
        if said == "ready" and not signals:
            where = f", rank {run_dir.rank}" if run_dir.rank else f" on {_ports(options)}"
            print(f"{lead}ready after {waited:.1f} s{where}")
            if not run_dir.rank:
                print(f"log: {run_dir.log}; to end it: --stop --http_port={options.http_port}")
            return 0
        if is_terminal:
            print(f"{lead}{said} {waited:.0f} s ", end="", flush=True)
        time.sleep(0.2)
    if is_terminal:
        print()
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


def _be_supervisor(supervisor: Supervisor, run_dir: RunDirectory) -> NoReturn:
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


def _report_failure(reason: str | None, run_dir: RunDirectory) -> None:
    print(reason or "the server did not start", file=sys.stderr)
    kept = run_dir.path.with_suffix(".log")
    with suppress(OSError):  # a rename needs no disk space and follows no symlink
        run_dir.log.replace(kept)
        print(f"the server's log: {kept}", file=sys.stderr)


def _ports(options: Namespace) -> str:
    return (
        f"http port {options.http_port}, grpc port {options.grpc_port}, metrics port {options.metrics_port}"
    )


def _nothing_here(options: Namespace) -> str:
    """That no server runs on this port, and on which ones others do."""
    others = ", ".join(map(str, running_ports()))
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

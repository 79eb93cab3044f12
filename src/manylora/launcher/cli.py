"""launch_triton_server.py, `manylora triton`: starts a supervisor, stops it, or shows its state."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from manylora.errors import ConfigError
from manylora.group.place import Place, ends_with_launcher, started_rank
from manylora.launcher.arguments import argument_parser, check_arguments
from manylora.launcher.follower_service import FollowerService
from manylora.launcher.installation import find_tritonserver
from manylora.launcher.logs import open_log
from manylora.launcher.management_access import check_own_directory, describe_access, management_secret
from manylora.launcher.processes import is_child
from manylora.launcher.repository import with_defaults
from manylora.launcher.roles import DEPUTIES, LAUNCH, SUPERVISOR, Roles
from manylora.launcher.server_command import ServerOptions, remove_leftovers
from manylora.launcher.state import State, read_state
from manylora.launcher.supervisor import SupervisedService, Supervisor
from manylora.launcher.triton_service import FAILED, TritonService

LOCK = "lock"
RANK = "-rank"  # suffix of the run directory of a rank without a server
LAST_S = 5.0  # extra time for rank 0 to exit, after its own timeouts


def main(arguments: list[str] | None = None) -> int:
    return run(argument_parser().parse_args(arguments))


def run(options: Namespace, write: Callable[[Path], Path] | None = None) -> int:
    """Run the launcher and return its exit status. options: of argument_parser.

    write: writes the repository to serve, used instead of options.model_repo. It gets the run directory and
    returns the folder of the repository, in the run directory or elsewhere. It is called before the start,
    once it is certain that no server runs there.
    """
    run_dir = _temporary() / f"manylora-{os.getuid()}-{options.http_port}"
    try:
        options.rank = started_rank()
        if options.rank:  # a host may have several
            run_dir = run_dir.with_name(f"{run_dir.name}{RANK}{options.rank}")
        if options.stop or options.status:
            own = _own_directories(run_dir, options)
            return max((_stop if options.stop else _status)(options, path) for path in own)
        os.umask(0o077)  # logs and traces may hold what clients send
        return _start(options, run_dir, write)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def _temporary() -> Path:
    """The folder of `tempfile`, also when it is full: with any other, --stop would not find the server."""
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((Path(path) for path in given if path and Path(path).is_dir()), Path("/tmp")).absolute()


def _own_directories(run_dir: Path, options: Namespace) -> list[Path]:
    """Run directories to stop or to show: the server's, or else those of this host's ranks without a server.

    To stop, both.
    """
    check_own_directory(run_dir)
    found = [run_dir] if run_dir.exists() else []
    if not options.rank and (options.stop or not found):
        ranks = run_dir.parent.glob(f"{run_dir.name}{RANK}*")
        with suppress(FileNotFoundError):  # it is being removed
            found += sorted(path for path in ranks if path.lstat().st_uid == os.getuid())
    return found or [run_dir]


def _start(options: Namespace, run_dir: Path, write: Callable[[Path], Path] | None) -> int:
    roles = _claim(run_dir)
    try:
        try:
            _empty(options, run_dir)
            if write is not None:
                options.model_repo = write(run_dir)
            place = check_arguments(options)
            # Otherwise torchrun or mpirun would take the launcher's exit for the end of the server.
            options.foreground = options.foreground or (bool(place.address) and ends_with_launcher())
            if not place.rank:
                options.management_secret = management_secret(run_dir, options.management_secret_file)
            keeper, state = _keeper(options, place, run_dir, roles)
        except OSError as error:
            raise ConfigError(f"{error.filename or run_dir}: {error.strerror}") from error
        what = f"the Triton server for {getattr(options, 'model', None) or options.model_repo}"
        print(f"starting {what}: the log is {run_dir / 'server.log'}", file=sys.stderr, flush=True)
        if not place.rank:
            print(describe_access(options.address, run_dir, options.open_management), file=sys.stderr)
        return (_foreground if options.foreground else _background)(options, keeper, state, roles, run_dir)
    except ConfigError:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _claim(run_dir: Path) -> Roles:
    """Create and lock the run directory. Raises ConfigError if another launcher has it."""
    while True:
        try:
            run_dir.mkdir(mode=0o700, exist_ok=True)
            check_own_directory(run_dir)
            roles = Roles.of(run_dir / LOCK, create=True)
        except FileNotFoundError:  # removed by a launcher that was exiting
            continue
        except OSError as error:
            raise ConfigError(f"the run directory {run_dir} cannot be made: {error.strerror}") from error
        free = roles.take(LAUNCH)
        if pids := [roles.holder(LAUNCH)] if not free else roles.holders():
            port = run_dir.name.split("-")[2]
            raise ConfigError(
                f"a launcher runs already for this port (process {pids[0]}): end it with --stop "
                f"--http_port={port}, or choose other ports (--http_port, --grpc_port, --metrics_port)"
            )
        if roles.is_at(run_dir / LOCK):
            return roles
        roles.close()


def _empty(options: Namespace, run_dir: Path) -> None:
    """Remove what a killed server left behind."""
    _remove_leftovers(options, run_dir)
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _remove_leftovers(options: Namespace, run_dir: Path) -> None:
    remove_leftovers(run_dir, None if options.rank else options.http_port)


def _keeper(options: Namespace, place: Place, run_dir: Path, roles: Roles) -> tuple[Supervisor, State]:
    repo, state = with_defaults(options.model_repo.resolve(), run_dir), State()
    tries = 0 if options.no_restart else options.restart_tries or None
    # In the foreground, whatever runs the launcher restarts it.
    deputies = 0 if options.foreground or options.no_restart else len(DEPUTIES)
    service = (_follower if place.rank else _server)(options, repo, run_dir)
    return Supervisor(service, roles, state, deputies, tries), state


def _follower(options: Namespace, repo: Path, run_dir: Path) -> SupervisedService:
    stop_s = options.drain_timeout + options.exit_timeout + LAST_S
    waits = stop_s, options.hang_timeout
    return FollowerService(repo, options.rank, options.world_size, run_dir, *waits)


def _server(options: Namespace, repo: Path, run_dir: Path) -> SupervisedService:
    given = vars(options) | {
        "model_repo": repo,
        "server_memory": options.server_memory << 20,
        "verbose_log": str(Path(options.log_file).resolve()) if options.log else None,
        "triton_args": tuple(options.triton_arg),
    }
    settings = ServerOptions(**{field.name: given[field.name] for field in fields(ServerOptions)})
    return TritonService(find_tritonserver(options.tritonserver, run_dir), settings, run_dir)


def _foreground(_: Namespace, keeper: Supervisor, state: State, _roles: Roles, run_dir: Path) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    code = keeper.run()
    if code:
        _report_failure(state, run_dir)
    return code


def _background(options: Namespace, keeper: Supervisor, state: State, roles: Roles, run_dir: Path) -> int:
    """Fork a supervisor into its own session, and wait until the server is ready or given up."""
    child = os.fork()
    if child == 0:
        _be_supervisor(keeper, run_dir)
    signals: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, _: signals.append(number))
    started = time.monotonic()
    while is_child(child) or roles.holders():
        said = state.read()["state"]
        waited = time.monotonic() - started
        lead = "\r" if sys.stdout.isatty() else ""
        if signals:
            _end_supervision(options, roles, child)
            print(f"{lead}stopped while starting", file=sys.stderr)
            return 1
        if said == "ready":
            where = f", rank {options.rank}" if options.rank else f" on {_ports(options)}"
            print(f"{lead}ready after {waited:.1f} s{where}")
            if not options.rank:
                print(f"log: {run_dir / 'server.log'}; to end it: --stop --http_port={options.http_port}")
            return 0
        if lead:
            print(f"{lead}{said} {waited:.0f} s ", end="", flush=True)
        time.sleep(0.2)
    if sys.stdout.isatty():
        print()
    said = state.read()["state"]
    if said == "stopping":
        print("stopped while starting", file=sys.stderr)
        return 1
    if said != "failed":
        _remove_leftovers(options, run_dir)
        state.write(reason="the supervisor and its deputies were killed while the server was starting")
    _report_failure(state, run_dir)
    return 1


def _be_supervisor(keeper: Supervisor, run_dir: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        log, null = open_log(run_dir / "supervisor.log"), os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        code = keeper.run()
    except BaseException:
        logging.exception("the supervisor failed")
    finally:
        os._exit(code)


def _report_failure(state: State, run_dir: Path) -> None:
    print(state.read()["reason"] or "the server did not start", file=sys.stderr)
    kept = run_dir.with_suffix(".log")
    with suppress(OSError):  # a rename needs no disk space and follows no symlink
        (run_dir / "server.log").replace(kept)
        print(f"the server's log: {kept}", file=sys.stderr)
    shutil.rmtree(run_dir, ignore_errors=True)


def _end_supervision(options: Namespace, roles: Roles, child: int = 0) -> None:
    """Make the supervisor stop the service in order. child: the process that is about to supervise."""
    signalled = 0
    deadline = time.monotonic() + options.drain_timeout + options.exit_timeout + LAST_S + 20
    while is_child(child) or roles.holders():
        pid = roles.holder(SUPERVISOR) or child
        if pid > 0 and pid != signalled:
            with suppress(ProcessLookupError):
                for name in (signal.SIGTERM, signal.SIGCONT):
                    os.kill(pid, name)
            signalled = pid
        if time.monotonic() > deadline:
            raise ConfigError(f"the launcher's process {pid} does not end")
        time.sleep(0.1)


def _find(run_dir: Path) -> Roles | None:
    """Roles of the running server. None if there is none."""
    try:
        roles = Roles.of(run_dir / LOCK)
    except OSError:
        return None
    return roles if roles.holders() else None


def _ports(options: Namespace) -> str:
    return (
        f"http port {options.http_port}, grpc port {options.grpc_port}, metrics port {options.metrics_port}"
    )


def _nothing_here(options: Namespace) -> str:
    """That no server runs on this port, and on which ones others do."""
    text = f"no server was launched on http port {options.http_port}"
    others = []
    for path in _temporary().glob(f"manylora-{os.getuid()}-*"):
        port = path.name.rpartition("-")[2]
        if port.isdecimal() and (roles := _find(path)) is not None:
            roles.close()
            others.append(int(port))
    return text + (f", but on {', '.join(map(str, sorted(others)))}: give --http_port" if others else "")


def _stop(options: Namespace, run_dir: Path) -> int:
    roles = _find(run_dir)
    if roles is None:
        print(_nothing_here(options))
        return 0
    _end_supervision(options, roles)
    print("stopped")
    return 0


def _status(options: Namespace, run_dir: Path) -> int:
    roles = _find(run_dir)
    if roles is None:
        with suppress(OSError):
            reason = (run_dir / FAILED).read_text(encoding="utf-8")
            print(json.dumps({"state": "failed", "reason": reason, "log": str(run_dir / "server.log")}))
            return 1
        print(_nothing_here(options))
        return 1
    said: dict[str, Any] = {"state": "starting", "reason": "a deputy is about to take over"}
    supervisor = roles.holder(SUPERVISOR)
    if supervisor:
        said = read_state(supervisor) or {"state": "starting", "reason": ""}
    deputies = [pid for role in DEPUTIES if (pid := roles.holder(role))]
    about = {"supervisor": supervisor, "deputies": deputies, "log": str(run_dir / "server.log")}
    print(json.dumps(said | about))
    return 0 if said["state"] == "ready" else 1

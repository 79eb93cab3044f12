"""Arguments of launch_triton_server.py, the checks before a start, and the hand-over to the supervisor."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from manylora.errors import ConfigError
from manylora.launcher.installation import find_tritonserver
from manylora.launcher.logs import open_log
from manylora.launcher.management_access import check_own_directory, describe_access, management_secret
from manylora.launcher.processes import is_child, port_is_free
from manylora.launcher.repository import check_filled, with_defaults
from manylora.launcher.roles import DEPUTIES, LAUNCH, SUPERVISOR, Roles
from manylora.launcher.server import ServerOptions, remove_leftovers
from manylora.launcher.state import State, read_state
from manylora.launcher.supervisor import Keeper
from manylora.launcher.triton_service import FAILED, TritonService

__all__ = ["main"]

LOCK = "lock"
REFUSED = {
    "multi_model": "--multi-model: one server serves one base model; start another on other ports",
    "disable_spawn_processes": "--disable-spawn-processes belongs to --multi-model, which is not available",
    "oversubscribe": "--oversubscribe is an option of mpirun, which is not used",
    "multimodal_gpu0_cuda_mem_pool_bytes": "--multimodal_gpu0_cuda_mem_pool_bytes: no multimodal models",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run_dir = _temporary() / f"manylora-{os.getuid()}-{options.http_port}"
    try:
        if options.stop or options.status:
            check_own_directory(run_dir)
            return _stop(options, run_dir) if options.stop else _status(options, run_dir)
        os.umask(0o077)  # logs and traces may hold what clients send
        return _start(options, run_dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def _temporary() -> Path:
    """As `tempfile` chooses, which goes elsewhere when this is full: nobody would find the server then."""
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((Path(path) for path in given if path and Path(path).is_dir()), Path("/tmp")).absolute()


def _start(options: Namespace, run_dir: Path) -> int:
    roles = _enter(run_dir)
    try:
        try:
            _clear(run_dir, options.http_port)
            _check(options)
            options.management_secret = management_secret(run_dir, options.management_secret_file)
            keeper, state = _keeper(options, run_dir, roles)
        except OSError as error:
            raise ConfigError(f"{error.filename or run_dir}: {error.strerror}") from error
        print(describe_access(options.address, run_dir, options.open_management), file=sys.stderr)
        return (_foreground if options.foreground else _background)(options, keeper, state, roles, run_dir)
    except ConfigError:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Start tritonserver with a model repository and keep it alive.")
    parser.add_argument("--world_size", type=int, default=1, help="only 1")
    parser.add_argument("--tritonserver", help="the executable; default: the container's, PATH, or the wheel")
    parser.add_argument("--grpc_port", type=int, default=8001)
    parser.add_argument("--http_port", type=int, default=8000)
    parser.add_argument("--metrics_port", type=int, default=8002)
    parser.add_argument("--address", default="0.0.0.0", help="where all three ports listen")
    parser.add_argument("--force", "-f", action="store_true", help="start although another tritonserver runs")
    parser.add_argument("--log", action="store_true", help="verbose server log into --log-file")
    parser.add_argument("--log-file", default="triton_log.txt")
    parser.add_argument("--no-mpi", action="store_true", help="always the case")
    parser.add_argument("--model_repo", type=Path, default=Path(__file__).parents[3] / "model_repo")
    parser.add_argument("--tensorrt_llm_model_name", default="tensorrt_llm", help="only tensorrt_llm")
    parser.add_argument("--multi-model", action="store_true", help="refused")
    parser.add_argument("--disable-spawn-processes", action="store_true", help="refused")
    parser.add_argument("--multimodal_gpu0_cuda_mem_pool_bytes", type=int, default=0, help="refused unless 0")
    parser.add_argument("--oversubscribe", action="store_true", help="refused")
    parser.add_argument("--foreground", action="store_true", help="stay, and pass signals on")
    parser.add_argument("--stop", action="store_true", help="drain and end the server on --http_port")
    parser.add_argument("--status", action="store_true", help="print the state of the server on --http_port")
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="restart an engine that makes no step for so long with requests open, or a server that does not "
        "answer for so long (30 s at most); 0: never",
    )
    parser.add_argument(
        "--server-memory",
        type=int,
        default=4096,
        metavar="MIB",
        help="start tritonserver, which itself holds no model, anew when it has grown beyond this and nobody "
        "asks for anything, or at twice as much; 0: never; default 4096",
    )
    parser.add_argument("--no-restart", action="store_true", help="end with the reason when a process dies")
    parser.add_argument(
        "--restart-tries",
        type=int,
        default=0,
        metavar="N",
        help="end with the reason after so many failed restarts in a row; 0: never",
    )
    parser.add_argument(
        "--open-management",
        action="store_true",
        help="let everybody register shared memory, load models, and change logging and tracing",
    )
    parser.add_argument(
        "--management-secret-file",
        type=Path,
        metavar="FILE",
        help="holds what clients send for that as header manylora-management; default: made at each start",
    )
    parser.add_argument("--triton-arg", action="append", default=[], help="passed on to tritonserver")
    return parser


def _check(options: Namespace) -> None:
    for name, text in REFUSED.items():
        if getattr(options, name):
            raise ConfigError(text)
    for name in ("restart_tries", "server_memory"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(options, name)}")
    if options.world_size != 1:
        raise ConfigError(f"--world_size must be 1, got {options.world_size}: one process serves one model")
    if options.tensorrt_llm_model_name != "tensorrt_llm":
        raise ConfigError("--tensorrt_llm_model_name must be tensorrt_llm with --world_size=1")
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
    for kind in ("http", "grpc", "metrics"):
        port = getattr(options, f"{kind}_port")
        if not port_is_free(port, options.address):
            raise ConfigError(f"--{kind}_port {port} is in use: stop what listens there or choose another")
    if pids := _busy_servers():
        text = (
            f"tritonserver process(es) already found with PID(s): {', '.join(pids)}.\n"
            f"\tUse `kill {' '.join(pids)}` to stop them."
        )
        if not options.force:
            raise ConfigError(text + " Or use --force.")
        print(text, file=sys.stderr)


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


def _enter(run_dir: Path) -> Roles:
    """Make the run directory this process's. Raises ConfigError when a launcher has it."""
    while True:
        try:
            run_dir.mkdir(mode=0o700, exist_ok=True)
            check_own_directory(run_dir)
            roles = Roles.of(run_dir / LOCK, create=True)
        except FileNotFoundError:  # who was ending has removed it
            continue
        except OSError as error:
            raise ConfigError(f"the run directory {run_dir} cannot be made: {error.strerror}") from error
        free = roles.take(LAUNCH)
        if pids := [roles.holder(LAUNCH)] if not free else roles.holders():
            raise ConfigError(f"a launcher runs already for this port (process {pids[0]}): use --stop")
        if roles.is_at(run_dir / LOCK):
            return roles
        roles.close()


def _clear(run_dir: Path, http_port: int) -> None:
    """What processes left that nobody is responsible for any more."""
    remove_leftovers(run_dir, http_port)
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _keeper(options: Namespace, run_dir: Path, roles: Roles) -> tuple[Keeper, State]:
    settings = ServerOptions(
        model_repo=with_defaults(options.model_repo.resolve(), run_dir),
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        address=options.address,
        start_timeout=options.start_timeout,
        drain_timeout=options.drain_timeout,
        hang_timeout=options.hang_timeout,
        server_memory=options.server_memory << 20,
        verbose_log=str(Path(options.log_file).resolve()) if options.log else None,
        triton_args=tuple(options.triton_arg),
        management_secret=options.management_secret,
        open_management=options.open_management,
    )
    installation = find_tritonserver(options.tritonserver, run_dir)
    state = State()
    tries = 0 if options.no_restart else options.restart_tries or None
    # In the foreground whoever runs the launcher starts it again.
    deputies = 0 if options.foreground or options.no_restart else len(DEPUTIES)
    return Keeper(TritonService(installation, settings, run_dir), roles, state, deputies, tries), state


def _foreground(_: Namespace, keeper: Keeper, state: State, _roles: Roles, run_dir: Path) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    code = keeper.run()
    if code:
        _report_failure(state, run_dir)
    return code


def _background(options: Namespace, keeper: Keeper, state: State, roles: Roles, run_dir: Path) -> int:
    """Fork a supervisor of its own session, and wait until it, or a deputy of its, is ready or gave up."""
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
            print(f"{lead}ready after {waited:.1f} s on http port {options.http_port}")
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
        remove_leftovers(run_dir, options.http_port)
        state.write(reason="the supervisor and its deputies were killed while the server was starting")
    _report_failure(state, run_dir)
    return 1


def _be_supervisor(keeper: Keeper, run_dir: Path) -> NoReturn:
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
    with suppress(OSError):  # a move: it needs no room, and follows no link
        (run_dir / "server.log").replace(kept)
        print(f"the server's log: {kept}", file=sys.stderr)
    shutil.rmtree(run_dir, ignore_errors=True)


def _end_supervision(options: Namespace, roles: Roles, child: int = 0) -> None:
    """Have whoever supervises end the service in order. child: is to be the supervisor."""
    told = 0
    deadline = time.monotonic() + options.drain_timeout + 30
    while is_child(child) or roles.holders():
        pid = roles.holder(SUPERVISOR) or child
        if pid > 0 and pid != told:
            with suppress(ProcessLookupError):
                for name in (signal.SIGTERM, signal.SIGCONT):
                    os.kill(pid, name)
            told = pid
        if time.monotonic() > deadline:
            raise ConfigError(f"the launcher's process {pid} does not end")
        time.sleep(0.1)


def _find(run_dir: Path) -> Roles | None:
    """Of a living supervisor, or of deputies of which one is about to take over."""
    try:
        roles = Roles.of(run_dir / LOCK)
    except OSError:
        return None
    return roles if roles.holders() else None


def _stop(options: Namespace, run_dir: Path) -> int:
    roles = _find(run_dir)
    if roles is None:
        print(f"no server was launched on http port {options.http_port}")
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
        print(f"no server was launched on http port {options.http_port}")
        return 1
    said: dict[str, Any] = {"state": "starting", "reason": "a deputy is about to take over"}
    supervisor = roles.holder(SUPERVISOR)
    if supervisor:
        said = read_state(supervisor) or {"state": "starting", "reason": ""}
    deputies = [pid for role in DEPUTIES if (pid := roles.holder(role))]
    about = {"supervisor": supervisor, "deputies": deputies, "log": str(run_dir / "server.log")}
    print(json.dumps(said | about))
    return 0 if said["state"] == "ready" else 1

"""Arguments of launch_triton_server.py, the checks before a start, and the hand-over to the supervisor."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from manylora.errors import ConfigError
from manylora.launcher.doors import check_own_directory, copy_private, management_secret, open_doors
from manylora.launcher.repository import check_filled, with_defaults
from manylora.launcher.server import Options, clear_leftovers, is_alive, port_is_free
from manylora.launcher.supervisor import Supervisor, read_state

__all__ = ["main"]

REFUSED = {
    "multi_model": "--multi-model: one server serves one base model; start another on other ports",
    "disable_spawn_processes": "--disable-spawn-processes belongs to --multi-model, which is not available",
    "oversubscribe": "--oversubscribe is an option of mpirun, which is not used",
    "multimodal_gpu0_cuda_mem_pool_bytes": "--multimodal_gpu0_cuda_mem_pool_bytes: no multimodal models",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.stop or options.status:
            return _stop(options) if options.stop else _status(options)
        run_dir = _run_dir(options)
        if run_dir.exists():
            _take_over(run_dir, options.http_port)
        _check(options)
        os.umask(0o077)  # logs and traces may hold what clients send
        run_dir.mkdir()
        if not options.open_management:
            options.management_secret = management_secret(run_dir, options.management_secret_file)
        print(open_doors(options.address, run_dir, options.open_management), file=sys.stderr)
        return _foreground(options, run_dir) if options.foreground else _background(options, run_dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


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
    parser.add_argument("--no-restart", action="store_true", help="end with the reason when a process dies")
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
    parser.set_defaults(management_secret=None)
    parser.add_argument("--triton-arg", action="append", default=[], help="passed on to tritonserver")
    return parser


def _check(options: Namespace) -> None:
    for name, text in REFUSED.items():
        if getattr(options, name):
            raise ConfigError(text)
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


def _run_dir(options: Namespace) -> Path:
    run_dir = Path(tempfile.gettempdir()) / f"manylora-{os.getuid()}-{options.http_port}"
    check_own_directory(run_dir)
    return run_dir


def _take_over(run_dir: Path, http_port: int) -> None:
    """Clear what a supervisor left that is no more."""
    state = read_state(run_dir)
    if state and is_alive(state["supervisor"]):
        raise ConfigError(
            f"a launcher runs already for this port (process {state['supervisor']}): use --stop"
        )
    if state:
        clear_leftovers(state["processes"], http_port)
    shutil.rmtree(run_dir)


def _supervise(options: Namespace, run_dir: Path) -> int:
    settings = Options(
        model_repo=with_defaults(options.model_repo.resolve(), run_dir),
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        address=options.address,
        start_timeout=options.start_timeout,
        drain_timeout=options.drain_timeout,
        hang_timeout=options.hang_timeout,
        restart=not options.no_restart,
        verbose_log=str(Path(options.log_file).resolve()) if options.log else None,
        triton_args=tuple(options.triton_arg),
        management_secret=options.management_secret,
    )
    deputy = not (options.foreground or options.no_restart)
    return Supervisor(settings, options.tritonserver, run_dir, deputy).run()


def _foreground(options: Namespace, run_dir: Path) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    code = _supervise(options, run_dir)
    if code:
        _report_failure(run_dir)
    return code


def _background(options: Namespace, run_dir: Path) -> int:
    """Fork a supervisor of its own session, and wait until it is ready or gave up."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(run_dir / "supervisor.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        code = 1
        try:
            code = _supervise(options, run_dir)
        finally:
            os._exit(code)
    started = time.monotonic()
    while True:
        state = read_state(run_dir) or {"state": "starting"}
        if state["state"] == "ready":
            lead = "\r" if sys.stdout.isatty() else ""
            print(f"{lead}ready after {time.monotonic() - started:.1f} s on http port {options.http_port}")
            return 0
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            if sys.stdout.isatty():
                print()
            _report_failure(run_dir)
            return 1
        if sys.stdout.isatty():
            print(f"\r{state['state']} {time.monotonic() - started:.0f} s ", end="", flush=True)
        time.sleep(0.2)


def _report_failure(run_dir: Path) -> None:
    state = read_state(run_dir)
    print((state or {}).get("reason") or "the server did not start", file=sys.stderr)
    log = run_dir / "server.log"
    if log.exists():
        kept = Path(tempfile.gettempdir()) / f"{run_dir.name}.log"
        copy_private(log, kept)
        print(f"the server's log: {kept}", file=sys.stderr)
    shutil.rmtree(run_dir, ignore_errors=True)


def _stop(options: Namespace) -> int:
    run_dir = _run_dir(options)
    state = read_state(run_dir)
    if not state or not is_alive(state["supervisor"]):
        print(f"no server was launched on http port {options.http_port}")
        return 0
    os.kill(state["supervisor"], signal.SIGTERM)
    deadline = time.monotonic() + options.drain_timeout + 30
    while is_alive(state["supervisor"]):
        if time.monotonic() > deadline:
            raise ConfigError(f"the launcher's process {state['supervisor']} does not end")
        time.sleep(0.1)
    print("stopped")
    return 0


def _status(options: Namespace) -> int:
    run_dir = _run_dir(options)
    state = read_state(run_dir)
    if not state or not is_alive(state["supervisor"]):
        print(f"no server was launched on http port {options.http_port}")
        return 1
    print(json.dumps(state | {"log": str(run_dir / "server.log")}))
    return 0 if state["state"] == "ready" else 1

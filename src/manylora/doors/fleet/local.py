"""Runs a fleet on this machine: Ray, the replicas, and the endpoint in this process."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray
from ray import serve
from ray._private.worker import global_worker
from ray.serve.handle import DeploymentHandle

from manylora.doors.fleet.application import replicas
from manylora.doors.fleet.cleaner import cleaned, end_started
from manylora.doors.fleet.front import APPLICATION, make_front
from manylora.doors.fleet.options import FleetOptions
from manylora.doors.http.server import http_server
from manylora.doors.http.serving.connections import Clients, check_certificate, listen, raise_open_files
from manylora.doors.triton.launcher.processes import exit_text
from manylora.errors import ConfigError
from manylora.system.folders import temporary_folder

logger = logging.getLogger("manylora")

LONGEST_FOLDER = 43  # bytes of its path: socket paths are limited to 107, and Ray adds 64
VITAL = ("gcs_server", "raylet")  # processes of Ray without which it has no replicas
TRIES, SLOW = 4, "timed out during startup"  # to start Ray, whose timeout cannot be configured
REASON = re.compile(r"(?:ConfigError|ValueError): (.*)")


def run(given: FleetOptions) -> None:
    """Serve until a signal. Running requests then have drain_seconds to finish. Nothing is left behind. If a
    process of Ray ends, the command starts again in the same process.

    Raises ConfigError, and KeyboardInterrupt after Ctrl-C.
    """
    options = given.located()
    assert isinstance(options, FleetOptions)
    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    clients = Clients(options.http_limits(raise_open_files(options.max_connections)))
    sockets, environment = listen(options.host, options.port, clients), dict(os.environ)
    try:
        with temporary_folder("fleet") as folder:
            if len(os.fsencode(folder)) > LONGEST_FOLDER:
                raise ConfigError(f"TMPDIR: {folder.parent} is too long a path for the sockets of Ray")
            # A killed replica cannot remove its own folder.
            shared = replace(
                options,
                lora_disk_dir=options.lora_disk_dir or folder / "adapters",
                lora_upload_dir=options.lora_upload_dir or folder / "uploads",
            )
            with cleaned(folder), _ray(shared, folder, environment):
                front = make_front(shared, _start(shared))
                http_server(options, front, clients).run(list(sockets))
    finally:
        for one in sockets:
            one.close()


@contextmanager
def _ray(options: FleetOptions, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A Ray of our own. Start this command again, with this environment, when it has lost a vital process: it
    replaces none of them. The cleaner notices the new program as it notices a kill. Raises ConfigError."""
    shares = math.ceil(options.cpus * options.most_replicas) + 1  # not cores; one for Ray's own actors
    for _ in range(TRIES):
        try:
            ray.init(
                address="local",  # a separate instance, even if Ray already runs here
                num_cpus=shares,
                object_store_memory=options.object_store_bytes,
                include_dashboard=options.dashboard,
                logging_level="warning",
                _temp_dir=str(folder),
            )
            break
        except Exception as error:  # Ray raises no specific type
            if SLOW not in str(error):
                raise
            logger.warning("Ray has not started in its 30 s: the machine is busy")
            end_started(folder)
    else:
        raise ConfigError(f"Ray has not started in {TRIES} times 30 s: the machine is too busy")
    ended, node = threading.Event(), global_worker.node

    def watch() -> None:
        while not ended.wait(0.25):
            lost = [(kind, process.returncode) for kind, process in node.dead_processes() if kind in VITAL]
            if lost and not ended.is_set():
                [(kind, code), *_] = lost
                logger.critical("Ray's %s has ended with %s: the fleet starts again", kind, exit_text(code))
                os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

    thread = threading.Thread(target=watch, name="manylora-ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        serve.shutdown()
        ray.shutdown()


def _start(options: FleetOptions) -> DeploymentHandle:
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    gpus = options.gpus(ray.cluster_resources().get("GPU", 0))
    shares = f"{options.cpus:g} CPUs and {gpus:g} GPUs each"
    ranks = f", {options.ranks} ranks each" if options.ranks > 1 else ""
    logger.info("starting %d replicas with %s%s", options.replicas, shares, ranks)
    try:
        return serve.run(replicas(options, gpus), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:  # its text contains the traceback of a replica
        reasons = REASON.findall(str(error))
        if not reasons:
            raise
        raise ConfigError(reasons[-1]) from error

"""FleetOptions: the options of `manylora fleet`, which extend those of `manylora serve`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.adapters.catalog.names import is_name
from manylora.config.foreign import FLEET
from manylora.config.settings import rows, setting
from manylora.doors.http.arguments import options_of, parse
from manylora.doors.http.options import ServeOptions
from manylora.errors import ConfigError
from manylora.system.resources import usable_processors

LEAST_STORE = 78643200  # bytes: Ray's own minimum
SMALLEST = 0.1  # seconds: about how often Ray's controller checks its replicas


def parse_pin(given: str) -> tuple[str, int]:
    """NAME or NAME=REPLICAS. Raises ArgumentTypeError."""
    name, equals, count = given.partition("=")
    if not is_name(name) or (equals and not (count.isdecimal() and 0 < int(count) < 10**6)):
        raise argparse.ArgumentTypeError(f"must be NAME or NAME=REPLICAS, got {given[:200]!r}")
    return name, int(count or 1)


@dataclass(frozen=True)
class FleetOptions(ServeOptions):
    """Each field is a flag, a key of the file, and a key of the `args` of a Ray Serve application."""

    # fmt: off
    replicas: int = setting(2, "number of servers; with max_replicas, the initial number", least=1)
    min_replicas: int | None = setting(
        None, "autoscaling: minimum number of replicas; default: replicas", least=1)
    max_replicas: int | None = setting(
        None, "autoscaling: maximum number of replicas; default: no autoscaling", least=1)
    target_requests: float | None = setting(
        None, "autoscaling: target of running and waiting requests per replica; default: 16", least=SMALLEST)
    upscale_delay: float = setting(
        10.0, "autoscaling: seconds of higher load before a replica is added", least=0)
    downscale_delay: float = setting(
        300.0, "autoscaling: seconds of lower load before a replica is removed", least=0)
    replica_cpus: float | None = setting(
        None, "CPUs per replica, including all its ranks; default: the machine's, divided", least=SMALLEST)
    replica_gpus: float | None = setting(
        None, "GPUs per replica, 0.5 for two on one; default: one per rank if there are any, else 0", least=0)
    replica_requests: int = setting(
        256, "maximum running and waiting requests per replica; further ones wait in the front", least=1)
    pin: tuple[tuple[str, int], ...] = setting(
        (), "NAME=REPLICAS: serve this adapter on a fixed set of this many replicas", parse=parse_pin)
    report_seconds: float = setting(
        1.0, "seconds between reports of the adapters that a replica holds", least=SMALLEST)
    object_store_bytes: int = setting(
        80 * 2**20, "size of Ray's shared memory on this machine", least=LEAST_STORE)
    dashboard: bool = setting(False, "start Ray's dashboard on 127.0.0.1:8265")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, instead in FLEET.refused.items():
            if getattr(self, name) != rows(FleetOptions)[name].default:
                raise ConfigError(f"{name} has no effect in a fleet: {instead}")
        least, most = self.least_replicas, self.most_replicas
        if self.max_replicas is None and (self.min_replicas, self.target_requests) != (None, None):
            raise ConfigError("min_replicas and target_requests need max_replicas: without it nothing scales")
        if not least <= self.replicas <= most:
            raise ConfigError(f"replicas must be from {least} to {most} (min_replicas, max_replicas)")

    @property
    def shared_dir(self) -> Path | None:
        return self.lora_upload_dir

    @property
    def least_replicas(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most_replicas(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def ranks(self) -> int:
        """Processes that run the model of each replica. Raises ConfigError."""
        if Path(self.model).is_dir():
            return self.engine_config().world_size  # may be recorded in the model's folder
        sizes = (self.sections.get(name) or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size"))
        return math.prod(sizes)

    @property
    def cpus(self) -> float:
        return self.replica_cpus or max(self.ranks, usable_processors() // self.most_replicas)

    def threads(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Of each rank, if a replica has several: Ray would give each all of them. None: as Ray sets."""
        if self.ranks == 1 or "OMP_NUM_THREADS" in environment:
            return None
        return max(1, int(self.cpus) // self.ranks)

    def gpus(self, found: float) -> float:
        """GPUs per replica. found: number of available GPUs. Raises ConfigError."""
        ranks, given = self.ranks, self.replica_gpus
        if given is not None:
            if ranks > 1 and given not in (0, ranks):
                raise ConfigError(f"replica_gpus must be {ranks}, one for each rank, or 0; got {given:g}")
            return given
        if not found or self.sections.get("device") == "cpu":
            return 0
        if ranks == 1:
            return min(1, found / self.most_replicas)
        if found < ranks * self.most_replicas:
            needed = f"{self.most_replicas} replicas of {ranks} ranks need {self.most_replicas * ranks} GPUs"
            raise ConfigError(f"{needed}, and there are {found:g}: give fewer --replicas, or --device cpu")
        return ranks


def parse_options(arguments: Sequence[str]) -> FleetOptions:
    """From the command line, which overrides the file it names. Raises ConfigError; argparse may exit."""
    purpose = "One OpenAI endpoint, and several servers behind it."
    return parse(arguments, FleetOptions, "fleet", purpose, FLEET.refused)


def read_args(given: Mapping[str, Any]) -> FleetOptions:
    """Options from the `args` of an application in a Ray Serve configuration. Raises ConfigError."""
    return options_of(given, FleetOptions)

"""FleetOptions: the options of `manylora fleet`, which extend those of `manylora serve`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from manylora.config.values import at_least, one_of
from manylora.errors import ConfigError
from manylora.lora.catalog.names import is_name
from manylora.openai.arguments import options_of, parse
from manylora.openai.options import ServeOptions
from manylora.system.cgroup import usable_processors

POLICIES = ("affinity", "random")
SMALLEST = 0.1  # seconds: about how often Ray's controller checks its replicas
# Options of a single server that cannot work behind a fleet, with what to do instead.
REFUSED = {
    "triton_url": "it names one Triton, and each replica has an engine of its own: use manylora serve",
    "triton_model": "each replica has an engine of its own: use manylora serve with --triton-url",
    "restart": "Ray starts replicas again that ended or were killed",
}


def _option(default: Any, text: str, kind: Callable[[Any], Any] = str) -> Any:
    return field(default=default, metadata={"help": text, "kind": kind})


def parse_pin(given: str) -> tuple[str, int]:
    """NAME or NAME=REPLICAS. Raises ArgumentTypeError."""
    name, equals, count = given.partition("=")
    if not is_name(name) or (equals and not (count.isdecimal() and 0 < int(count) < 10**6)):
        raise argparse.ArgumentTypeError(f"must be NAME or NAME=REPLICAS, got {given[:200]!r}")
    return name, int(count or 1)


@dataclass(frozen=True)
class FleetOptions(ServeOptions):
    """Each field is a flag, a key of the file, and a key of the `args` of a Ray Serve application."""

    replicas: int = _option(2, "number of servers; with max_replicas, the initial number", int)
    min_replicas: int | None = _option(
        None, "autoscaling: minimum number of replicas; default: replicas", int
    )
    max_replicas: int | None = _option(
        None, "autoscaling: maximum number of replicas; default: no autoscaling", int
    )
    target_requests: float | None = _option(
        None, "autoscaling: target of running and waiting requests per replica; default: 16", float
    )
    upscale_delay: float = _option(
        10.0, "autoscaling: seconds of higher load before a replica is added", float
    )
    downscale_delay: float = _option(
        300.0, "autoscaling: seconds of lower load before a replica is removed", float
    )
    replica_cpus: float | None = _option(
        None, "CPUs per replica, including all its ranks; default: the machine's, divided", float
    )
    replica_gpus: float | None = _option(
        None,
        "GPUs per replica, 0.5 for two on one; default: one per rank if there are any, else 0",
        float,
    )
    replica_requests: int = _option(
        256, "maximum running and waiting requests per replica; further ones wait in the front", int
    )
    routing: str = _option("affinity", "affinity: prefer a replica that holds the adapter; or random")
    pin: tuple[tuple[str, int], ...] = _option(
        (), "NAME=REPLICAS: serve this adapter on a fixed set of this many replicas", parse_pin
    )
    report_seconds: float = _option(
        1.0, "seconds between reports of the adapters that a replica holds", float
    )
    object_store_bytes: int = _option(80 * 2**20, "size of Ray's shared memory on this machine", int)
    dashboard: bool = _option(False, "start Ray's dashboard on 127.0.0.1:8265", bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {one.name: one for one in fields(self) if getattr(self, one.name) != one.default}
        for name, instead in REFUSED.items():
            if name in given:
                raise ConfigError(f"{name} has no effect in a fleet: {instead}")
        one_of(POLICIES, routing=self.routing)
        at_least(1, self, "replicas", "replica_requests", "min_replicas", "max_replicas")
        at_least(0, self, "upscale_delay", "downscale_delay", "replica_gpus")
        at_least(78643200, self, "object_store_bytes")  # Ray's own minimum
        at_least(SMALLEST, self, "report_seconds", "replica_cpus", "target_requests")
        self._check_scaling()

    def _check_scaling(self) -> None:
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
        """CPUs per replica."""
        return self.replica_cpus or max(self.ranks, usable_processors() // self.most_replicas)

    def threads(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Threads of each rank, if a replica has several: Ray would give each rank all threads of its
        replica. None: as Ray sets.
        """
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
        if not found or self.device == "cpu":
            return 0
        if ranks == 1:
            return min(1, found / self.most_replicas)
        if found < ranks * self.most_replicas:
            needed = f"{self.most_replicas} replicas of {ranks} ranks need {self.most_replicas * ranks} GPUs"
            raise ConfigError(f"{needed}, and there are {found:g}: give fewer --replicas, or --device cpu")
        return ranks


def parse_options(arguments: Sequence[str]) -> FleetOptions:
    """Options from the command line, which overrides the file it names. Raises ConfigError; argparse may
    exit.
    """
    purpose = "One OpenAI endpoint, and several servers behind it."
    return parse(arguments, FleetOptions, "fleet", purpose, REFUSED)


def read_args(given: Mapping[str, Any]) -> FleetOptions:
    """Options from the `args` of an application in a Ray Serve configuration. Raises ConfigError."""
    return options_of(given, FleetOptions)

"""FleetOptions: the options of `manylora fleet`, which are those of `manylora serve` and its own."""

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
from manylora.lora.library.names import is_name
from manylora.openai.arguments import options_of, parse
from manylora.openai.options import ServeOptions

POLICIES = ("affinity", "random")
SMALLEST = 0.1  # seconds: Ray's controller looks at its replicas about this often
# Options of one server that cannot act behind several, and what to do instead.
REFUSED = {
    "triton_url": "it names one Triton, and each replica has an engine of its own: use manylora serve",
    "triton_model": "each replica has an engine of its own: use manylora serve with --triton-url",
    "restart": "Ray starts a replica again that ended or was killed",
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
    """Each field is a flag, and a key of the file and of the `args` of a Ray Serve application."""

    replicas: int = _option(2, "servers; with max_replicas, those at the start", int)
    min_replicas: int | None = _option(None, "of autoscaling; default: replicas", int)
    max_replicas: int | None = _option(None, "of autoscaling; default: none", int)
    target_requests: float | None = _option(
        None, "requests in each replica, running and waiting, that autoscaling aims at; default: 16", float
    )
    upscale_delay: float = _option(10.0, "seconds of more load before a replica is added", float)
    downscale_delay: float = _option(300.0, "seconds of less before one is ended", float)
    replica_cpus: float | None = _option(
        None, "CPUs of each replica, with all its ranks; default: the machine's, divided", float
    )
    replica_gpus: float | None = _option(
        None,
        "GPUs of each replica, 0.5 for two on one; default: one for each rank where there are any, else 0",
        float,
    )
    replica_requests: int = _option(
        256, "requests that one replica has at one time, running and waiting; more wait in front", int
    )
    routing: str = _option("affinity", "affinity: to a replica that holds the adapter; random")
    pin: tuple[tuple[str, int], ...] = _option(
        (), "NAME=REPLICAS: as many replicas serve this adapter, always the same ones", parse_pin
    )
    report_seconds: float = _option(1.0, "between two reports of what a replica holds", float)
    object_store_bytes: int = _option(80 * 2**20, "of Ray's shared memory on this machine", int)
    dashboard: bool = _option(False, "start Ray's dashboard, on 127.0.0.1:8265", bool)

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
        """Processes that the model of each replica runs on. Raises ConfigError."""
        if Path(self.model).is_dir():
            return self.engine_config().world_size  # which may be recorded in the folder
        sizes = (self.sections.get(name) or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size"))
        return math.prod(sizes)

    @property
    def cpus(self) -> float:
        """Of each replica."""
        return self.replica_cpus or max(self.ranks, (os.cpu_count() or 1) // self.most_replicas)

    def threads(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Of each of several ranks, which Ray would give all threads of their replica; None: as Ray says."""
        if self.ranks == 1 or "OMP_NUM_THREADS" in environment:
            return None
        return max(1, int(self.cpus) // self.ranks)

    def gpus(self, found: float) -> float:
        """Of each replica. found: GPUs that there are. Raises ConfigError."""
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
    """The command line, over the file that it names. Raises ConfigError; argparse ends the process."""
    purpose = "One OpenAI endpoint, and several servers behind it."
    return parse(arguments, FleetOptions, "fleet", purpose, REFUSED)


def read_args(given: Mapping[str, Any]) -> FleetOptions:
    """The `args` of an application in a Ray Serve configuration. Raises ConfigError."""
    return options_of(given, FleetOptions)

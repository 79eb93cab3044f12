"""Joins torch's collectives, in which the ranks of a group compute together."""

from __future__ import annotations

import os
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import Store

from manylora.errors import ConfigError
from manylora.group.place import Place


def join_collectives(place: Place, store: Store, backend: str) -> None:
    """Every rank calls this at the same time; it waits for all. backend: of torch. Raises ConfigError."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already: one engine of several ranks at a time"
        )
    loopback = place.on_one_host and "GLOO_SOCKET_IFNAME" not in os.environ
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to see them
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
    finally:
        if loopback:
            del os.environ["GLOO_SOCKET_IFNAME"]


def leave_group() -> None:
    """Once nothing is computed any more, or ranks are gone. Idempotent."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()

"""How long the threads of a step on a CPU spin for each other."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["thread_settings"]


def thread_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with about 50 us unless it says otherwise: longer than between two operations.

    libgomp reads it when torch is imported. Its own choice is milliseconds, on a core that other work may
    need: then the threads wait for one another's turns.
    """
    said = any(name in environment for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return dict(environment) | ({} if said else {"GOMP_SPINCOUNT": "1000"})

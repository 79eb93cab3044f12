"""How long OpenMP threads of a step on a CPU spin while they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping


def thread_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a spin time of about 50 us, longer than between two operations, unless one is set.

    libgomp reads it when torch is imported. Its default is milliseconds, on a core that other work may need.
    """
    is_set = any(name in environment for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return dict(environment) | ({} if is_set else {"GOMP_SPINCOUNT": "1000"})

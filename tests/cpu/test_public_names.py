"""Protects each module's list of public names: it can be imported, and has them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import manylora

PACKAGE = Path(manylora.__file__).parent
WITH_RAY = (
    "fleet.router", "fleet.everyone", "fleet.relay", "fleet.changes", "fleet.front", "fleet.application",
    "fleet.local",
)  # fmt: skip


def test_public_names_exist() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if name.removeprefix("manylora.") in WITH_RAY and find_spec("ray") is None:
            continue  # the extra fleet is not installed
        loaded = importlib.import_module(name)
        names = getattr(loaded, "__all__", [])
        assert len(names) == len(set(names)), f"{name}.__all__ names something twice"
        assert all(hasattr(loaded, public) for public in names), name

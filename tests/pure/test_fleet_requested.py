"""Protects the guess of a request's adapter in front of a fleet, where a wrong one costs a load."""

from __future__ import annotations

from typing import Any

import pytest

from manylora.fleet.requested_adapter import asked_adapter
from manylora.lora.catalog.names import Aliases


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, None),
        ({"model": "base"}, None),
        ({"model": "a"}, "a"),
        ({"model": "a:latest"}, "a"),
        ({"model": "base:a"}, "a"),
        ({"model": "short"}, "long"),
        ({"model": "anything", "lora_model": "a"}, "a"),
        ({"model": "base", "lora_request": {"lora_name": "a"}}, "a"),
        ({"model": "a+b"}, "a"),
        ({"model": "base:a+b"}, "a"),
        ({"model": "base", "lora": [{"name": "a", "scale": 0.5}, {"name": "b"}]}, "a"),
        ({"model": "base", "lora": []}, None),
        ({"model": 1, "lora": [2], "lora_request": 3, "adapter_id": None}, None),
        ({"model": "base", "lora": [{"name": 7}]}, None),
    ],
)
def test_the_adapter_that_is_asked_for(fields: dict[str, Any], adapter: str | None) -> None:
    assert asked_adapter(fields, ("base",), Aliases({"short": "long"})) == adapter

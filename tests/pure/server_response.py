"""A response as Triton's binding has it: sending drops outputs that the client has not asked for."""

from __future__ import annotations

import weakref
from typing import Any


class Output:
    """An output tensor."""


class ServerResponse:
    """content: for the test. Nobody but the binding has the tensors, and no client asks for the last one."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self._outputs = [Output(), Output()]

    def output_tensors(self) -> list[Output]:
        return list(self._outputs)

    def drop_unwanted(self) -> None:
        """To be called by `send`. The binding does this without Python's lock, so nothing may be freed."""
        dropped = weakref.ref(self._outputs.pop())
        assert dropped() is not None

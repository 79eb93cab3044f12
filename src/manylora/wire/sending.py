"""Sends responses, and keeps their tensors alive meanwhile."""

from __future__ import annotations

from manylora.wire.server_types import Response, ResponseSender


def send(sender: ResponseSender[Response], response: Response | None, flags: int = 0) -> None:
    """As the sender's own `send`. response: None only with the flag FINAL. Thread-safe.

    The binding sends without holding the GIL, and drops outputs that the client did not request. Without
    another reference it would free their arrays concurrently with running Python code, which occasionally
    crashes the process later.
    """
    if response is None:
        sender.send(flags=flags)
        return
    kept = response.output_tensors()
    sender.send(response, flags)
    del kept  # only now

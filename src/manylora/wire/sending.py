"""Sends responses, and keeps their tensors meanwhile."""

from __future__ import annotations

from manylora.wire.server_types import Response, ResponseSender


def send(sender: ResponseSender[Response], response: Response | None, flags: int = 0) -> None:
    """As the sender's own. response: None only with the flag FINAL. Any thread.

    The binding sends without Python's lock, and drops the outputs that the client has not asked for. If
    nobody else had them, it would free their arrays beside running Python code, which now and then ends the
    process some time later.
    """
    if response is None:
        sender.send(flags=flags)
        return
    kept = response.output_tensors()
    sender.send(response, flags)
    del kept  # not before

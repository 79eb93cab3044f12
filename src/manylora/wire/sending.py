"""When the server's tensors and other objects are freed: not while it uses them, nor after its memory."""

from __future__ import annotations

import gc

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


def release(model: object) -> None:
    """Frees what a model refers to, at the end of its `finalize`.

    Tensors, requests and metrics use the server's shared memory. The model and its threads refer to each
    other, so without this they would be freed when the interpreter ends. By then the memory is gone, and
    the process crashes.
    """
    vars(model).clear()
    gc.collect()

"""The exceptions of manylora, as a tree.

The text of a RequestError is sent to the client unchanged: one sentence, no server paths, no stack trace.
"""

from __future__ import annotations

MAX_TEXT = 1000  # characters


def printable(text: str) -> str:
    """Text from outside as one line of limited length, with control characters escaped."""
    short = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


class ManyloraError(Exception):
    """Base of all exceptions that manylora raises on purpose."""


class ConfigError(ManyloraError, ValueError):
    """A setting or file with which nothing can start. A ValueError, as callers of vLLM's `LLM` expect."""


class EngineDeadError(ManyloraError):
    """The engine thread ended. No request will be answered any more."""


class DeviceLostError(ManyloraError):
    """The device no longer responds. The process must be restarted."""


class GroupLostError(ManyloraError):
    """A rank of the group ended or hangs. All of the group's processes must be restarted."""


class RequestError(ManyloraError):
    """This request cannot be served as asked."""


class UnavailableError(RequestError):
    """The request is fine but cannot be answered now. It can be retried later or elsewhere."""


class QueueFullError(UnavailableError):
    """Too many requests are waiting. Clients match either half of the text: the executor's, or Triton's."""

    def __init__(self, max_queue_size: int | str) -> None:
        super().__init__(
            f"Maximum queue size of {max_queue_size} has been reached, please try again later "
            "(Exceeds maximum queue size)"
        )


class DrainingError(UnavailableError):
    """The service is about to stop and accepts no new requests."""

    def __init__(self) -> None:
        super().__init__("Server is stopping: no new requests are taken, please send this one elsewhere")


class SleepingError(UnavailableError):
    """The engine's memory was given to others."""

    def __init__(self) -> None:
        super().__init__("The engine is asleep: wake it up first (POST /wake_up, or LLM.wake_up)")


class RequestCancelledError(RequestError):
    """The answer to a cancelled request, with Triton's status for it."""


class TextTooLongError(RequestError):
    """A text has more tokens than fit the context, or too many characters."""


class AdapterError(RequestError):
    """Caused by its adapter. The text may quote names from it, so it is made one printable line."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class AdapterInvalidError(AdapterError):
    """Tensors or files that are not an adapter this model can use."""


class AdapterChangedError(AdapterError):
    """The adapter's files changed between check and load."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter {name[:128]} changed while it was loaded, please send the request again")


class AdapterNotFiniteError(AdapterInvalidError):
    """The adapter makes logits NaN or infinite. The same request would fail again."""


class AdapterNotFoundError(AdapterError):
    """The catalog has no adapter of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"adapter {name[:128]!r} is not in this server's catalog: it holds the adapters below lora_root "
            "(in Triton: lora_catalog_dir), by their paths"
        )


class AdapterNotCachedError(AdapterError):
    """Its task id is not in the cache. Clients match "Please send LoRA weights with request", and do so."""

    def __init__(self, task_id: int) -> None:
        super().__init__(f"LoRA task {task_id} not found in cache. Please send LoRA weights with request")


class AdapterCacheFullError(AdapterError):
    """Every adapter in the cache is in use, or this one is larger than the cache."""

"""The exceptions of manylora, each under the one that it is a kind of.

The text of a RequestError goes to the client as it is: one sentence, no path of the server, no stack trace.
"""

from __future__ import annotations

MAX_TEXT = 1000  # characters


def printable(text: str) -> str:
    """Text from outside in one line of bounded length: what a terminal or a log would act on is escaped."""
    short = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


class ManyloraError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(ManyloraError):
    """A setting, checkpoint or repository the service cannot start with."""


class EngineDeadError(ManyloraError):
    """The engine thread ended; nothing more will be answered."""


class DeviceLostError(ManyloraError):
    """The device answers nothing any more; the process must be started again."""


class GroupLostError(ManyloraError):
    """A rank of the group ended or hangs; all of its processes must be started again."""


class RequestError(ManyloraError):
    """This one request cannot be served as asked."""


class UnavailableError(RequestError):
    """Nothing is wrong with the request: it can be answered later, or elsewhere."""


class QueueFullError(UnavailableError):
    """Too many requests wait already. Clients match either half: the executor's words, and Triton's."""

    def __init__(self, max_queue_size: int | str) -> None:
        super().__init__(
            f"Maximum queue size of {max_queue_size} has been reached, please try again later "
            "(Exceeds maximum queue size)"
        )


class DrainingError(UnavailableError):
    """The service is about to stop and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("Server is stopping: no new requests are taken, please send this one elsewhere")


class RequestCancelledError(RequestError):
    """What is told to who asked for a stop, under Triton's status for it."""


class TextTooLongError(RequestError):
    """A text has more tokens than fit the context, or too many characters."""


class AdapterError(RequestError):
    """The request's adapter is the reason it cannot be served. The text may quote names of the adapter's own,
    so it is made one line that can be shown and logged."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class AdapterInvalidError(AdapterError):
    """Tensors or files that are not a usable adapter for this model."""


class AdapterChangedError(AdapterError):
    """Its files changed between their check and their loading."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter {name[:128]} changed while it was loaded, please send the request again")


class AdapterNotFiniteError(AdapterInvalidError):
    """Logits under it are a NaN or an infinity. The same request would fail again."""


class AdapterNotFoundError(AdapterError):
    """No adapter of this name is in the catalog."""

    def __init__(self, name: str) -> None:
        super().__init__(f"adapter {name[:128]!r} is not in this server's catalog")


class AdapterNotCachedError(AdapterError):
    """Only a task id came, and its adapter is not (or no longer) here.

    Clients match the words "Please send LoRA weights with request" to send the tensors again.
    """

    def __init__(self, task_id: int) -> None:
        super().__init__(f"LoRA task {task_id} not found in cache. Please send LoRA weights with request")


class AdapterCacheFullError(AdapterError):
    """Every adapter in the cache is in use, or this one is larger than the cache."""

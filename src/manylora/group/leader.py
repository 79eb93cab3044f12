"""Leader: rank 0's side of a group. It tells the other ranks what it does, so that all ranks do the same."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch.distributed import Store

from manylora.config.engine import EngineConfig
from manylora.errors import ConfigError, GroupLostError, RequestError
from manylora.group.agreement import check_identity, identity, to_values
from manylora.group.channel import ChannelClosedError, Message
from manylora.group.place import Place
from manylora.group.rendezvous import AGREED, REFUSED, START_S, group_store, meet_ranks, open_store
from manylora.group.watch import Watch

logger = logging.getLogger("manylora")

FIND_S = 5.0  # to find out whether an error was caused by the loss of a rank


class Leader:
    """Raises ConfigError if a rank does not join, or has another checkpoint or configuration.

    store: for torch's collectives.
    """

    def __init__(self, config: EngineConfig, place: Place) -> None:
        self.place, self._ended, self._told = place, False, 0
        self._lock = threading.Lock()  # protects the adapter channels
        store, token = open_store(place), secrets.token_hex(16) if place.address else ""
        self.store: Store = group_store(store, token)
        self._watch = Watch(place.size, meet_ranks(place, store, token) if place.address else None)
        try:
            self._greet(config, 0 if place.address else int(getattr(store, "port", 0)))
        except BaseException as error:
            if isinstance(error, ConfigError):
                self._refuse(str(error))
            self.close()
            raise

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Call `lost` once, from any thread, with the reason when a rank is lost."""
        self._watch.lost = lost
        if self._watch.reason is not None:
            lost(self._watch.reason)

    def tell(self, message: Message) -> None:
        """Make the other ranks do the same, in the order of the calls. One thread. Raises GroupLostError."""
        self._told += 1
        for link in self._watch.links:
            try:
                link.steps.send(message)
            except ChannelClosedError as error:
                raise self.lost(error) from error

    def ask(self, message: Message) -> None:
        """Make the other ranks do something beside the steps, and wait until they have.

        They do it after everything they were told before, which may still need pages that this gives to
        another adapter. Thread-safe. Raises RequestError if a rank could not do it, GroupLostError.
        """
        failed: str | None = None
        message = replace(message, values={**message.values, "after": self._told})
        with self._lock:
            try:
                for link in self._watch.links:
                    link.adapters.send(message)
                for link in self._watch.links:
                    failed = link.adapters.receive().values.get("error") or failed
            except ChannelClosedError as error:
                raise self.lost(error) from error
        if failed is not None:
            raise RequestError(f"The adapter could not be loaded: {failed}")

    def lost(self, error: BaseException) -> GroupLostError:
        """For an error in a joint operation: afterwards the ranks are no longer in step."""
        if isinstance(error, GroupLostError):
            return error
        reason = self._watch.wait_loss(FIND_S)
        if reason is None:
            logger.error("a step failed", exc_info=error)
            reason = f"a step failed on rank 0 of {self.place.size}: {type(error).__name__}"
            self._watch.note(reason)
        return GroupLostError(reason)

    def start_error(self, error: Exception) -> Exception:
        """The error to raise for an error while the group starts, which another rank may have caused."""
        reason = self._watch.wait_loss(0.0 if isinstance(error, ConfigError) else FIND_S)
        return error if reason is None else ConfigError(reason)

    def end(self, message: Message) -> bool:
        """Tell the other ranks to end, and wait for them. Returns False if that was done before."""
        if self._ended:
            return False
        with suppress(GroupLostError):
            if self._watch.reason is None:
                self.tell(message)
        self.close()
        return True

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._ended = True
        self._watch.close()

    def _greet(self, config: EngineConfig, port: int) -> None:
        place, expected = self.place, identity(config)
        deadline = time.monotonic() + START_S
        for link in self._watch.links:
            values = {"rank": link.rank, "size": place.size, "port": port}
            self.tell_one(link.rank, Message("start", values | {"config": to_values(config)}))
        for link in self._watch.links:
            found = self._watch.wait_hello(link.rank, deadline)
            if found is None:
                text = f"rank {link.rank} of {place.size} did not come within {START_S:.0f} s"
                raise ConfigError(self._watch.reason or text)
            check_identity(link.rank, found, expected)
        for link in self._watch.links:
            self.tell_one(link.rank, Message(AGREED))

    def _refuse(self, reason: str) -> None:
        """Pass the reason on to the other ranks, because each host's user sees only its own rank's
        messages.
        """
        for link in self._watch.links:
            with suppress(ChannelClosedError):
                link.steps.send(Message(REFUSED, {"reason": reason}))

    def tell_one(self, rank: int, message: Message) -> None:
        try:
            next(link for link in self._watch.links if link.rank == rank).steps.send(message)
        except ChannelClosedError as error:
            raise ConfigError(self._watch.wait_loss(FIND_S) or f"rank {rank} is gone") from error

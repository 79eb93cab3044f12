"""Files and batches of the OpenAI API, kept in one folder: what a killed server was doing goes on at the next
start."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.batches import lines as batch_lines
from manylora.doors.http.batches.lines import AnswerFile, BatchLine, NoRoomError, problem
from manylora.doors.http.serving.keys import ApiKey, Keyring
from manylora.system.folders import hold, make_temporary, remove_temporary

logger = logging.getLogger("manylora")

MAX_FILES, MAX_BATCHES = 10_000, 10_000
RUNNING_AT_ONCE = 8  # batches, each with this part of the bytes that are left; further ones wait
NO_FILES = "This server takes no files: ask one with batch_bytes above 0, or use manylora run-batch"
RETRY_S = 30.0  # until a batch goes on whose engine was gone, or whose answers the disk did not take
WINDOW, WINDOW_S = "24h", 24 * 3600
ENDED = ("completed", "failed", "expired", "cancelled")
BATCH_KEY = "manylora.batch_key"  # in the scope of a request: the key that its batch was made with


@dataclass(frozen=True)
class StoredFile:
    """owner: name of the API key that sent it. created_at: Unix time."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def card(self) -> dict[str, Any]:
        shown = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {"object": "file", "status": "processed", **shown}


@dataclass
class Batch:
    """As in the OpenAI API. owner: name of an API key. Times are in Unix seconds; None: not yet."""

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    def card(self) -> dict[str, Any]:
        shown = asdict(self)
        counts = {name: shown.pop(name) for name in ("total", "completed", "failed")}
        shown["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        del shown["owner"]
        more = {"expires_at": self.expires_at, "completion_window": WINDOW, "request_counts": counts}
        return {"object": "batch", **shown, **more}


class BatchStore:
    """Belongs to the event loop. at_once: lines in work. max_line: bytes.

    max_bytes: of all files together. folder: None creates a temporary one, which `close` removes.
    """

    def __init__(
        self, app: ASGIApp, keyring: Keyring, folder: Path | None, max_bytes: int, at_once: int, max_line: int
    ) -> None:
        self._app, self._keyring, self._max_bytes, self._max_line = app, keyring, max_bytes, max_line
        self._lock = -1  # of a folder that was given
        self._folder = self._open(folder) if max_bytes else Path()
        self._at_once = at_once
        self._slots = asyncio.Semaphore(at_once)
        self._running = asyncio.Semaphore(RUNNING_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}
        self._closing = False
        self._receiving = self._stored = 0  # bytes of files: being received, and kept
        if self._max_bytes:
            self._read()

    def _open(self, given: Path | None) -> Path:
        """Without a folder the server works, and takes no files."""
        try:
            folder = make_temporary("batches") if given is None else given
            for name in ("files", "batches"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            if given is not None:
                self._lock = hold(given, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
        except BlockingIOError:
            logger.warning("batch_dir: another server uses %s: this one takes no files", given)
        except OSError as error:
            logger.warning("batch_dir: this server takes no files: %s", error.strerror)
        self._max_bytes = 0
        return Path()

    def _read(self) -> None:
        """Load what an earlier process kept, remove what it left unfinished, and go on with its batches."""
        for path in [*self._folder.glob("files/*.json"), *self._folder.glob("batches/*.json")]:
            try:
                found = json.loads(path.read_bytes())
                if path.parent.name == "batches":
                    self.batches[found["id"]] = Batch(**found)
                else:
                    one = StoredFile(**found)
                    self._stored += self.path(one).stat().st_size
                    self.files[one.id] = one
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("batch_dir: %s cannot be read: %s", path, error)
        for path in self._folder.glob("files/file-*"):
            if path.suffix == ".partial" or (not path.suffix and path.name not in self.files):
                path.unlink(missing_ok=True)
        for batch in sorted(self.batches.values(), key=lambda one: one.created_at):
            if batch.status not in ENDED:
                self._start(batch)

    def path(self, file: StoredFile) -> Path:
        return self._folder / "files" / file.id

    @property
    def bytes_left(self) -> int:
        return self._max_bytes - self._receiving - self._stored

    async def counted(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same stream. Raises ApiError 403 if files are off, 413 when it has more bytes than are left."""
        if not self._max_bytes:
            raise ApiError(403, "not_allowed", NO_FILES)
        received = 0
        try:
            async for piece in stream:
                if len(piece) > self.bytes_left:
                    reason = f"There are {max(0, self.bytes_left)} bytes left for files: delete one of them"
                    raise ApiError(413, "request_too_large", reason, "file")
                received += len(piece)
                self._receiving += len(piece)
                yield piece
        finally:
            self._receiving -= received

    async def add(
        self, owner: str, filename: str, purpose: str, write: Callable[[BinaryIO], object]
    ) -> StoredFile:
        """Keep what `write` writes, on a thread. Raises ApiError 507 if the disk does not take it."""
        if len(self.files) >= MAX_FILES:
            raise ApiError(413, "too_many_files", f"There may be {MAX_FILES} files: delete one of them")
        name, now = f"file-{secrets.token_hex(12)}", int(time.time())
        made = StoredFile(name, owner, filename[:255], purpose, 0, now)
        path = self.path(made)

        def fill() -> int:
            with path.open("xb") as file:
                write(file)
                return file.tell()

        try:
            made = replace(made, bytes=await asyncio.to_thread(fill))
            self._write(path.with_name(f"{path.name}.json"), asdict(made))
        except OSError as error:
            path.unlink(missing_ok=True)
            logger.warning("a file cannot be kept: %s", error.strerror)
            reason = f"The file cannot be kept: {error.strerror}"
            raise ApiError(507, "insufficient_storage", reason) from error
        self.files[made.id] = made
        self._stored += made.bytes
        return made

    def delete(self, file: StoredFile) -> None:
        """Raises ApiError 409 if a batch reads it."""
        reading = [one.id for one in self.batches.values() if one.input_file_id == file.id]
        if any(self.batches[one].status not in ENDED for one in reading):
            raise ApiError(409, "file_in_use", f"file {file.id!r} is being answered: cancel {reading[-1]}")
        del self.files[file.id]
        self._stored -= file.bytes
        for path in (self.path(file), self._folder / "files" / f"{file.id}.json"):
            path.unlink(missing_ok=True)

    def create(self, key: ApiKey, file: StoredFile, endpoint: str, metadata: dict[str, str] | None) -> Batch:
        if len(self.batches) >= MAX_BATCHES:  # forget the oldest
            ended = [one for one in self.batches.values() if one.status in ENDED]
            if not ended:
                raise ApiError(429, "overloaded", f"{MAX_BATCHES} batches wait: try again", retry_after=60)
            oldest = min(ended, key=lambda one: one.created_at)
            del self.batches[oldest.id]
            self._state_of(oldest).unlink(missing_ok=True)
        name = f"batch_{secrets.token_hex(12)}"
        batch = Batch(name, key.name, file.id, endpoint, int(time.time()), metadata)
        self.batches[batch.id] = batch
        self._keep(batch)
        self._start(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """What was answered stays. No effect if it has ended."""
        if batch.status not in ENDED and batch.cancelling_at is None:
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self._keep(batch)
            if batch.id in self._tasks:
                self._tasks[batch.id].cancel()

    async def close(self) -> None:
        """Stop. A folder that was given keeps its batches for the next start."""
        self._closing, tasks = True, list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lock >= 0:
            os.close(self._lock)
        elif self._max_bytes:
            remove_temporary(self._folder)

    def _start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: Batch) -> None:
        try:
            async with self._running:
                while True:
                    try:
                        await self._answer(batch)
                        return
                    except batch_lines.ServerEndedError:  # it may be back; else the next start goes on
                        await asyncio.sleep(RETRY_S)
        except asyncio.CancelledError:
            if self._closing:
                raise
            self._end(batch, "cancelled")
        except Exception:
            logger.exception("%s failed", batch.id)
            self._fail(batch, "internal_error", "the server failed to answer this batch")

    async def _answer(self, batch: Batch) -> None:
        key, file = self._keyring.named(batch.owner), self.files.get(batch.input_file_id)
        if key is None or file is None:
            what = "API key" if key is None else "input file"
            self._fail(batch, "not_found", f"its {what} does not exist any more")
            return
        try:
            lines = await asyncio.to_thread(
                batch_lines.read_lines, self.path(file), self._max_line, batch.endpoint
            )
        except batch_lines.BatchInvalidError as error:
            batch.errors = error.problems
            self._end(batch, "failed")
            return
        share = max(1, self.bytes_left // RUNNING_AT_ONCE)
        answers = await asyncio.to_thread(AnswerFile, self._answers_of(batch), share)
        try:
            status = "cancelled" if batch.cancelling_at else await self._through(batch, key, lines, answers)
            await self._finish(batch, lines, answers, status)
        except asyncio.CancelledError:
            if self._closing:
                raise
            await self._finish(batch, lines, answers, "cancelled")
        finally:
            answers.close()

    async def _through(self, batch: Batch, key: ApiKey, lines: list[BatchLine], answers: AnswerFile) -> str:
        """Answer all lines. Returns the status that the batch then has."""
        batch.status, batch.total = "in_progress", len(lines)
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        self._keep(batch)

        def count() -> None:
            batch.completed, batch.failed = answers.completed, answers.failed

        count()
        work = batch_lines.answer_lines(
            self._app, self.path(self.files[batch.input_file_id]), lines, answers, self._slots,
            self._at_once, {BATCH_KEY: key}, count,
        )  # fmt: skip
        try:
            try:
                await asyncio.wait_for(work, max(0.0, batch.expires_at - time.time()))
                return "completed"
            except asyncio.TimeoutError:
                for line in lines:
                    if line not in answers:
                        error = {"code": "batch_expired", "message": "The batch has expired"}
                        answers.add(line, batch_lines.result(line, error=error), ok=False)
                return "expired"
        except NoRoomError as error:
            batch.errors = [problem("no_room", f"{error}: delete files, and make a batch of the others")]
        except OSError as error:
            logger.warning("the answers of %s cannot be kept: %s", batch.id, error.strerror)
            batch.errors = [problem("insufficient_storage", f"its answers cannot be kept: {error.strerror}")]
        finally:
            count()
        return "failed"

    async def _finish(self, batch: Batch, lines: list[BatchLine], answers: AnswerFile, status: str) -> None:
        """Write what was answered to files, until the disk takes them or the batch expires, and end it."""
        if status != "cancelled":
            batch.status = "finalizing"
        batch.finalizing_at = int(time.time())
        self._keep(batch)
        while True:
            try:
                for what, count in (("output", answers.completed), ("error", answers.failed)):
                    if getattr(batch, f"{what}_file_id") is None and count:
                        write = partial(answers.write, lines, ok=what == "output")
                        name = f"{batch.id}_{what}.jsonl"
                        made = await self.add(batch.owner, name, "batch_output", write)
                        setattr(batch, f"{what}_file_id", made.id)
                break
            except (ApiError, OSError) as error:
                logger.warning("the answers of %s cannot be written: %s", batch.id, error)
                if time.time() > batch.expires_at:
                    status, batch.errors = "failed", [problem("insufficient_storage", str(error))]
                    break
                await asyncio.sleep(RETRY_S)
        self._end(batch, status)

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        batch.errors = [problem(code, message)]
        self._end(batch, "failed")

    def _end(self, batch: Batch, status: str) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        self._keep(batch)
        self._answers_of(batch).unlink(missing_ok=True)

    def _keep(self, batch: Batch) -> None:
        try:
            self._write(self._state_of(batch), asdict(batch))
        except OSError as error:
            logger.warning("the state of %s cannot be kept: %s", batch.id, error.strerror)

    def _state_of(self, batch: Batch) -> Path:
        return self._folder / "batches" / f"{batch.id}.json"

    def _answers_of(self, batch: Batch) -> Path:
        return self._folder / "batches" / f"{batch.id}.answers"

    @staticmethod
    def _write(path: Path, value: dict[str, Any]) -> None:
        """Whole, or not at all. Raises OSError."""
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps(value), encoding="utf-8")
        whole.replace(path)

"""Tokenizers: those of adapters, each content once, the most recently used ones in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from manylora.errors import AdapterInvalidError
from manylora.lora.bounds import Bounds
from manylora.lora.formats.opened import read_small
from manylora.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 2**26
IN_MEMORY = 8  # a tokenizer counts as this many times the bytes of its file


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json with this content."""

    digest: str
    path: Path = field(compare=False)
    bounds: Bounds = field(compare=False)


class Tokenizers:
    """Thread-safe. Beyond max_bytes the least recently used is dropped; running requests keep theirs.

    base: its tokens must have the same ids in all of them. vocab_size: of the model.
    """

    def __init__(self, base: Tokenizer, vocab_size: int, max_bytes: int) -> None:
        self._base, self._vocab_size, self._max_bytes = base, vocab_size, max_bytes
        self._lock = threading.Lock()  # protects the next two
        self._held: OrderedDict[str, tuple[Tokenizer, int]] = OrderedDict()
        self.num_bytes = 0
        self._base_digest = _digest((base.directory / "tokenizer.json").read_bytes())
        self._opening = threading.Lock()  # one at a time, to limit memory

    def __len__(self) -> int:
        return len(self._held)

    def find(self, path: Path, bounds: Bounds) -> TokenizerFile | None:
        """The validated file at a path. None: it equals the base model's. Raises AdapterInvalidError."""
        content = _read(path, bounds)
        file = TokenizerFile(_digest(content), path, bounds)
        if file.digest == self._base_digest:
            return None
        if self.get(file) is None:
            self._add(file.digest, content)
        return file

    def get(self, file: TokenizerFile) -> Tokenizer | None:
        """None: it is not in memory."""
        with self._lock:
            found = self._held.get(file.digest)
            if found is None:
                return None
            self._held.move_to_end(file.digest)
            return found[0]

    def open(self, file: TokenizerFile) -> Tokenizer:
        """Read it again if necessary. Raises AdapterInvalidError, also if the file has other content now."""
        found = self.get(file)
        if found is not None:
            return found
        content = _read(file.path, file.bounds)
        if _digest(content) != file.digest:
            raise AdapterInvalidError(f"its {file.path.name} has changed, and is not in memory any more")
        return self._add(file.digest, content)

    def _add(self, digest: str, content: bytes) -> Tokenizer:
        """Raises AdapterInvalidError."""
        with self._opening:
            with self._lock:
                known = self._held.get(digest)
            if known is not None:
                return known[0]
            made, size = self._check(content), IN_MEMORY * len(content)
            with self._lock:
                self._held[digest] = made, size
                self.num_bytes += size
                while self.num_bytes > self._max_bytes and len(self._held) > 1:
                    _, (_, freed) = self._held.popitem(last=False)
                    self.num_bytes -= freed
            return made

    def _check(self, content: bytes) -> Tokenizer:
        """Raises AdapterInvalidError."""
        try:
            made = Tokenizer.parse(content.decode("utf-8"))
        except ValueError as error:
            raise AdapterInvalidError(f"its tokenizer.json is no tokenizer: {error}") from error
        own = made.vocabulary()
        for token, number in self._base.vocabulary().items():
            if own.get(token) != number:
                raise AdapterInvalidError(
                    f"its tokenizer.json has {own.get(token, 'no')} as the id of {token[:40]!r}, which is "
                    f"{number} in the base model: it may add tokens, and change none"
                )
        if max(own.values(), default=0) >= self._vocab_size:
            raise AdapterInvalidError(
                f"its tokenizer.json has {len(own)} tokens, with ids to {max(own.values())}: the base model "
                f"has room for ids below {self._vocab_size}"
            )
        return made


def _read(path: Path, bounds: Bounds) -> bytes:
    """Raises AdapterInvalidError."""
    try:
        return read_small(path, bounds, MAX_FILE_BYTES)
    except OSError as error:
        raise AdapterInvalidError(f"{path.name} cannot be read: {error.strerror}") from error


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()

"""CurrentTexts: what comes with adapters now, for APIs that do not track versions of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import AdapterError, AdapterInvalidError, ConfigError, printable
from manylora.lora.catalog.fingerprint import Fingerprint, fingerprint
from manylora.lora.text.adapter_text import TOKENIZER_BYTES, AdapterText, AdapterTexts, TrustedFolder
from manylora.lora.text.generation_defaults import GenerationDefaults
from manylora.text.tokenizer import Tokenizer

LOOK_S = 1.0  # time between checks of files
MAX_KNOWN = 4096

logger = logging.getLogger("manylora")


@dataclass(frozen=True)
class OwnText:
    """Used to process one request's text. tokenizer: with its chat template."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults


@dataclass
class _Known:
    """files: when `text` was read, or failed to be read. looked: time of the last check."""

    files: Fingerprint
    looked: float
    text: AdapterText


def trusted_texts(
    trusted: Sequence[str],
    roots: Sequence[Path],
    base: Tokenizer | None,
    vocab_size: int,
    tokenizer_bytes: int = TOKENIZER_BYTES,
) -> CurrentTexts | None:
    """trusted: as accepted by `TrustedFolder.parse`. Returns None if it is empty. roots: folders of adapters
    that links may lead to. The rest as in `AdapterTexts`. Raises ConfigError.
    """
    if not trusted:
        return None
    if base is None:
        raise ConfigError("lora_trust needs a tokenizer: leave skip_tokenizer_init out")
    try:
        folders = [TrustedFolder.parse(one) for one in trusted]
    except ValueError as error:
        raise ConfigError(f"lora_trust {error}") from error
    for folder in folders:
        if not folder.path.is_dir():
            raise ConfigError(f"lora_trust {folder.path} is not a directory: give folders")
    allowed = [*roots, *(folder.path for folder in folders)]
    return CurrentTexts(AdapterTexts(base, vocab_size, {}, folders, allowed, tokenizer_bytes))


class CurrentTexts:
    """Thread-safe. Changed files are read again within LOOK_S. If they are broken, the last good text
    stays.
    """

    def __init__(self, texts: AdapterTexts) -> None:
        self._texts = texts
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, Path], _Known] = OrderedDict()

    def find(self, name: str, folder: Path) -> OwnText | None:
        """The text of the adapter in a folder. None: it uses the base model's. Raises AdapterInvalidError if
        there never was a good one.
        """
        if self._texts.source(name, folder) is None:
            return None
        try:
            text = self._current(name, folder)
            try:
                tokenizer = self._texts.tokenizer(text, wait=True)
            except AdapterInvalidError:  # its file has changed, and the old tokenizer is no longer in memory
                with self._lock:
                    self._known.pop((name, folder), None)
                text = self._current(name, folder)
                tokenizer = self._texts.tokenizer(text, wait=True)
        except OSError as error:
            raise AdapterInvalidError(f"its files cannot be read at the moment: {error.strerror}") from error
        except AdapterError as error:
            raise AdapterInvalidError(f"adapter {printable(name)}: {error}") from error
        assert tokenizer is not None
        return OwnText(tokenizer, text.defaults)

    def is_at_hand(self, name: str, folder: Path) -> bool:
        """Whether `find` reads no large file, unless files have changed."""
        known = self._known.get((name, folder))
        if known is None:
            return self._texts.source(name, folder) is None
        return self._texts.tokenizer(known.text, wait=False) is not None

    def _current(self, name: str, folder: Path) -> AdapterText:
        key, now = (name, folder), time.monotonic()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None and now - known.looked < LOOK_S:
            return known.text
        files = fingerprint(folder)
        if known is not None and known.files == files:
            known.looked = now
            return known.text
        try:
            text = self._read(name, folder)
        except AdapterError as error:
            if known is None:
                raise
            logger.warning("adapter %s: its last good text goes on serving: %s", printable(name), error)
            text = known.text
        with self._lock:
            self._known[key] = _Known(files, now, text)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return text

    def _read(self, name: str, folder: Path) -> AdapterText:
        text = self._texts.read(name, folder)
        if text is None:  # a link was changed in between
            raise AdapterInvalidError("its folder has moved, try again")
        return text

"""The text settings that come with adapters now: by folder, and by name or task id in a Triton repository."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.adapters.catalog.files import AdapterFolders, Fingerprint, fingerprint, is_due
from manylora.adapters.catalog.names import read_names
from manylora.adapters.formats.safe_files import is_folder
from manylora.adapters.text.adapter_text import TOKENIZER_BYTES, AdapterText, AdapterTexts, TrustedFolder
from manylora.config.hub import model_folder
from manylora.config.model_folder import read_json
from manylora.config.repository import ENGINE, names_file, parameters_beside, value_of
from manylora.errors import AdapterError, AdapterInvalidError, ConfigError, printable
from manylora.generation.defaults import OwnText
from manylora.generation.tokenizer import Tokenizer
from manylora.request import LoraInput, LoraMix

MAX_KNOWN = 4096
BETWEEN = ";"  # separates folders in the parameter lora_trust

logger = logging.getLogger("manylora")


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
    """Thread-safe. Changed files are read again within LOOK_S; if they are broken, the last text stays."""

    def __init__(self, texts: AdapterTexts) -> None:
        self._texts = texts
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, Path], _Known] = OrderedDict()

    def find(self, name: str, folder: Path) -> OwnText | None:
        """The text of the adapter in a folder; None: the base model's. Raises AdapterInvalidError."""
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
        key = name, folder
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None and not is_due(known.looked):
            return known.text
        now, files = time.monotonic(), fingerprint(folder)
        if known is not None and known.files == files:
            known.looked = now
            return known.text
        try:
            read = self._texts.read(name, folder)
            if read is None:  # a link was changed in between
                raise AdapterInvalidError("its folder has moved, try again")
            text = read
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


def repository_folders(folder: Path, engine: str = ENGINE) -> AdapterFolders:
    """The adapters that are named by the parameters of the engine's model in a Triton repository. folder: of
    the calling model. Raises ConfigError.
    """
    beside = parameters_beside(folder, engine)
    catalog, prefetch = (value_of(beside, f"lora_{name}_dir") for name in ("catalog", "prefetch"))
    file = names_file(beside, folder)
    named = read_names(file) if file is not None else {}
    by_id = Path(prefetch) if prefetch else None
    return AdapterFolders(named, Path(catalog) if catalog else None, by_id=by_id)


class RepositoryTexts:
    """Thread-safe. folders: of adapters by name and by task id."""

    def __init__(self, texts: CurrentTexts, folders: AdapterFolders) -> None:
        self._texts, self._folders = texts, folders

    @classmethod
    def open(cls, folder: Path, base: Tokenizer, engine: str = ENGINE) -> RepositoryTexts | None:
        """folder: of the calling model in the repository. engine: the model whose parameters name the
        adapters. Returns None if it trusts none with text. Raises ConfigError.
        """
        beside = parameters_beside(folder, engine)
        trusted = value_of(beside, "lora_trust")
        if trusted is None:
            return None
        folders, model = repository_folders(folder, engine), value_of(beside, "gpt_model_path")
        roots = [one for one in (folders.catalog, folders.by_id) if one is not None]
        config: dict[str, Any] = {}
        with suppress(ConfigError):  # the engine's model reports what is wrong with it
            config = (read_json(model_folder(Path(model)) / "config.json") if model else None) or {}
        text = config.get("text_config")
        size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        size = size if isinstance(size, int) and size else base.vocab_size
        texts = trusted_texts(trusted.split(BETWEEN), roots, base, size)
        assert texts is not None
        return cls(texts, folders)

    def of(self, lora: LoraInput | LoraMix | None) -> OwnText | None:
        """Text of the only adapter that acts; None: the base model's. Raises AdapterInvalidError."""
        acting = [] if lora is None else [one for one, scale in lora.members if scale]
        return self.find(acting[0].name, acting[0].task_id) if len(acting) == 1 else None

    def find(self, name: str | None, task_id: int | None) -> OwnText | None:
        """None: use the base model's. May read files. Raises AdapterInvalidError."""
        place = self._place(name, task_id)
        return None if place is None else self._texts.find(*place)

    def is_at_hand(self, name: str | None, task_id: int | None) -> bool:
        place = self._place(name, task_id)
        return place is None or self._texts.is_at_hand(*place)

    def _place(self, name: str | None, task_id: int | None) -> tuple[str, Path] | None:
        """Label and folder. None: there is none, which the engine will report."""
        if name is not None:
            label, folder = name, self._folders.find(name)
        elif task_id is not None:
            by_id = self._folders.by_id
            label, folder = str(task_id), None if by_id is None else by_id / str(task_id)
        else:
            return None
        return None if folder is None or not is_folder(folder) else (label, folder)

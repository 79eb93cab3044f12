"""Text settings that come with adapters. AdapterTexts reads them; CurrentTexts and RepositoryTexts have those
of now, by folder, and by name or task id in a Triton repository.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from manylora.adapters.bounds import Bounds
from manylora.adapters.catalog.files import AdapterFolders, Fingerprint, fingerprint, is_due
from manylora.adapters.catalog.names import read_names
from manylora.adapters.formats.safe_files import is_folder, is_plain, read_small
from manylora.config.model_folder import model_folder, read_json
from manylora.config.repository import ENGINE, names_file, parameters_beside, value_of
from manylora.errors import AdapterError, AdapterInvalidError, ConfigError, printable
from manylora.generation.chat_template import FILE as TEMPLATE_FILE
from manylora.generation.chat_template import ChatTemplate, sources_in
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults, OwnText
from manylora.generation.tokenizer import Tokenizer
from manylora.request import LoraInput, LoraMix

logger = logging.getLogger("manylora")

MAX_FILE_BYTES = 2**20  # maximum size of a template, and of settings
SETTINGS_FILE, GENERATION_FILE = "tokenizer_config.json", "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_BYTES = 2**30  # default memory for adapters' tokenizers
MAX_TOKENIZER_BYTES = 2**26
IN_MEMORY = 8  # a tokenizer counts as this many times the bytes of its file
PARTS = ("chat_template", "generation_config", "tokenizer")
"""The parts that may come with an adapter."""


@dataclass(frozen=True)
class TokenizerFile:
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
        content = _read(path, bounds, MAX_TOKENIZER_BYTES)
        file = TokenizerFile(_digest(content), path, bounds)
        if file.digest == self._base_digest:
            return None
        if self.get(file) is None:
            self._add(file, content)
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
        content = _read(file.path, file.bounds, MAX_TOKENIZER_BYTES)
        if _digest(content) != file.digest:
            raise AdapterInvalidError(f"its {file.path.name} has changed, and is not in memory any more")
        return self._add(file, content)

    def _add(self, file: TokenizerFile, content: bytes) -> Tokenizer:
        with self._opening:
            known = self.get(file)
            if known is not None:
                return known
            try:
                made = Tokenizer.parse(content.decode("utf-8"))
            except ValueError as error:
                raise AdapterInvalidError(f"its tokenizer.json is no tokenizer: {error}") from error
            own = made.vocabulary()
            for token, number in self._base.vocabulary().items():
                if own.get(token) != number:
                    raise AdapterInvalidError(
                        f"its tokenizer.json has {own.get(token, 'no')} as the id of {token[:40]!r}, which "
                        f"is {number} in the base model: it may add tokens, and change none"
                    )
            if (last := max(own.values(), default=0)) >= self._vocab_size:
                raise AdapterInvalidError(
                    f"its tokenizer.json has {len(own)} tokens, with ids to {last}: the base model has room "
                    f"for ids below {self._vocab_size}"
                )
            size = IN_MEMORY * len(content)
            with self._lock:
                self._held[file.digest] = made, size
                self.num_bytes += size
                while self.num_bytes > self._max_bytes and len(self._held) > 1:
                    _, (_, freed) = self._held.popitem(last=False)
                    self.num_bytes -= freed
            return made


def _read(path: Path, bounds: Bounds, most: int) -> bytes:
    """Raises AdapterInvalidError."""
    try:
        return read_small(path, bounds, most)
    except OSError as error:
        raise AdapterInvalidError(f"{path.name} cannot be read: {error.strerror}") from error


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=20).hexdigest()


@dataclass(frozen=True)
class TextSource:
    """Which of its own parts an adapter is served with.

    For each part: False: the base model's; True: the one in the adapter's folder; or a path (a folder for
    tokenizer). generation_config may also be the settings themselves. required: parts that are True must
    exist.
    """

    chat_template: Path | bool = False
    generation_config: Path | Mapping[str, Any] | bool = False
    tokenizer: Path | bool = False
    required: bool = True

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not False for name in PARTS)


@dataclass(frozen=True)
class TrustedFolder:
    """Adapters that are really located in this folder are served with these parts of their own."""

    path: Path
    parts: tuple[str, ...] = PARTS

    @classmethod
    def parse(cls, given: str) -> TrustedFolder:
        """FOLDER, or FOLDER=PART,PART. Raises ValueError."""
        folder, equals, parts = given.rpartition("=")
        chosen = tuple(parts.split(",")) if equals else PARTS
        if set(chosen) - set(PARTS):
            raise ValueError(
                f"must be FOLDER or FOLDER=PART,PART with parts of {', '.join(PARTS)}, got {given[:200]!r}"
            )
        return cls(Path(folder if equals else parts), chosen)

    def source(self) -> TextSource:
        return TextSource(**{name: name in self.parts for name in PARTS}, required=False)


@dataclass(frozen=True)
class AdapterText:
    """How text of an adapter's requests is processed. own: its tokenizer; None: the base model's. settings:
    of the tokenizer. sources: of its chat template; None: the base model's.
    """

    template: ChatTemplate = field(compare=False)
    settings: Mapping[str, Any]
    sources: Mapping[str, str] | None = None
    defaults: GenerationDefaults = NO_DEFAULTS
    own: TokenizerFile | None = None


class AdapterTexts:
    """Reads what comes with adapters. Thread-safe.

    base: the base model's tokenizer. vocab_size: of the model. named: by name and path of the adapter.
    trusted: the first of these folders that contains an adapter decides. roots: folders that may contain
    adapter files. tokenizer_bytes: as in `Tokenizers`.
    """

    def __init__(
        self,
        base: Tokenizer,
        vocab_size: int,
        named: Mapping[tuple[str, Path], TextSource],
        trusted: Sequence[TrustedFolder],
        roots: Sequence[Path],
        tokenizer_bytes: int,
    ) -> None:
        self._base, self._vocab_size = base, vocab_size
        self._named = {(name, path.resolve()): source for (name, path), source in named.items()}
        self._trusted = [(folder.path.resolve(), folder.source()) for folder in trusted]
        self._bounds = Bounds().within(roots)
        self.tokenizers = Tokenizers(base, vocab_size, tokenizer_bytes)

    def source(self, name: str, path: Path) -> TextSource | None:
        """None: the adapter of this name and path is served with the base model's text."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError):
            return None
        found = self._named.get((name, real))
        if found is None:
            found = next((source for folder, source in self._trusted if real.is_relative_to(folder)), None)
        return found or None

    def read(self, name: str, path: Path) -> AdapterText | None:
        """None: as in `source`. Raises AdapterInvalidError."""
        source = self.source(name, path)
        if source is None:
            return None
        own, settings = self._tokenizer(source, path)
        sources = self._template(source, path)
        defaults = self._defaults(source, path)
        try:
            template = self._base.template if sources is None else ChatTemplate(sources, settings)
        except ConfigError as error:
            raise AdapterInvalidError(str(error)) from error
        return AdapterText(template, settings, sources, defaults, own)

    def tokenizer(self, text: AdapterText, *, wait: bool) -> Tokenizer | None:
        """The tokenizer of a text. wait: False: return None if its file would have to be read. Raises
        AdapterInvalidError, also if the file has changed.
        """
        find = self.tokenizers.open if wait else self.tokenizers.get
        found = self._base if text.own is None else find(text.own)
        return None if found is None else found.with_parts(text.settings, text.template)

    def _tokenizer(self, source: TextSource, folder: Path) -> tuple[TokenizerFile | None, Mapping[str, Any]]:
        given = source.tokenizer
        place = given if isinstance(given, Path) else folder
        there = is_plain(place / TOKENIZER_FILE)
        if given is False or not (there or given is not True or source.required):
            return None, self._base.settings
        if not there:
            raise AdapterInvalidError(f"it has no {TOKENIZER_FILE}")
        own = self.tokenizers.find(place / TOKENIZER_FILE, self._bounds if given is True else Bounds())
        settings = self._settings(place) if is_plain(place / SETTINGS_FILE) else self._base.settings
        return own, settings

    def _template(self, source: TextSource, folder: Path) -> dict[str, str] | None:
        given = source.chat_template
        if given is False:
            return None
        file = given if isinstance(given, Path) else folder / TEMPLATE_FILE
        if isinstance(given, Path) or is_plain(file):
            return {"default": self._read(file, given)}
        found = sources_in(self._settings(folder))
        if not found and source.required:
            raise AdapterInvalidError(
                f"it has no chat template of its own ({TEMPLATE_FILE}, or in {SETTINGS_FILE})"
            )
        return found or None

    def _defaults(self, source: TextSource, folder: Path) -> GenerationDefaults:
        given = source.generation_config
        if given is False:
            return NO_DEFAULTS
        if isinstance(given, Mapping):
            found: Any = dict(given)
        else:
            file = given if isinstance(given, Path) else folder / GENERATION_FILE
            if given is True and not is_plain(file):
                if source.required:
                    raise AdapterInvalidError(f"it has no {GENERATION_FILE}")
                return NO_DEFAULTS
            found = self._read_json(file, given)
        try:
            return GenerationDefaults.parse(found, self._vocab_size)
        except ValueError as error:
            raise AdapterInvalidError(f"{GENERATION_FILE}: {error}") from error

    def _settings(self, folder: Path) -> dict[str, Any]:
        file = folder / SETTINGS_FILE
        found = self._read_json(file, True) if is_plain(file) else {}
        if not isinstance(found, dict):
            raise AdapterInvalidError(f"{SETTINGS_FILE} must be a JSON object")
        return found

    def _read_json(self, file: Path, given: Any) -> Any:
        try:
            return json.loads(self._read(file, given))
        except (ValueError, RecursionError) as error:
            raise AdapterInvalidError(f"{file.name} is not valid JSON") from error

    def _read(self, file: Path, given: Any) -> str:
        """given: True for a file in the adapter's folder, which must be within the roots."""
        content = _read(file, self._bounds if given is True else Bounds(), MAX_FILE_BYTES)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise AdapterInvalidError(f"{file.name} is not UTF-8 text") from error


MAX_KNOWN = 4096
BETWEEN = ";"  # separates folders in the parameter lora_trust


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

"""Names that models and adapters may have, aliases, names with folders from multi_lora.json, and Versions:
the current content of each name.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from manylora.adapters.remote.resolver import AdapterSources, Located, is_url
from manylora.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MAX_BYTES = 2**24
MAX_LENGTH = 128  # of a name
MAX_FOLDERS = 5  # of a name; a scan of a folder looks as deep
MAX_ALIASES = 65536
MAX_TARGETS = 16  # of an alias
WEIGHT = re.compile("[0-9]{1,9}")
ASKERS = "user", "safety_identifier", "prompt_cache_key"
"""Fields of a body that say who asks, for aliases of several models; the first that is given counts."""
LATEST = ":latest"  # the tag that Ollama's clients add to any name
MAX_NAMES = 2**16  # whose versions are known

_located: list[Located] = []  # keeps downloads for this process


class Versions:
    """Thread-safe. Versions count from 1 per name; repeating the same content does not make a new version.
    Beyond MAX_NAMES names, those that changed longest ago are forgotten and count from 1 again.

    superseded: digests that no name refers to any more. The engine drops what it has of them and removes them
    from here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: OrderedDict[str, tuple[int, str]] = OrderedDict()  # "": withdrawn
        self._named: Counter[str] = Counter()  # number of names per digest
        self.superseded: set[str] = set()
        self.num_changes = 0  # number of changes of a name's content

    def put(self, name: str, digest: str, number: int = 0) -> tuple[int, str]:
        """Set a name's content. number: a version number given by others; 0: the next one.

        Returns its number, and the digest it replaced; "" if none.
        """
        with self._lock:
            last, old = self._current.get(name, (0, ""))
            number = number or (last if old == digest else last + 1)
            if old == digest and number == last:
                return number, ""
            self._set(name, number, digest, old)
            if old in ("", digest):
                return number, ""
            self.num_changes += 1
            return number, old

    def seed(self, name: str, number: int, digest: str = "") -> None:
        """Continue counting from a number that others have reached. digest: the content of that version,
        which is set later if the name has no content here yet.
        """
        with self._lock:
            last, old = self._current.get(name, (0, ""))
            if number > last and not old:
                self._set(name, number, digest, old)

    def withdraw(self, name: str) -> None:
        """Remove a name's content. Its next version gets the next number."""
        with self._lock:
            number, old = self._current.get(name, (0, ""))
            if old:
                self._set(name, number, "", old)

    def number(self, name: str, digest: str = "") -> int:
        """The number that `put` would give to a content. Without a digest, that of the last version."""
        last, old = self._current.get(name, (0, ""))
        return last + (digest not in ("", old))

    def current(self, name: str) -> tuple[int, str] | None:
        """Number and digest of the current version."""
        found = self._current.get(name)
        return found if found and found[1] else None

    def _set(self, name: str, number: int, digest: str, old: str) -> None:
        self._current[name] = number, digest
        self._current.move_to_end(name)
        self._named[digest] += 1
        self.superseded.discard(digest)
        if len(self._current) > MAX_NAMES:
            self._leave(self._current.popitem(last=False)[1][1])
        if self._leave(old):
            self.superseded.add(old)

    def _leave(self, digest: str) -> bool:
        """Remove one name from this content. Returns whether it has no names left."""
        self._named[digest] -= 1
        if self._named[digest] > 0:
            return False
        del self._named[digest]
        return bool(digest)


def is_name(name: str) -> bool:
    """Whether a request may contain it. Names appear in URLs, paths and metric labels. As a path, a name has
    no empty, "." or ".." part, so it cannot leave a root.
    """
    parts = name.split("/")
    return bool(NAME.fullmatch(name)) and ".." not in name and "" not in parts and "." not in parts


def is_folder_name(name: str) -> bool:
    """Whether it is the name of one visible folder, and no path below a root."""
    return is_name(name) and "/" not in name and not name.startswith(".")


def name_problem(name: str, bases: Sequence[str] = ()) -> str:
    """Why no adapter may have this name; "": one may. A scan of its folder must find it again, and no name
    may be a form in which requests name something else, or its owner could answer for another model. bases:
    the base model's names and paths.
    """
    parts = name.split("/")
    if not is_name(name):
        return f"names are 1 to {MAX_LENGTH} of A-Z a-z 0-9 . _ : / - without '..' and empty parts"
    if any(part.startswith(".") for part in parts):
        return "a name, or a part of it behind a slash, that begins with a dot is that of a hidden file"
    if len(parts) > MAX_FOLDERS + 1:
        return f"a name may be {MAX_FOLDERS} folders deep"
    if name.endswith(LATEST):
        return f"NAME{LATEST} means the model NAME for Ollama's clients"
    if name in bases:
        return "it is the name of the base model"
    if any(name.startswith(f"{base}:") for base in bases):
        return "BASE:ADAPTER means an adapter of the base model"
    return ""


def read_names(file: Path) -> dict[str, Path]:
    """A relative path is looked up beside the file, then in the working directory. What is at a URL is
    downloaded. Raises ConfigError.
    """
    try:
        is_large = file.stat().st_size > MAX_BYTES
        given = None if is_large else json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if is_large:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes")
    if not isinstance(given, dict):
        raise ConfigError(f"{file} must be an object of names and folders")
    found = {}
    for name, folder in given.items():
        if not (0 < len(name) <= MAX_LENGTH and name.isprintable() and isinstance(folder, str) and folder):
            raise ConfigError(f"{file}: {name!r:.140} must be a name of an adapter, with its folder as text")
        beside = file.resolve().parent / folder
        found[name] = beside if beside.is_dir() else Path(folder).absolute()
    urls = {name: folder for name, folder in given.items() if is_url(folder)}
    _located.extend(located := AdapterSources().locate_all(list(urls.values())))
    return found | {name: one.path for name, one in zip(urls, located, strict=True)}


def targets_of(target: str) -> list[tuple[str, int]]:
    """What an alias stands for, with weights: NAME, or NAME@WEIGHT,NAME@WEIGHT. Raises ValueError."""
    if "@" not in target and "," not in target:
        return [(target, 1)]
    found = [(name, weight) for name, _, weight in (one.strip().partition("@") for one in target.split(","))]
    if not all(is_name(name) and WEIGHT.fullmatch(weight) for name, weight in found):
        raise ValueError(f"must be NAME, or NAME@WEIGHT,NAME@WEIGHT with whole numbers, got {target[:200]!r}")
    weights = {name: int(weight) for name, weight in found}
    if len(weights) < len(found) or len(found) > MAX_TARGETS or not any(weights.values()):
        reason = f"must name 1 to {MAX_TARGETS} models, each once, and one with a weight of at least 1"
        raise ValueError(f"{reason}, got {target[:200]!r}")
    return list(weights.items())


class Aliases(dict[str, str]):
    """name -> target, as of `targets_of`; each may itself be an alias. Whoever adds one checks `has_room_for`
    and `leads_to`.

    given: the first ones. Raises ConfigError for a cycle.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__()
        for name, target in given.items():
            if any(self.leads_to(one, name) for one, _ in targets_of(target)):
                raise ConfigError(f"lora_alias: {name}={target} leads back to itself")
            self[name] = target

    def resolve(self, name: str, by: str | None = None) -> str:
        """The final target of a name. A name that is not an alias is returned as it is. by: who asks, and
        gets the same one of several targets every time. None: the one with the largest weight.
        """
        while name in self:
            name = _chosen(targets_of(self[name]), None if by is None else f"{name}\0{by}")
        return name

    def targets(self, name: str) -> list[str]:
        """All final targets of a name."""
        return [one for one in self._reached(name) if one not in self]

    def has_room_for(self, name: str) -> bool:
        return name in self or len(self) < MAX_ALIASES

    def leads_to(self, name: str, end: str) -> bool:
        """Whether a name may resolve to another, or equals it."""
        return end in self._reached(name)

    def _reached(self, name: str) -> dict[str, None]:
        """A name, and all that it may stand for."""
        found, todo = {name: None}, [name]
        for one in todo:
            for target, _ in targets_of(self[one]) if one in self else ():
                if target not in found:
                    found[target] = None
                    todo.append(target)
        return found


def _chosen(found: list[tuple[str, int]], by: str | None) -> str:
    """by: None: the one with the largest weight. A larger weight of the first keeps those who had it."""
    if by is None or len(found) == 1:
        return max(found, key=itemgetter(1))[0]
    digest = blake2b(by.encode(errors="replace"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64 * sum(weight for _, weight in found)
    ends = accumulate(weight for _, weight in found)
    return next((name for (name, _), end in zip(found, ends, strict=True) if share < end), found[-1][0])

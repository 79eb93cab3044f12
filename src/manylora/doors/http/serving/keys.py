"""API keys and what each may use, and a check against requests that other sites' pages send."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request

from manylora.doors.http.api.errors import ApiError
from manylora.errors import ConfigError

ANYONE = "anyone"  # name of all clients, if there are no keys
DIGEST = re.compile("[0-9a-f]{64}")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?|null"
)  # as browsers write it
PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9._-]+|\[?[0-9a-f:.]+\]?")
# Names of private networks. Nobody can register them, so no attacker's name server answers for them.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Flag = Annotated[bool, Field(strict=True)]
Limit = Annotated[int, Field(strict=True, ge=0)]


@dataclass(eq=False)
class ApiKey:
    """What one API key may do. For all four limits 0 means no limit.

    adapters: patterns of names. admin: may load and unload adapters. load: may load adapters as request
    bodies, under names that match its patterns; they belong to it: other keys neither see nor use them.
    requests_per_minute: may come at once; then one more is allowed every 60 / rate seconds.
    """

    name: str
    adapters: tuple[str, ...] = ("*",)
    base: Flag = True
    admin: Flag = False
    load: Flag = False
    max_adapters: Limit = 0
    max_adapter_bytes: Limit = 0
    max_concurrent: Limit = 0
    requests_per_minute: Limit = 0
    num_open: int = field(default=0, init=False, repr=False)
    _due_at: float = field(default=0.0, init=False, repr=False)  # when the full budget is available again

    def may_see(self, adapter: str | None, owner: str = "") -> bool:
        """Whether it may use this adapter; None: the base model. owner: of one that is not public."""
        if adapter is None:
            return self.base
        if owner and owner != self.name and not self.admin:
            return False
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    @property
    def sees_all(self) -> bool:
        return self.admin or "*" in self.adapters

    def check(self, adapter: str | None, owner: str = "") -> None:
        """As `may_see`. Raises ApiError 403, the same whether or not the adapter exists."""
        if not self.may_see(adapter, owner):
            what = "the base model" if adapter is None else f"adapter {adapter!r}"
            raise ApiError(403, "not_allowed", f"This API key may not use {what}", "model")

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it runs. Raises ApiError 429."""
        if self.max_concurrent and self.num_open >= self.max_concurrent:
            reason = f"This API key may have {self.max_concurrent} requests at one time"
            raise ApiError(429, "too_many_requests", reason, retry_after=1)
        if self.requests_per_minute:
            each, now = 60 / self.requests_per_minute, time.monotonic()
            due = max(self._due_at, now) + each
            if due - now > 60 + 1e-6:
                reason = f"This API key may send {self.requests_per_minute} requests in a minute"
                wait_s = max(1, round(due - now - 60))
                raise ApiError(429, "rate_limit_exceeded", reason, retry_after=wait_s)
            self._due_at = due
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class Keyring:
    """path: YAML with a list `keys`. plain: further keys, which may use everything. Without any none is
    required. open_admin: whether clients that the file does not name may load and unload adapters. Raises
    ConfigError.
    """

    def __init__(
        self, path: Path | None = None, *, open_admin: bool = False, plain: Sequence[str] = ()
    ) -> None:
        given = {
            _digest(key): ApiKey(f"api-key-{number}", admin=open_admin)
            for number, key in enumerate(plain, start=1)
        }
        self._keys = given | _read(path) if path is not None else given or None
        self._has_file = path is not None
        self._anyone = ApiKey(ANYONE, admin=open_admin)

    @property
    def closed(self) -> bool:
        """Whether requests require a key."""
        return self._keys is not None

    def named(self, name: str) -> ApiKey | None:
        """The key of this name. Without any keys, all clients have one."""
        if self._keys is None:
            return self._anyone
        return next((key for key in self._keys.values() if key.name == name), None)

    def has_name(self, name: str) -> bool:
        return any(key.name == name for key in (self._keys or {}).values())

    def loader(self, authorization: str) -> ApiKey:
        """As `identify`, for a key that may load adapters in some way. Raises ApiError 401, 403."""
        key = self.identify(authorization)
        if not (key.admin or key.load):
            here = "the file of --api-keys" if self._has_file else "a file given with --api-keys"
            flag = "" if self._has_file else "--allow-runtime-lora-updating, or "
            reason = (
                f"Loading and unloading adapters over HTTP is not allowed here: it needs {flag}a key with "
            )
            raise ApiError(403, "not_allowed", f"{reason}'admin: true' in {here}")
        return key

    def check_operator(self, key: ApiKey) -> None:
        """Whether a key may do what all others notice. Raises ApiError 403."""
        if self._has_file and not key.admin:
            raise ApiError(403, "not_allowed", "This needs an API key with 'admin: true'")

    def identify(self, authorization: str) -> ApiKey:
        """The key of an Authorization header. Raises ApiError 401."""
        if self._keys is None:
            return self._anyone
        scheme, _, secret = authorization.partition(" ")
        # Lookup is by hash, so its duration reveals nothing about the keys.
        key = self._keys.get(_digest(secret.strip()))
        if scheme.lower() != "bearer" or key is None:
            raise ApiError(401, "invalid_api_key", "A valid API key is needed: Authorization: Bearer KEY")
        return key


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> dict[str, ApiKey]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"api keys: {path} cannot be read: {error}") from error
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"api keys: {path} must have a list of keys under 'keys'")
    keys: dict[str, ApiKey] = {}
    fields, adapter = [one.name for one in dataclass_fields(ApiKey) if one.init], TypeAdapter(ApiKey)
    for number, entry in enumerate(entries, start=1):
        where = f"api keys: {path}: key {number}"
        given = dict(entry) if isinstance(entry, dict) else {}
        digest = str(given.pop("sha256", "")).lower()
        if not DIGEST.fullmatch(digest) or not given.keys() <= {*fields}:
            more = ", ".join(fields)
            raise ConfigError(f"{where} must have sha256, of 64 hexadecimal digits, and may have {more}")
        if digest in keys:
            raise ConfigError(f"{where} is there twice")
        try:
            keys[digest] = adapter.validate_python(given | {"name": str(given.get("name", digest[:8]))})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{where}: {first['loc'][0]}: {first['msg'].replace('tuple', 'list')}"
            ) from error
    return keys


class HostCheck:
    """Against DNS rebinding and forms.

    bound: the address that the server listens on. allowed: host names; *.NAME for subdomains, * for any.
    origins: of pages elsewhere that may use this server, as https://example.com; * for any.
    keys: whether API keys are required. Pages of other sites have none, so any name is accepted then unless
    `allowed` is set. Raises ConfigError.
    """

    def __init__(
        self, bound: str, allowed: Sequence[str] = (), origins: Sequence[str] = (), *, keys: bool = False
    ) -> None:
        self._allowed = [one.strip().lower().strip("[]") for one in allowed]
        for given in allowed:
            if not PATTERN.fullmatch(given.strip().lower()):
                reason = f"allowed_hosts: {given!r} is not a host name: give names without scheme and port"
                raise ConfigError(reason)
        self._own = {*LOOPBACK, bound.lower().strip("[]"), socket.gethostname().lower()}
        self._any = "*" in self._allowed or (keys and not allowed)
        for given in origins:
            if given != "*" and not ORIGIN.fullmatch(given):
                raise ConfigError(
                    f"allowed_origins: {given!r} is no origin, such as https://example.com, or *"
                )
        self._origins = frozenset(origins)

    def check(self, request: Request) -> None:
        """Raises ApiError."""
        given = request.headers.getlist("host")
        if len(given) != 1 and (given or request.scope["http_version"] != "1.0"):
            raise ApiError(400, "invalid_http", "A request must have one Host header")
        if self._any or not given:  # HTTP/1.0 may lack it, but no browser uses that
            return
        found = HOST.fullmatch(given[0].lower())
        name = "" if found is None else found[1].strip("[]").rstrip(".")
        private = _is_address(name) or "." not in name or name.endswith(PRIVATE_SUFFIXES)
        if found is None or not (private or name in self._own or self._is_allowed(name)):
            reason = f"This server does not go by the name {given[0][:100]!r}: start it with --allowed-hosts"
            raise ApiError(403, "host_not_allowed", reason)
        origin = request.headers.get("origin")
        if (
            origin is not None
            and self._origins.isdisjoint((origin, "*"))
            and request.method not in ("GET", "HEAD")
            and not self._is_own_page(origin, name)
        ):
            reason = (
                f"Pages of {origin[:100]!r} may not use this server: start it with --allowed-origins, or "
            )
            reason += "with --allowed-hosts if that is its own name"
            raise ApiError(403, "origin_not_allowed", reason)

    def _is_own_page(self, origin: str, host: str) -> bool:
        try:
            name = (urlsplit(origin).hostname or "").rstrip(".")
        except ValueError:
            return False
        if not name:  # "null": a local file or a sandboxed frame
            return False
        return name == host or name in LOOPBACK or name.endswith(".localhost") or self._is_allowed(name)

    def _is_allowed(self, name: str) -> bool:
        return any(name == one or (one[:2] == "*." and name.endswith(one[1:])) for one in self._allowed)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

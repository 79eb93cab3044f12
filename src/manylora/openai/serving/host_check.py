"""HostCheck: refuses requests that another site's page makes a browser send (DNS rebinding, forms)."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from manylora.errors import ConfigError
from manylora.openai.api.errors import ApiError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9._-]+|\[?[0-9a-f:.]+\]?")
# Names of private networks. Nobody can register them, so no attacker's name server answers for them.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HostCheck:
    """bound: the address that the server listens on. allowed: host names; *.NAME for subdomains, * for any.
    keys: whether API keys are required. Pages of other sites have none, so any name is accepted then unless
    `allowed` is set. Raises ConfigError.
    """

    def __init__(self, bound: str, allowed: Sequence[str] = (), *, keys: bool = False) -> None:
        self._allowed = [one.strip().lower().strip("[]") for one in allowed]
        for given in allowed:
            if not PATTERN.fullmatch(given.strip().lower()):
                reason = f"allowed_hosts: {given!r} is not a host name: give names without scheme and port"
                raise ConfigError(reason)
        self._own = {*LOOPBACK, bound.lower().strip("[]"), socket.gethostname().lower()}
        self._any = "*" in self._allowed or (keys and not allowed)

    def check(self, request: Request) -> None:
        """Raises ApiError."""
        given = request.headers.getlist("host")
        if len(given) != 1 and (given or request.scope["http_version"] != "1.0"):
            raise ApiError(400, "invalid_http", "A request must have one Host header")
        if self._any or not given:  # HTTP/1.0 may lack it, but no browser uses that
            return
        name = _name(given[0])
        if name is None or not self._is_ours(name):
            reason = f"This server does not go by the name {given[0][:100]!r}: start it with --allowed-hosts"
            raise ApiError(403, "host_not_allowed", reason)
        origin = request.headers.get("origin")
        if origin is None or request.method in ("GET", "HEAD"):
            return
        if not self._is_own_page(origin, name):
            reason = f"Pages of {origin[:100]!r} may not use this server: start it with --allowed-hosts"
            raise ApiError(403, "origin_not_allowed", reason)

    def _is_ours(self, name: str) -> bool:
        if _is_address(name) or "." not in name or name.endswith(PRIVATE_SUFFIXES):
            return True
        return name in self._own or self._is_allowed(name)

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


def _name(host: str) -> str | None:
    """The host name of a Host header, without the port. None: not a valid header."""
    found = HOST.fullmatch(host.lower())
    return None if found is None else found[1].strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

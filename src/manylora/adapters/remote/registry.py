"""Registry: adapters as OCI artifacts and images, through oras."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import requests
from oras.container import Container
from oras.logger import setup_logger
from oras.provider import Registry as OrasRegistry

from manylora.adapters.remote.files import (
    ARCHIVES,
    PIECE,
    RemoteFile,
    SourceError,
    is_read,
    safe_path,
)

setup_logger(quiet=True)  # its lines would be beside the server's log

TIMEOUTS = (10, 60)  # seconds to connect, and without a byte
MAX_MANIFEST = 2**22
LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
ACCEPT = ", ".join(
    f"application/vnd.{kind}+json" for kind in ("oci.image.manifest.v1", "oci.image.index.v1",
    "docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2")
)  # fmt: skip
TARS = ("tar", "tar+gzip", "tar.gzip", "tar.gz")
TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")


class _Client(OrasRegistry):
    """Without the retries of oras, which take two minutes, and with timeouts, which it has none of."""

    do_request = OrasRegistry.do_request.__wrapped__

    def __init__(self, host: str, auth_backend: str = "token") -> None:
        super().__init__(host, LOOPBACK.fullmatch(host) is not None, auth_backend=auth_backend)
        self.session.request = partial(self.session.request, timeout=TIMEOUTS)


class Registry:
    """The credentials are those of `docker login`. Registries on this machine are asked without TLS."""

    def find(self, source: str) -> list[RemoteFile]:
        """The layers of an artifact or image that may hold an adapter. Raises SourceError."""
        try:
            self._at = Container(source.removeprefix("oci://"))
            host, docker = str(self._at.registry), os.environ.get("DOCKER_CONFIG")
            if not source.startswith(f"oci://{host}/"):
                raise ValueError("it must be oci://REGISTRY/NAME:TAG")
            self._client = _Client(host)
            answer = self._client.session.get(f"{self._client.prefix}://{host}/v2/")
            if answer.headers.get("WWW-Authenticate", "").startswith("Basic"):
                self._client = _Client(host, "basic")
            self._client.auth.load_configs(self._at, [str(Path(docker) / "config.json")] if docker else None)
            manifest = self._manifest(self._at.digest or self._at.tag)
            if "manifests" in manifest:  # an image for several platforms
                manifest = self._manifest(str(manifest["manifests"][0]["digest"]))
            return [one for one in map(_file_of, manifest["layers"]) if one is not None]
        except Exception as error:
            raise _problem(error) from error

    def get(self, file: RemoteFile, target: Path, count: Callable[[int], None]) -> None:
        """As `FileStore.get`. The content is checked against its digest."""
        digest = hashlib.sha256()
        try:
            with self._client.get_blob(self._at, file.place, stream=True) as answer, target.open("wb") as to:
                answer.raise_for_status()
                for piece in answer.iter_content(PIECE):
                    count(len(piece))
                    digest.update(piece)
                    to.write(piece)
        except Exception as error:
            raise _problem(error) from error
        if f"sha256:{digest.hexdigest()}" != file.place:
            raise SourceError(f"{file.name} has another digest than the registry says")

    def _manifest(self, reference: str) -> Any:
        url = f"{self._client.prefix}://{self._at.manifest_url(reference)}"
        with self._client.do_request(url, headers={"Accept": ACCEPT}, stream=True) as answer:
            answer.raise_for_status()
            content = answer.raw.read(MAX_MANIFEST, decode_content=True)
        if ":" in reference and reference != f"sha256:{hashlib.sha256(content).hexdigest()}":
            raise SourceError("its manifest has another digest than was asked for")
        return json.loads(content)


def _file_of(layer: Any) -> RemoteFile | None:
    """None: there is nothing of an adapter in it."""
    notes, media, digest, size = (layer.get(key) for key in ("annotations", "mediaType", "digest", "size"))
    if not (DIGEST.fullmatch(digest) and type(size) is int and size >= 0):
        raise ValueError("a layer has no sha256 digest or no size")
    title = next((notes[key] for key in TITLES if key in notes), "") if notes else ""
    must_unpack = bool(notes) and notes.get("io.deis.oras.content.unpack") == "true"
    if is_read(title) and not must_unpack:  # oras calls each file a tar
        return RemoteFile(str(safe_path(title)), digest, size, digest)
    is_archive = must_unpack or title.endswith(ARCHIVES) or media.endswith(TARS)
    return RemoteFile(digest[7:], digest, size, digest, unpack=True) if is_archive else None


def _problem(error: Exception) -> SourceError:
    if isinstance(error, SourceError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status == 404:
        return SourceError("the registry has no such name, tag or digest", missing=True)
    if status in (401, 403) or "authentication" in str(error) or "_basic_auth" in str(error):
        return SourceError("the registry refuses access: docker login, or set DOCKER_CONFIG")
    if isinstance(error, requests.RequestException):
        told = f"answers HTTP {status}" if status else f"cannot be reached: {error}"
        return SourceError(f"the registry {told}", passing=status >= 500 or status in (0, 429))
    return SourceError(f"its manifest cannot be read: {error or type(error).__name__}")

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

from manylora.adapters.remote.files import ARCHIVES, SINGLE, RemoteFile, SourceError, is_read, safe_path

setup_logger(quiet=True)  # its lines would be beside the server's log

TIMEOUTS = (10, 60)  # seconds to connect, and without a byte
PIECE = 2**20
MAX_MANIFEST = 2**22
MAX_LAYERS = 256
LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
KINDS = ("oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.v2",
         "docker.distribution.manifest.list.v2")  # fmt: skip
TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
UNPACK = "io.deis.oras.content.unpack"
TARS = ("tar", "tar+gzip", "tar.gzip", "tar.gz")


class Registry:
    """The credentials are those of `docker login`. Registries on this machine are asked without TLS."""

    def find(self, source: str) -> list[RemoteFile]:
        """The layers of an artifact or image that hold an adapter. Raises SourceError."""
        try:
            self._at = Container(source.removeprefix("oci://"))
            if self._at.registry not in source:
                raise ValueError("it must be oci://REGISTRY/NAME:TAG")
            host = str(self._at.registry)
            insecure = LOOPBACK.fullmatch(host) is not None
            client = _Client(host, insecure)
            asked = client.session.get(f"{client.prefix}://{host}/v2/").headers.get("WWW-Authenticate", "")
            self._client = (
                client if not asked.startswith("Basic") else _Client(host, insecure, auth_backend="basic")
            )
            docker = os.environ.get("DOCKER_CONFIG")
            self._client.auth.load_configs(self._at, [str(Path(docker) / "config.json")] if docker else None)
            manifest = self._manifest(self._at.digest or self._at.tag)
            if "manifests" in manifest:  # an image for several platforms
                manifest = self._manifest(str(manifest["manifests"][0]["digest"]))
            layers = manifest["layers"]
            if len(layers) > MAX_LAYERS:
                raise ValueError(f"it has more than {MAX_LAYERS} layers")
            files = [one for one in map(_file_of, layers) if one is not None]
            if not any(one.unpack or is_read(one.name) for one in files):
                return files if len(files) == 1 else []
            return [one for one in files if one.unpack or is_read(one.name)]
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
        """Raises SourceError, ValueError, requests' errors."""
        accept = ", ".join(f"application/vnd.{kind}+json" for kind in KINDS)
        url = f"{self._client.prefix}://{self._at.manifest_url(reference)}"
        with self._client.do_request(url, headers={"Accept": accept}, stream=True) as answer:
            answer.raise_for_status()
            content = answer.raw.read(MAX_MANIFEST + 1, decode_content=True)
        if len(content) > MAX_MANIFEST:
            raise ValueError(f"its manifest has more than {MAX_MANIFEST} bytes")
        if ":" in reference and reference != f"sha256:{hashlib.sha256(content).hexdigest()}":
            raise SourceError("its manifest has another digest than was asked for")
        return json.loads(content)


class _Client(OrasRegistry):
    """Without the retries of oras, which take two minutes, and with timeouts, which it has none of."""

    do_request = OrasRegistry.do_request.__wrapped__

    def __init__(self, host: str, insecure: bool, **options: Any) -> None:
        super().__init__(host, insecure, **options)
        self.session.request = partial(self.session.request, timeout=TIMEOUTS)


def _file_of(layer: Any) -> RemoteFile | None:
    """None: there is nothing of an adapter in it."""
    notes, media, digest, size = (
        layer.get("annotations") or {},
        layer["mediaType"],
        layer["digest"],
        layer["size"],
    )
    if not (DIGEST.fullmatch(digest) and type(size) is int and size >= 0):
        raise ValueError("a layer has no sha256 digest or no size")
    title = next((notes[key] for key in TITLES if key in notes), "")
    name, must_unpack = str(safe_path(title)), notes.get(UNPACK) == "true"
    if title.endswith(SINGLE) or (is_read(title) and not must_unpack):  # oras calls each file a tar
        return RemoteFile(name, digest, size, digest)
    if must_unpack or title.endswith(ARCHIVES) or media.endswith(TARS):
        return RemoteFile(digest[7:], digest, size, digest, unpack=True)
    return None


def _problem(error: Exception) -> SourceError:
    if isinstance(error, SourceError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status == 404:
        return SourceError("the registry has no such name, tag or digest", missing=True)
    if status in (401, 403) or "authentication" in str(error) or isinstance(error, AttributeError):
        return SourceError("the registry refuses access: docker login, or set DOCKER_CONFIG")
    if isinstance(error, requests.RequestException):
        told = f"the registry answers HTTP {status}" if status else f"the registry cannot be reached: {error}"
        return SourceError(told, passing=status >= 500 or status in (0, 429))
    if isinstance(error, OSError):
        return SourceError(f"it cannot be stored: {error.strerror}")
    return SourceError(f"its manifest cannot be read: {error or type(error).__name__}")

"""FileStore: files in buckets and on web servers, through fsspec and its drivers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.http import HTTPFileSystem

from manylora.adapters.remote.files import ARCHIVES, MARKS, NAMES, SINGLE, RemoteFile, SourceError

CONNECT_S, READ_S = 10, 60
AT_ONCE = 8  # questions to a server
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "Last-Modified", "LastModified", "mtime")
S3_OPTIONS = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 2}}
HINTS = {
    "s3": "AWS_ACCESS_KEY_ID and the other settings of AWS are used; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "Google's default credentials are used; FSSPEC_GS_TOKEN=anon for a public bucket",
}
WEB_HINT = "a user and password are read from ~/.netrc"


class FileStore:
    """follows: whether a redirect may be followed to a URL. Raises ImportError if a driver is missing."""

    def __init__(self, scheme: str, follows: Callable[[str], bool]) -> None:
        self._scheme = scheme
        if scheme == "gs":
            from gcsfs.core import GCSFileSystem  # gcsfs.GCSFileSystem first asks for the bucket's type

            self._fs = GCSFileSystem()
        elif scheme == "s3":
            for name in ("botocore", "aiobotocore"):  # they tell where each setting was found
                logging.getLogger(name).setLevel(logging.WARNING)
            self._fs = fsspec.filesystem(scheme, config_kwargs=S3_OPTIONS)
        else:
            self._fs = HTTPFileSystem(client_kwargs=_http_options(follows), skip_instance_cache=True)

    def find(self, source: str) -> list[RemoteFile]:
        """The files of a folder, or the one file that it is. Raises SourceError."""
        place, mark, query = source.partition("?") if self._scheme not in HINTS else (source, "", "")
        places = {name: f"{place.rstrip('/')}/{name}{mark}{query}" for name in NAMES}
        if is_whole := place.endswith((*ARCHIVES, *SINGLE)):
            places = {PurePosixPath(place).name: source}
        with ThreadPoolExecutor(AT_ONCE, "manylora-look") as pool:
            found = list(pool.map(self._look, places, places.values()))
        files = [one for one in found if isinstance(one, RemoteFile)]
        problems = [one for one in found if isinstance(one, SourceError) and (is_whole or not one.missing)]
        # Without the right to list a bucket, S3 refuses what does not exist.
        if problems and (any(one.passing for one in problems) or not any(one.name in MARKS for one in files)):
            raise max(problems, key=lambda one: one.passing)
        return files

    def get(self, file: RemoteFile, target: Path, count: Callable[[int], None]) -> None:
        """count: called with the size of each part, and may raise. Raises SourceError."""
        try:
            callback = Callback()
            callback.relative_update = count
            self._fs.get_file(file.place, str(target), callback=callback)
        except Exception as error:
            raise self._problem(error) from error

    def _look(self, name: str, place: str) -> RemoteFile | SourceError:
        try:
            found = self._fs.info(place)
        except Exception as error:
            return self._problem(error)
        if found.get("type") == "directory":
            return SourceError(f"{name} is a folder", missing=True)
        version = next((str(found[key]) for key in VERSIONS if found.get(key)), "")
        return RemoteFile(name, place, found.get("size"), version, name.endswith(ARCHIVES))

    def _problem(self, error: Exception) -> SourceError:
        """Without the URL, which may hold credentials."""
        cause: Any = error.__cause__ or error
        if found := next((one for one in (error, cause) if isinstance(one, SourceError)), None):
            return found
        kind, status = type(cause).__name__, getattr(cause, "status", 0)
        absent = isinstance(error, FileNotFoundError) and (cause is error or kind == "ClientError")
        if status in (404, 410) or absent or kind == "NoSuchBucket":
            return SourceError("there is no such file", missing=True)
        if isinstance(error, PermissionError) or status in (401, 403) or kind == "NoCredentialsError":
            told = f"HTTP {status}" if status else str(cause)
            return SourceError(f"it may not be read: {told}; {HINTS.get(self._scheme, WEB_HINT)}")
        told = f"it answers HTTP {status}" if status else f"it cannot be reached: {cause or kind}"
        return SourceError(told, passing=status >= 500 or status in (0, 429))


def _http_options(follows: Callable[[str], bool]) -> dict[str, Any]:
    import aiohttp

    async def redirect(session: Any, context: Any, params: Any) -> None:
        here = params.response.url
        to = here.join(type(here)(params.response.headers.get("Location", "")))
        if (to.host != here.host or to.port not in (here.port, 443)) and not follows(str(to)):
            raise SourceError(f"it redirects to {to.host}, which --lora-allowed-source does not name")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(redirect)
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=READ_S)
    return {"timeout": timeout, "trust_env": True, "trace_configs": [trace]}

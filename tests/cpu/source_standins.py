"""Stand-ins on this machine for where models and adapters live: a bucket of S3 and of Google, a web server,
an OCI registry with a login, and the Hugging Face hub.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

LOGIN = base64.b64encode(b"someone:secret").decode()
OCI = "application/vnd.oci.image"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
AnyServer = TypeVar("AnyServer", bound="_Server")


class _Server(ThreadingHTTPServer):
    """asked: method and path of each request."""

    daemon_threads = True

    def __init__(self, handler: type[_Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.asked: list[str] = []
        self.at = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.at}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.asked.append(f"{self.command} {unquote(parts.path)}")
        self.answer(unquote(parts.path), parts.query)

    def answer(self, path: str, query: str) -> None:
        raise NotImplementedError

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.write(content)

    def write(self, content: bytes) -> None:
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Standin(_Server):
    """files: content by path: /bucket/key for S3 and Google, any path for the web, /v2/... for the registry.
    down: answers 503. failing: by path, how many GETs are answered so next. redirects: by path.
    """

    def __init__(self) -> None:
        super().__init__(_SourceHandler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.down = False
        self.failing: dict[str, int] = {}

    def put(self, prefix: str, folder: Path) -> None:
        for file in folder.iterdir():
            self.files[f"{prefix}/{file.name}"] = file.read_bytes()

    def push(self, name: str, layers: list[tuple[str, str, bytes]], tag: str = "v1") -> str:
        """An artifact of layers: title ("" for none), media type, content. Returns its digest."""

        def blob(content: bytes) -> dict[str, Any]:
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.files[f"/v2/{name}/blobs/{digest}"] = content
            return {"digest": digest, "size": len(content)}

        listed = [
            blob(content)
            | {"mediaType": media}
            | ({"annotations": {"org.opencontainers.image.title": title}} if title else {})
            for title, media, content in layers
        ]
        config = blob(b"{}") | {"mediaType": f"{OCI}.config.v1+json"}
        manifest = {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": config}
        content = json.dumps(manifest | {"layers": listed}).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        for reference in (tag, digest):
            self.files[f"/v2/{name}/manifests/{reference}"] = content
        return digest

    def num_asked(self, part: str) -> int:
        return sum(part in one for one in self.asked)


class _SourceHandler(_Handler):
    def answer(self, path: str, query: str) -> None:
        server = self.server
        authorization = self.headers.get("Authorization", "")
        fails = self.command == "GET" and server.failing.get(path, 0) > 0
        if server.down or fails:
            server.failing[path] = server.failing.get(path, 0) - fails
            return self.send(503, b"")
        if path in server.redirects:
            return self.send(302, b"", {"Location": server.redirects[path]})
        if path == "/token":
            right = authorization == f"Basic {LOGIN}"
            return self.send(200 if right else 401, b'{"token": "ticket"}' if right else b"{}")
        if path.startswith("/v2/") and authorization != "Bearer ticket":
            challenge = f'Bearer realm="{server.url}/token",service="standin",scope="pull"'
            return self.send(401, b"{}", {"WWW-Authenticate": challenge})
        if path.startswith("/storage/v1/b/"):  # Google's: metadata of an object
            bucket, _, key = path.removeprefix("/storage/v1/b/").partition("/o/")
            path = f"/{bucket}/{key}"
            if path in server.files and "alt=media" not in query:
                content = server.files[path]
                told = {"name": key, "bucket": bucket, "size": str(len(content)), "etag": _tag(content)}
                return self.send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/download/storage/v1/b/"):
            bucket, _, key = path.removeprefix("/download/storage/v1/b/").partition("/o/")
            path = f"/{bucket}/{key}"
        if "list-type" in query:
            return self.send(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        content = server.files.get(path)
        if content is None:
            return self.send(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        return self.send(206 if first else 200, content[first:], {"ETag": _tag(content)})


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def tar(members: dict[str, bytes | str], mode: str = "w:gz") -> bytes:
    """An archive; a text is the target of a link."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return made.getvalue()


class Hub(_Server):
    """folders: by id. gated: ids that nobody may read. go_on: while it is not set, files of weights stop half
    way."""

    def __init__(self, folders: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(_HubHandler)
        self.folders, self.gated = folders, gated
        self.go_on = threading.Event()
        self.go_on.set()
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def leave(self) -> None:
        """From now on nothing is at its address."""
        self.shutdown()
        self.server_close()
        for one in self._connections:
            with contextlib.suppress(OSError):  # it has been closed
                one.shutdown(socket.SHUT_RDWR)

    @property
    def downloaded(self) -> set[str]:
        """Names of the files whose content was asked for."""
        asked = [one for one in self.asked if one.startswith("GET ") and "/resolve/" in one]
        return {path.rpartition("/")[2] for path in asked}


class _HubHandler(_Handler):
    def answer(self, path: str, query: str) -> None:
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.server.gated:
            return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        folder = self.server.folders.get(name)
        if folder is None:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if len(rest) > 1 and rest[1] not in ("main", COMMIT, "v1"):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/"):
            tree = [
                {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size,
                 "oid": hashlib.sha1(file.read_bytes()).hexdigest()}
                for file in sorted(folder.rglob("*")) if file.is_file()
            ]  # fmt: skip
            siblings = [{"rfilename": one["path"]} for one in tree]
            listed: Any = tree if rest[0] == "tree" else {"id": name, "sha": COMMIT, "siblings": siblings}
            return self.send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        file = folder.joinpath(*rest[2:])
        if not file.is_file():
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.send(200, content, {"ETag": tag, "X-Repo-Commit": COMMIT})

    def write(self, content: bytes) -> None:
        half = len(content) // 2 if self.path.endswith(".safetensors") else len(content)
        with contextlib.suppress(OSError):  # the client has been ended
            self.wfile.write(content[:half])
            if half < len(content):
                self.server.go_on.wait(60)
            self.wfile.write(content[half:])


def serve_standin() -> contextlib.AbstractContextManager[Standin]:
    return _serve(Standin())


def serve_hub(
    folders: dict[str, Path], gated: tuple[str, ...] = ()
) -> contextlib.AbstractContextManager[Hub]:
    return _serve(Hub(folders, gated))


@contextlib.contextmanager
def _serve(made: AnyServer) -> Iterator[AnyServer]:
    with made as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

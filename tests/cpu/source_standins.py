"""Stand-ins on this machine for where adapters live: a bucket of S3 and of Google, a web server, and an OCI
registry with a login.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOGIN = base64.b64encode(b"someone:secret").decode()
OCI = "application/vnd.oci.image"


class Standin(ThreadingHTTPServer):
    """files: content by path: /bucket/key for S3 and Google, any path for the web, /v2/... for the registry.
    down: answers 503. failing: by path, how many GETs are answered so next. redirects: by path. asked: method
    and path of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.down = False
        self.failing: dict[str, int] = {}
        self.asked: list[str] = []
        self.at = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.at}"

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


class _Handler(BaseHTTPRequestHandler):
    server: Standin
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts, server = urlsplit(self.path), self.server
        path = unquote(parts.path)
        server.asked.append(f"{self.command} {path}")
        authorization = self.headers.get("Authorization", "")
        fails = self.command == "GET" and server.failing.get(path, 0) > 0
        if server.down or fails:
            server.failing[path] = server.failing.get(path, 0) - fails
            return self._send(503, b"")
        if path in server.redirects:
            return self._send(302, b"", {"Location": server.redirects[path]})
        if path == "/token":
            right = authorization == f"Basic {LOGIN}"
            return self._send(200 if right else 401, b'{"token": "ticket"}' if right else b"{}")
        if path.startswith("/v2/") and authorization != "Bearer ticket":
            challenge = f'Bearer realm="{server.url}/token",service="standin",scope="pull"'
            return self._send(401, b"{}", {"WWW-Authenticate": challenge})
        if path.startswith("/storage/v1/b/"):  # Google's: metadata of an object
            bucket, _, key = path.removeprefix("/storage/v1/b/").partition("/o/")
            path = f"/{bucket}/{key}"
            if path in server.files and "alt=media" not in parts.query:
                content = server.files[path]
                told = {"name": key, "bucket": bucket, "size": str(len(content)), "etag": _tag(content)}
                return self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/download/storage/v1/b/"):
            bucket, _, key = path.removeprefix("/download/storage/v1/b/").partition("/o/")
            path = f"/{bucket}/{key}"
        if "list-type" in parts.query:
            return self._send(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        content = server.files.get(path)
        if content is None:
            return self._send(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        return self._send(206 if first else 200, content[first:], {"ETag": _tag(content)})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


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


@contextmanager
def serve_standin() -> Iterator[Standin]:
    with Standin() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""A stand-in for the Hugging Face hub: what huggingface_hub asks it for, from folders of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """folders: by id. gated: ids that nobody may read. asked: the paths of all requests. go_on: while it is
    not set, files of weights stop half way."""

    def __init__(self, folders: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders, self.gated = folders, gated
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self) -> tuple[socket.socket, object]:
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
        return {
            path.rpartition("/")[2] for path in self.asked if path.startswith("GET ") and "/resolve/" in path
        }


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in self.server.gated:
            return self._send(403, b"{}", head, {"X-Error-Code": "GatedRepo"})
        folder = self.server.folders.get(name)
        if folder is None:
            return self._send(404, b"{}", head, {"X-Error-Code": "RepoNotFound"})
        if len(rest) > 1 and rest[1] not in ("main", COMMIT, "v1"):
            return self._send(404, b"{}", head, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/"):
            listed = _tree(folder) if rest[:1] == ["tree"] else {
                "id": name, "sha": COMMIT, "siblings": [{"rfilename": one["path"]} for one in _tree(folder)]
            }  # fmt: skip
            return self._send(200, json.dumps(listed).encode(), head, {"Content-Type": "application/json"})
        file = folder.joinpath(*rest[2:])
        if not file.is_file():
            return self._send(404, b"{}", head, {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        facts = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, head, facts)

    def _send(self, status: int, content: bytes, head: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if head:
            return
        half = len(content) // 2 if self.path.endswith(".safetensors") else len(content)
        with contextlib.suppress(OSError):  # the client has been ended
            self.wfile.write(content[:half])
            if half < len(content):
                self.server.go_on.wait(60)
            self.wfile.write(content[half:])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _tree(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size,
            "oid": _digest(file.read_bytes()),
        }
        for file in sorted(folder.rglob("*")) if file.is_file()
    ]  # fmt: skip


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(folders: dict[str, Path], gated: tuple[str, ...] = ()) -> Iterator[Hub]:
    with Hub(folders, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

"""The OpenAI server on the demo model, on a thread of the tests' process."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import openai
from safetensors.torch import load_file, save
from waiting import wait_for

from manylora.config.settings import rows
from manylora.doors.http.options import ServeOptions
from manylora.doors.http.server import http_server, open_app
from manylora.doors.http.serving.connections import Clients, listen, listen_uds

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
REFRESH_S = 0.4
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}


def key_file(folder: Path, **keys: dict[str, Any]) -> Path:
    """A file of API keys by name; each name is the key itself."""
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in keys}
    entries = [{"name": name, "sha256": digest[name], **fields} for name, fields in keys.items()]
    (path := folder / "keys.yaml").write_text(json.dumps({"keys": entries}))
    return path


def adapter_file(name: str) -> bytes:
    """An adapter of the demo in one file, as it may be sent in a request."""
    folder = DEMO / "adapters" / name
    metadata = {"format": "pt", "adapter_config": (folder / "adapter_config.json").read_text()}
    return save(load_file(folder / "adapter_model.safetensors"), metadata)


class Running:
    """A real server on a thread, on a port that was free."""

    def __init__(self, **options: Any) -> None:
        given = {"served_model_name": ("demo", "llama"), "lora_refresh_seconds": REFRESH_S, **options}
        model, names = given.pop("model", DEMO / "base"), rows(ServeOptions)
        engine = {name: given.pop(name) for name in [*given] if name not in (*names, "sections")}
        sections = {"device": "cpu", **engine, **given.pop("sections", {})}
        chosen = ServeOptions(model, sections=sections, **given)
        self.app = open_app(chosen)
        self.clients = Clients(chosen.http_limits(chosen.max_connections))
        uds = chosen.uds
        sockets = [listen_uds(uds, self.clients)] if uds else listen("127.0.0.1", 0, self.clients)
        self.port = 0 if uds else sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = http_server(chosen, self.app, self.clients)
        self._thread = threading.Thread(target=self._server.run, args=(sockets,))
        self._thread.start()
        wait_for(lambda: self._server.started)
        transport = httpx2.HTTPTransport(uds=str(uds)) if uds else None
        self.http = httpx2.Client(base_url=self.url, timeout=60, transport=transport)
        self._clients: dict[str, openai.OpenAI] = {}

    def client(self, key: str = "none") -> openai.OpenAI:
        """The same for each key: to make one takes longer than most answers."""
        made = self._clients.get(key)
        if made is None:
            made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
            self._clients[key] = made
        return made

    def post(self, path: str = "/v1/completions", key: str = "", **body: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.post(path, json=body, headers=headers)

    def ask(self, path: str = "/v1/completions", status: int = 200, **body: Any) -> Any:
        """The JSON of an answer with this status."""
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *reason: object) -> None:
        for client in (self.http, *self._clients.values()):
            client.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not stop"

    def close(self) -> None:
        self.__exit__()

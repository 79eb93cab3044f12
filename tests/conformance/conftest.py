"""The server under test: `manylora serve`, or the one at --url."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import served
from conformance_server import Expected, Server


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = request.config.getoption("--folder")
    if made is None:
        made = tmp_path_factory.mktemp("conformance")
    if not (made / "expected.json").exists():
        import conformance_models

        conformance_models.write(made)
    return made


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Server]]:
    """By base model. Our own servers are started with the defaults."""
    urls = {"base": request.config.getoption("--url"), "hybrid": request.config.getoption("--hybrid-url")}
    with ExitStack() as started:
        if not any(urls.values()):
            allowed = "--allow-runtime-lora-updating", "--lora-allowed-path", folder / "adapters"
            urls = {
                base: started.enter_context(served(folder / f"{base}.log", folder / base, *allowed))
                for base in urls
            }
        found = {base: url for base, url in urls.items() if url is not None}
        yield {base: Server(url, folder / "adapters", Expected(folder, base)) for base, url in found.items()}


@pytest.fixture
def server(servers: dict[str, Server]) -> Server:
    return servers["base"]


@pytest.fixture
def hybrid(servers: dict[str, Server]) -> Server:
    if "hybrid" not in servers:
        pytest.skip("--hybrid-url: no server with the hybrid model was named")
    return servers["hybrid"]

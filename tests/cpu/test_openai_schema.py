"""Protects the OpenAPI document and the server against each other: requests that schemathesis makes of the
document, right ones and wrong ones, are answered in order, and a right one is never called malformed JSON.

MANYLORA_LONG=1 sends 3,000 of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import DEMO, Running
from test_openai_fuzz import complaint_about

from manylora.doors.http.app import ROUTES
from manylora.doors.http.page.page import document

pytestmark = pytest.mark.extended
COUNT = 3000 if os.environ.get("MANYLORA_LONG") else 150


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(
        lora_root=(DEMO / "adapters",), allow_runtime_lora_updating=True, max_seq_len=48, drain_seconds=1.0
    )
    yield running
    running.close()


def check_each(check: Callable[[Any], None], right: bool) -> None:
    """Calls it with requests, mostly of the routes that take a body."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs what `make test-all` installs")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    found = [one.ok() for one in schemathesis.openapi.from_dict(document(ROUTES)).get_all_operations()]
    posts = [one for one in found if one.method == "post"]
    mode = schemathesis.GenerationMode.POSITIVE if right else schemathesis.GenerationMode.NEGATIVE
    picked = [*posts, *found] if right else posts
    limits = settings(
        max_examples=COUNT, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    limits(given(st.one_of([one.as_strategy(generation_mode=mode) for one in picked]))(check))()


def send(server: Running, case: Any) -> tuple[Any, str | None]:
    """The answer, and what is wrong with it."""
    import requests

    try:
        answer = case.call(base_url=server.url, timeout=60)
    except requests.RequestException as error:
        return None, f"{type(error).__name__}: no answer"
    of_ollama = case.path.startswith("/api/")
    return answer, complaint_about(answer.status_code, answer.text, case.method, of_ollama=of_ollama)


@pytest.mark.timeout(1500)
def test_what_the_document_allows_is_answered(server: Running) -> None:
    served = []

    def check(case: Any) -> None:
        answer, wrong = send(server, case)
        assert wrong is None, f"{wrong}, of {case.as_curl_command()}"
        assert answer is not None and '"invalid_json"' not in answer.text, case.as_curl_command()
        served.append(answer.status_code == 200)

    check_each(check, right=True)
    assert sum(served) > COUNT / 15, "nearly nothing was served: the document says too little for a test"
    assert server.http.get("/health/model").status_code == 200


@pytest.mark.timeout(1500)
def test_what_the_document_forbids_is_answered_in_order(server: Running) -> None:
    def check(case: Any) -> None:
        _, wrong = send(server, case)
        assert wrong is None, f"{wrong}, of {case.as_curl_command()}"

    check_each(check, right=False)
    assert server.http.get("/health/model").status_code == 200

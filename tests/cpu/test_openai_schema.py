"""Protects the OpenAPI document and the server against each other: requests that schemathesis makes of the
document, right ones and wrong ones, are answered in order, and a right one is never called malformed JSON.

MANYLORA_LONG=1 sends 3,000 of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from serving import DEMO, Running
from test_openai_fuzz import complaint_about

from manylora.openai.api.openapi import document
from manylora.openai.app import ROUTES

COUNT = 3000 if os.environ.get("MANYLORA_LONG") else 150
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(document(ROUTES)).get_all_operations()]
POSTS = [one for one in OPERATIONS if one.method == "post"]
ANY = settings(
    max_examples=COUNT,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(
        lora_root=(DEMO / "adapters",), allow_runtime_lora_updating=True, max_seq_len=48, drain_seconds=1.0
    )
    yield running
    running.close()


def cases(mode: GenerationMode) -> st.SearchStrategy[Case]:
    """Mostly of the routes that take a body."""
    picked = POSTS if mode is GenerationMode.NEGATIVE else [*POSTS, *OPERATIONS]
    return st.one_of([one.as_strategy(generation_mode=mode) for one in picked])


def send(server: Running, case: Case) -> tuple[requests.Response | None, str | None]:
    """The answer, and what is wrong with it."""
    try:
        answer = case.call(base_url=server.url, timeout=60)
    except requests.RequestException as error:
        return None, f"{type(error).__name__}: no answer"
    of_ollama = case.path.startswith("/api/")
    return answer, complaint_about(answer.status_code, answer.text, case.method, of_ollama=of_ollama)


@pytest.mark.timeout(1500)
def test_what_the_document_allows_is_answered(server: Running) -> None:
    served = []

    @ANY
    @given(cases(GenerationMode.POSITIVE))
    def check(case: Case) -> None:
        answer, wrong = send(server, case)
        assert wrong is None, f"{wrong}, of {case.as_curl_command()}"
        assert answer is not None and '"invalid_json"' not in answer.text, case.as_curl_command()
        served.append(answer.status_code == 200)

    check()
    assert sum(served) > COUNT / 15, "nearly nothing was served: the document says too little for a test"
    assert server.http.get("/health/model").status_code == 200


@pytest.mark.timeout(1500)
def test_what_the_document_forbids_is_answered_in_order(server: Running) -> None:
    @ANY
    @given(cases(GenerationMode.NEGATIVE))
    def check(case: Case) -> None:
        _, wrong = send(server, case)
        assert wrong is None, f"{wrong}, of {case.as_curl_command()}"

    check()
    assert server.http.get("/health/model").status_code == 200

"""Protects Tinker's API: a sample is what a completion is, prompts are scored, and training is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from serving import Running

IDS = [1, 331, 434, 297, 318, 316, 310, 1150, 36]
SDK = "pip install tinker"


def fields(data: bytes) -> dict[int, list[Any]]:
    """Of a protocol buffer: bytes, or a number."""
    found: dict[int, list[Any]] = {}
    (message := Empty()).ParseFromString(data)
    for one in UnknownFieldSet(message):
        found.setdefault(one.field_number, []).append(one.data)
    return found


def ask(server: Running, path: str, **body: Any) -> Any:
    answer = server.post(f"/api/v1/{path}", **body)
    assert answer.status_code == 200, answer.text
    return answer


def sample(server: Running, model: str, params: dict[str, Any], **more: Any) -> dict[int, list[Any]]:
    session = ask(server, "create_session", tags=[], sdk_version="0").json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}"}
    sampler = ask(server, "create_sampling_session", **asked).json()["sampling_session_id"]
    assert server.http.get(f"/api/v1/samplers/{sampler}").json() == {
        "sampler_id": sampler, "base_model": "demo", "model_path": f"tinker://{model}",
    }  # fmt: skip
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:4]}, {"tokens": IDS[4:]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": params}
    begun = ask(server, "asample", **body, **more).json()
    assert len(begun["sample_sequence_ids"]) == more.get("num_samples", 1)
    found = ask(server, "retrieve_future", request_id=begun["request_id"])
    assert found.headers["content-type"] == "application/x-protobuf"
    return fields(found.content)


def test_a_sample_is_a_completion_with_its_end(server: Running) -> None:
    params = {"temperature": 0, "max_tokens": 8}
    usual = server.post(model="chinese", prompt=IDS, **params, logprobs=0, return_token_ids=True).json()
    choice = usual["choices"][0]
    [sequence] = sample(server, "chinese", params, topk_sample_logprobs=2)[1]
    found = fields(sequence)
    tokens, values = np.frombuffer(found[2][0], "<i4"), np.frombuffer(found[3][0], "<f4")
    assert tokens.tolist() == [*choice["token_ids"], 2] and found[1] == [0], "the end token is part of it"
    assert values[:-1] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    top = fields(found[4][0])
    assert (top[3], top[4]) == ([2], [len(tokens)])
    assert np.frombuffer(top[1][0], "<i4").reshape(-1, 2)[:, 0].tolist() == tokens.tolist()


def test_prompts_are_scored_and_nothing_ends_an_output_without_stop(server: Running) -> None:
    asked = {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 0}
    usual = server.post(model="japanese", **asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    params = {"max_tokens": 12, "stop": [], "seed": 5}
    found = sample(server, "japanese", params, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=1)
    values = np.frombuffer(found[2][0], "<f4")
    assert np.isnan(values[0]) and values[1:] == pytest.approx(usual[1:], abs=1e-4)
    assert len(np.frombuffer(fields(found[3][0])[2][0], "<f4")) == len(IDS)
    sequences = [fields(one) for one in found[1]]
    assert [one[1] for one in sequences] == [[1], [1]], "the length ended both"
    assert [len(one[2][0]) for one in sequences] == [48, 48]
    last = sample(server, "japanese", params, prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert np.isnan(np.frombuffer(last[2][0], "<f4")).tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    ("path", "body", "status", "hint"),
    [
        ("create_model", {"base_model": "demo"}, 400, "this server samples"),
        ("create_sampling_session", {"model_path": "tinker://x"}, 404, "'x' does not exist"),
        ("create_sampling_session", {}, 400, "model_path or base_model"),
        ("asample", {"base_model": "demo", "sampling_params": {"max_tokens": 10**6}}, 400, "context length"),
        ("asample", {"base_model": "demo", "sampling_params": {}, "prompt_alt_tokens_k": 1}, 400, "alt_t"),
        ("asample", {"base_model": "demo", "sampling_params": {"x": 1}}, 400, "sampling_params.x"),
        ("retrieve_future", {"request_id": "gone"}, 410, "sample again"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    server: Running, path: str, body: dict[str, Any], status: int, hint: str
) -> None:
    if path == "create_sampling_session":
        body = {"session_id": "s", "sampling_session_seq_id": 0, **body}
    if path == "asample":
        body = {"prompt": {"chunks": [{"tokens": IDS}]}, **body}
    assert hint in server.ask(f"/api/v1/{path}", status, **body)["error"]


def test_an_unmodified_client(server: Running) -> None:
    tinker = pytest.importorskip("tinker", reason=SDK)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
    client = service.create_sampling_client(model_path="tinker://chinese").result()
    prompt, params = tinker.ModelInput.from_ints(IDS), tinker.SamplingParams(max_tokens=8, temperature=0)
    found = client.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert found.sequences[0].tokens[-1] == 2 and found.sequences[0].stop_reason == "stop"
    assert client.compute_logprobs(prompt).result()[0] is None
    with pytest.raises(tinker.APIStatusError, match="'nobody' does not exist"):
        service.create_sampling_client(model_path="tinker://nobody").result()

"""Protects answers in a storm of random requests. MANYLORA_RANDOM_REQUESTS sets how many."""

from __future__ import annotations

import os
import queue
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from servers import Running, World
from test_server import ask, inputs, lora, tensor
from tiny_models import reference_generate, reference_logits
from tritonclient.utils import InferenceServerException

AT_ONCE = 64


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return int(os.environ.get("MANYLORA_RANDOM_REQUESTS", "200" if request.config.option.all else "80"))


def scalar(value: Any, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype)


def unregister(client: grpc.InferenceServerClient, region: str, headers: dict[str, str]) -> None:
    """The last response leaves a moment before the server lets go of the request."""
    until = time.monotonic() + 60
    while True:
        try:
            client.unregister_system_shared_memory(region, headers=headers)
            return
        except InferenceServerException as error:
            if "in use" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.05)


@dataclass
class Drawn:
    """A random request, and which reference says what is right; without one it must repeat by its seed."""

    values: dict[str, np.ndarray]
    adapter: int | None
    reference: str = ""  # greedy, log probs


@dataclass
class Answer:
    """rows: ids by sequence. log_probs: of the last row that had some."""

    rows: list[list[int]]
    log_probs: list[float]


def random_request(picks: random.Random) -> Drawn:
    prompt = [picks.randrange(250) for _ in range(picks.randint(1, 24))]
    values = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": scalar(len(prompt), np.int32),
        "request_output_len": scalar(picks.randint(1, 8), np.int32),
        "exclude_input_in_output": scalar(True, bool),
    }
    drawn = Drawn(values, picks.choice([None, 1, 2, 3, 4]))
    if drawn.adapter is not None:
        values |= lora(drawn.adapter)
    drawn.reference = picks.choice(["greedy", "log probs", "", "", ""])
    if drawn.reference == "log probs":
        values["return_log_probs"] = scalar(True, bool)
        values["streaming"] = scalar(picks.random() < 0.5, bool)
    elif not drawn.reference:
        values |= random_sampling(picks)
    return drawn


def random_sampling(picks: random.Random) -> dict[str, np.ndarray]:
    wishes = {
        "runtime_top_k": (np.int32, lambda: picks.randint(0, 50)),
        "runtime_top_p": (np.float32, lambda: picks.uniform(0.05, 1)),
        "temperature": (np.float32, lambda: picks.uniform(0.1, 3)),
        "random_seed": (np.uint64, lambda: picks.randrange(2**63)),
        "repetition_penalty": (np.float32, lambda: picks.uniform(0.5, 2)),
        "presence_penalty": (np.float32, lambda: picks.uniform(-1, 1)),
        "frequency_penalty": (np.float32, lambda: picks.uniform(-1, 1)),
        "prompt_ignore_length": (np.int32, lambda: picks.randint(0, 20)),
        "min_length": (np.int32, lambda: picks.randint(0, 4)),
        "end_id": (np.int32, lambda: picks.randrange(272)),
        "return_log_probs": (bool, lambda: True),
        "streaming": (bool, lambda: picks.random() < 0.5),
        "num_return_sequences": (np.int32, lambda: picks.randint(1, 3)),
        "return_perf_metrics": (bool, lambda: True),
        "runtime_top_p_decay": (np.float32, lambda: picks.uniform(0.5, 1)),
    }
    names = picks.sample(sorted(wishes), picks.randint(1, 6))
    return {name: scalar(wishes[name][1](), wishes[name][0]) for name in names}


def exchange(server: Running, batch: list[dict[str, np.ndarray]]) -> list[Answer | str]:
    """All at once over one stream: the answer to each request, or its error."""
    arrived: queue.Queue = queue.Queue()
    found: list[Any] = [{} for _ in batch]
    log_probs: list[list[float]] = [[] for _ in batch]
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for start in range(0, len(batch), AT_ONCE):
            part = batch[start : start + AT_ONCE]
            for number, values in enumerate(part, start):
                request = [tensor(name, value) for name, value in values.items()]
                client.async_stream_infer(
                    "tensorrt_llm", request, request_id=str(number), enable_empty_final_response=True
                )
            pending = len(part)
            while pending:
                result, error = arrived.get(timeout=60)
                if error is not None:
                    pending -= 1
                    number = errors_request(error, found, start, len(part))
                    found[number] = str(error)
                    continue
                response = result.get_response()
                number = int(response.id)
                if response.outputs:
                    take(result, found[number])
                    told = result.as_numpy("output_log_probs")
                    log_probs[number] = log_probs[number] if told is None else told[0, -1].tolist()
                pending -= response.parameters["triton_final_response"].bool_param
    return [
        one if isinstance(one, str) else Answer([one[key] for key in sorted(one)], told)
        for one, told in zip(found, log_probs, strict=True)
    ]


def take(result: grpc.InferResult, rows: dict[int, list[int]]) -> None:
    """Append what a response brings to the ids of its sequence."""
    index = result.as_numpy("sequence_index")
    sequence = 0 if index is None else int(index[0, 0])
    rows.setdefault(sequence, []).extend(result.as_numpy("output_ids")[0, 0].tolist())


def errors_request(error: Exception, found: list, start: int, count: int) -> int:
    """A stream's error names no request: any of this part that has no answer yet."""
    return next(i for i in range(start, start + count) if found[i] == {})


def expected_answer(world: World, drawn: Drawn) -> Answer:
    """What transformers answers."""
    adapter = world.adapters[drawn.adapter] if drawn.adapter else None
    values = drawn.values
    prompt, new = values["input_ids"][0].tolist(), int(values["request_output_len"][0, 0])
    ids = reference_generate(world.model, adapter, prompt, new)
    if drawn.reference == "greedy":
        return Answer([ids], [])
    logits = reference_logits(world.model, adapter, prompt + ids).log_softmax(-1)
    return Answer([ids], [logits[len(prompt) + i - 1, token].item() for i, token in enumerate(ids)])


def test_random_valid_requests_equal_the_reference_or_repeat_by_seed(
    server: Running, world: World, count: int
) -> None:
    for task_id in (1, 2, 3):
        ask(server, inputs([9], 1, **lora(task_id, world)))
    picks = random.Random(12)
    drawn = [random_request(picks) for _ in range(count)]
    answers = exchange(server, [one.values for one in drawn])
    assert not [answer for answer in answers if isinstance(answer, str)]
    order = list(range(len(drawn)))
    picks.shuffle(order)
    again = exchange(server, [drawn[i].values for i in order])
    for place, i in enumerate(order):
        assert again[place].rows == answers[i].rows, drawn[i]
        np.testing.assert_allclose(again[place].log_probs, answers[i].log_probs, atol=1e-4)
    for one, answer in zip(drawn, answers, strict=True):
        if one.reference:
            expected = expected_answer(world, one)
            assert answer.rows == expected.rows, one
            if expected.log_probs:
                np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=1e-3, err_msg=str(one))

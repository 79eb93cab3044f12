"""Protects versions through the real server: tensors in shared memory take the place of others under one id,
and a stream keeps or follows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpc
from servers import Running, World
from test_server import NEW, PROMPT, ask, inputs, lora, new_ids
from tiny_models import reference_generate
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

ID, REGION = 4321, f"manylora_versions_{os.getpid()}"


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


class Trainer:
    """Writes tensors into one region of shared memory, and asks for a token with them."""

    def __init__(self, server: Running, size: int) -> None:
        self._server, self._size = server, size
        self._handle = shm.create_shared_memory_region(REGION, f"/{REGION}", size)
        with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            client.register_system_shared_memory(REGION, f"/{REGION}", size, headers=server.management)

    def put(self, weights: np.ndarray, config: np.ndarray) -> list[grpc.InferResult]:
        assert weights.nbytes + config.nbytes <= self._size
        shm.set_shared_memory_region(self._handle, [weights, config])
        given, at = inputs(lora_task_id=np.array([[ID]], np.uint64)), 0
        for name, values in (("lora_weights", weights), ("lora_config", config)):
            one = grpc.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
            one.set_shared_memory(REGION, values.nbytes, at)
            given.append(one)
            at += values.nbytes
        return ask(self._server, given)

    def close(self) -> None:
        with grpc.InferenceServerClient(f"127.0.0.1:{self._server.grpc}") as client:
            unregister(client, REGION, self._server.management)
        shm.destroy_shared_memory_region(self._handle)


@pytest.fixture
def trainer(server: Running) -> Iterator[Trainer]:
    made = Trainer(server, 2**22)
    yield made
    made.close()


def tensors(world: World, number: int) -> tuple[np.ndarray, np.ndarray]:
    found = lora(number, world)
    return found["lora_weights"], found["lora_config"]


def versions(results: list[grpc.InferResult]) -> list[dict]:
    return json.loads(results[-1].as_numpy("lora_versions")[0, 0])


def test_tensors_in_shared_memory_take_the_place_of_others(
    server: Running, world: World, trainer: Trainer
) -> None:
    digests = []
    for number, adapter in enumerate((1, 2, 2, 1), 1):
        results = trainer.put(*tensors(world, adapter))
        expected = reference_generate(world.model, world.adapters[adapter], PROMPT, NEW)
        assert new_ids(results)[len(PROMPT) :] == expected
        [told] = versions(results)
        assert (told["name"], told["start"], told["end"]) == (str(ID), 0, NEW)
        assert told["version"] == (number if number < 3 else number - 1)  # equal tensors are one version
        digests.append(told["digest"])
        again = ask(server, inputs(**lora(ID)))
        assert new_ids(again) == new_ids(results) and versions(again) == versions(results)
    assert digests[0] == digests[3] != digests[1] == digests[2]
    assert ask(server, inputs())[-1].as_numpy("lora_versions") is None

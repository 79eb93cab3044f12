"""Converts tensors to requests, and events to responses. The engine has its own thread, and so has
sending.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from exporter import Exporter

from manylora.config.repository import engine_config, parameters_of
from manylora.doors.triton.bls_worker import ServerCalls
from manylora.doors.triton.engine_worker import EngineModelOptions, EngineWorker, Outputs
from manylora.doors.triton.server_types import release
from manylora.doors.triton.shape_guard import check_shapes
from manylora.engine.loop import EngineLoop
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline

# The engine's thread and the sending thread alternate in holding the GIL. A turn is 5 ms by default, for
# which a step would be blocked.
TURN_S = 1e-4
SMALL_BYTES, CACHED = 8, 1024  # maximum size and number of cached output tensors


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        exporter = Exporter(args["model_name"], args["model_version"])
        model_config = args["model_config"]
        decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(model_config))
        try:
            options = EngineModelOptions.of(model_config, decoupled)
            folder = Path(args["model_repository"])
            engine = EngineLoop.start(engine_config(parameters_of(model_config), folder))
            sys.setswitchinterval(TURN_S)
        except (ConfigError, ValueError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._worker = EngineWorker(
            engine, options, lifeline, exporter, _respond, ServerCalls(pb_utils).fail, _bfloat16_bits
        )

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()
        _small_tensor.cache_clear()  # a tensor that outlives the server's memory crashes the process
        release(self)


def _respond(outputs: Outputs) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([_tensor(*output) for output in outputs])


def _tensor(name: str, array: np.ndarray) -> pb_utils.Tensor:
    """Cache small tensors such as a token or a length: they recur, and creating one costs more than sending
    it.

    One thread sends all responses, so no tensor is sent by two threads at once.
    """
    if array.nbytes > SMALL_BYTES or array.dtype.hasobject:
        return pb_utils.Tensor(name, array)
    return _small_tensor(name, array.shape, array.dtype.str, array.tobytes())


@lru_cache(CACHED)
def _small_tensor(name: str, shape: tuple[int, ...], dtype: str, content: bytes) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.frombuffer(content, dtype).reshape(shape))


def _bfloat16_bits(tensor: pb_utils.Tensor) -> np.ndarray:
    """The bits as 2-byte void, because NumPy has no bfloat16."""
    return torch.from_dlpack(tensor.to_dlpack()).view(torch.int16).numpy().view("V2")

"""Converts tensors to requests, and events to responses. The engine has its own thread, and so has
sending.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from exporter import Exporter

from manylora.config.repository import engine_config, parameters_of
from manylora.doors.triton.bls_worker import ServerCalls
from manylora.doors.triton.engine_worker import EngineModelOptions, EngineWorker, Outputs
from manylora.doors.triton.server_types import ServerModel
from manylora.engine.loop import EngineLoop
from manylora.system.lifeline import Lifeline

# The engine's thread and the sending thread alternate in holding the GIL. A turn is 5 ms by default, for
# which a step would be blocked.
TURN_S = 1e-4
SMALL_BYTES, CACHED = 8, 1024  # maximum size and number of cached output tensors


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> EngineWorker:
        exporter = Exporter({"model": args["model_name"], "version": args["model_version"]})
        model_config, folder = args["model_config"], Path(args["model_repository"])
        options = EngineModelOptions.of(model_config, self.is_decoupled(args))
        engine = EngineLoop.start(engine_config(parameters_of(model_config), folder))
        sys.setswitchinterval(TURN_S)
        fail = ServerCalls(pb_utils).fail
        return EngineWorker(engine, options, lifeline, exporter, _respond, fail, _bfloat16_bits)

    def finalize(self) -> None:
        super().finalize()
        _small_tensor.cache_clear()  # a tensor that outlives the server's memory crashes the process


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

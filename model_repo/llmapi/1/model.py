"""TensorRT-LLM's `llmapi` model: takes a prompt and sampling parameters, and calls the model
`tensorrt_llm`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.texts import repository_folders
from manylora.config.repository import parameters_of
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.llmapi_model import LlmapiModel
from manylora.doors.triton.prompts import EngineSetup, PromptRunner
from manylora.doors.triton.server_types import release
from manylora.doors.triton.shape_guard import check_shapes
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        name, folder = args["model_name"], Path(args["model_repository"])
        server = ServerCalls(pb_utils)
        decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        try:
            engine = EngineSetup.open(folder, parameters_of(args["model_config"]))
            folders = repository_folders(folder, engine.name)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        model = LlmapiModel(PromptRunner(server.call, engine), folders, decoupled)
        self._worker = BlsWorker(name, lifeline, model.answer, decoupled, server)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()
        release(self)

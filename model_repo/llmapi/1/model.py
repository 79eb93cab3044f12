"""TensorRT-LLM's `llmapi` model: takes a prompt and sampling parameters, and calls the model
`tensorrt_llm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.texts import repository_folders
from manylora.config.repository import parameters_of
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.llmapi_model import LlmapiModel
from manylora.doors.triton.prompts import EngineSetup, PromptRunner
from manylora.doors.triton.server_types import ServerModel
from manylora.system.lifeline import Lifeline


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> BlsWorker:
        folder, server, decoupled = (
            Path(args["model_repository"]),
            ServerCalls(pb_utils),
            self.is_decoupled(args),
        )
        engine = EngineSetup.open(folder, parameters_of(args["model_config"]))
        folders = repository_folders(folder, engine.name)
        model = LlmapiModel(PromptRunner(server.call, engine), folders, decoupled)
        return BlsWorker(args["model_name"], lifeline, model.answer, decoupled, server)

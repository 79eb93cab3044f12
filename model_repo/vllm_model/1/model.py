"""vllm_backend's model: takes a prompt and sampling parameters as JSON, and calls the model
`tensorrt_llm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.names import read_names
from manylora.config.repository import flag, names_file, parameters_beside, parameters_of
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.metrics import VllmMetrics
from manylora.doors.triton.prompts import EngineSetup, PromptRunner
from manylora.doors.triton.server_types import ServerModel
from manylora.doors.triton.vllm_model import VllmModel, takes_adapters
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> BlsWorker:
        name, folder = args["model_name"], Path(args["model_repository"])
        parameters, server = parameters_of(args["model_config"]), ServerCalls(pb_utils)
        engine = EngineSetup.open(folder, parameters)
        file = names_file(parameters_beside(folder, engine.name), folder)
        names = list(read_names(file)) if file is not None else []
        metrics = None
        if flag(parameters, "REPORT_CUSTOM_METRICS", False):
            labels = {"model": name, "version": args["model_version"]}
            metrics = VllmMetrics(pb_utils, labels, engine.model.max_position_embeddings)
        enabled = takes_adapters(folder / args["model_version"] / "model.json")
        observe = None if metrics is None else metrics.observe
        model = VllmModel(PromptRunner(server.call, engine), names, enabled, observe)
        if not self.is_decoupled(args):
            raise ConfigError(f"{name} must have decoupled: True in its config.pbtxt")
        write = (lambda: None) if metrics is None else metrics.write
        return BlsWorker(name, lifeline, model.answer, True, server, write)

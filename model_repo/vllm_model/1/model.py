"""vllm_backend's model: takes a prompt and sampling parameters as JSON, and calls the model
`tensorrt_llm`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.names import read_names
from manylora.config.repository import flag, names_file, parameters_beside, parameters_of
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.metrics import VllmMetrics
from manylora.doors.triton.prompts import EngineSetup, PromptRunner
from manylora.doors.triton.server_types import release
from manylora.doors.triton.shape_guard import check_shapes
from manylora.doors.triton.vllm_model import VllmModel, takes_adapters
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        name, folder = args["model_name"], Path(args["model_repository"])
        parameters, server = parameters_of(args["model_config"]), ServerCalls(pb_utils)
        try:
            engine = EngineSetup.open(folder, parameters)
            file = names_file(parameters_beside(folder, engine.name), folder)
            names = list(read_names(file)) if file is not None else []
            observe, write, self._end = None, lambda: None, lambda: None
            if flag(parameters, "REPORT_CUSTOM_METRICS", False):
                labels = {"model": name, "version": args["model_version"]}
                metrics = VllmMetrics(pb_utils, labels, engine.model.max_position_embeddings)
                observe, write, self._end = metrics.observe, metrics.write, metrics.close
            runner = PromptRunner(server.call, engine)
            enabled = takes_adapters(folder / args["model_version"] / "model.json")
            model = VllmModel(runner, names, enabled, observe)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        if not pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"])):
            raise pb_utils.TritonModelException(f"{name} must have decoupled: True in its config.pbtxt")
        self._worker = BlsWorker(name, lifeline, model.answer, True, server, write)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()
        self._end()
        release(self)

"""Text in, text out by calling the other models. Supports whole texts in streams, text stop words, and
drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import triton_python_backend_utils as pb_utils

from manylora.config.repository import flag, parameters_of, value_of
from manylora.doors.triton.bls import TextGenerator
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.server_types import release
from manylora.doors.triton.shape_guard import check_shapes
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        server = ServerCalls(pb_utils, decoupled)
        try:
            generator = TextGenerator(
                server.call,
                engine=value_of(parameters, "tensorrt_llm_model_name") or "tensorrt_llm",
                draft=value_of(parameters, "tensorrt_llm_draft_model_name"),
                accumulate=flag(parameters, "accumulate_tokens", False),
            )
            if value_of(parameters, "multimodal_encoders_name") is not None:
                raise ConfigError("parameter multimodal_encoders_name: multimodal models are not supported")
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        name, answer = "tensorrt_llm_bls", generator.answer
        self._worker = BlsWorker(name, lifeline, answer, decoupled, server)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()
        release(self)

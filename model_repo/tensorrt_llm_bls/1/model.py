"""Text in, text out by calling the other models. Supports whole texts in streams, text stop words, and
drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from manylora.config.repository import flag, parameters_of, value_of
from manylora.doors.triton.bls import TextGenerator
from manylora.doors.triton.bls_worker import BlsWorker, ServerCalls
from manylora.doors.triton.server_types import ServerModel
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> BlsWorker:
        parameters, decoupled = parameters_of(args["model_config"]), self.is_decoupled(args)
        server = ServerCalls(pb_utils, decoupled)
        generator = TextGenerator(
            server.call,
            engine=value_of(parameters, "tensorrt_llm_model_name") or "tensorrt_llm",
            draft=value_of(parameters, "tensorrt_llm_draft_model_name"),
            accumulate=flag(parameters, "accumulate_tokens", False),
        )
        if value_of(parameters, "multimodal_encoders_name") is not None:
            raise ConfigError("parameter multimodal_encoders_name: multimodal models are not supported")
        return BlsWorker("tensorrt_llm_bls", lifeline, generator.answer, decoupled, server)

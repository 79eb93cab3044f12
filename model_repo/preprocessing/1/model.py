"""Converts text to token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.texts import RepositoryTexts
from manylora.config.repository import engine_context, flag, parameters_of
from manylora.doors.triton.server_types import Arrays, ServerModel
from manylora.doors.triton.text_models import Preprocessor, TextWorker, open_tokenizer
from manylora.system.lifeline import Lifeline


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> TextWorker:
        parameters, folder = parameters_of(args["model_config"]), Path(args["model_repository"])
        special = flag(parameters, "add_special_tokens", True)
        context = engine_context(folder)
        tokenizer = open_tokenizer(parameters)
        own = RepositoryTexts.open(folder, tokenizer)
        made = Preprocessor(tokenizer, special, context, own)

        def respond(inputs: Arrays) -> pb_utils.InferenceResponse:
            return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in made.run(inputs).items()])

        return TextWorker("preprocessing", lifeline, made.length, respond, self.fail)

"""Converts text to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.texts import RepositoryTexts
from manylora.config.repository import engine_context, flag, parameters_of
from manylora.doors.triton.server_types import Arrays, release
from manylora.doors.triton.shape_guard import check_shapes
from manylora.doors.triton.text_models import Preprocessor, TextWorker, open_tokenizer
from manylora.errors import ConfigError
from manylora.system.lifeline import Lifeline


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        try:
            special = flag(parameters, "add_special_tokens", True)
            context = engine_context(Path(args["model_repository"]))
            tokenizer = open_tokenizer(parameters)
            own = RepositoryTexts.open(Path(args["model_repository"]), tokenizer)
            self._preprocessor = Preprocessor(tokenizer, special, context, own)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._worker = TextWorker("preprocessing", lifeline, self._preprocessor.length, self._respond, _fail)

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse | None]:
        return self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()
        release(self)

    def _respond(self, inputs: Arrays) -> pb_utils.InferenceResponse:
        outputs = self._preprocessor.run(inputs)
        return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in outputs.items()])


def _fail(text: str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))

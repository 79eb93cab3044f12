"""Text in, text out by calling the other models: whole texts in a stream, stop words on text, drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.errors import ConfigError, RequestError
from manylora.system.lifeline import Lifeline
from manylora.wire.bls_generator import TextGenerator, Values
from manylora.wire.bls_worker import BlsWorker
from manylora.wire.parameters import flag, parameters_of, value_of
from manylora.wire.shape_guard import check_shapes


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        try:
            generator = TextGenerator(
                self._call,
                engine=value_of(parameters, "tensorrt_llm_model_name") or "tensorrt_llm",
                draft=value_of(parameters, "tensorrt_llm_draft_model_name"),
                accumulate=flag(parameters, "accumulate_tokens", False),
            )
            if value_of(parameters, "multimodal_encoders_name") is not None:
                raise ConfigError("parameter multimodal_encoders_name: multimodal models are not supported")
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        config = json.loads(args["model_config"])
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._worker = BlsWorker(lifeline, generator, self._decoupled, _respond, _fail)

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse] | None:
        return self._worker.execute(requests)

    def finalize(self) -> None:
        self._worker.close()

    def _call(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterator[Mapping[str, pb_utils.Tensor]]:
        request = pb_utils.InferenceRequest(
            model_name=model,
            inputs=_tensors(inputs),
            requested_output_names=outputs,
            request_id=request_id,
        )
        streams = self._decoupled and request_id
        for response in request.exec(decoupled=True) if streams else [request.exec()]:
            if response.has_error():
                raise RequestError(response.error().message())
            tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
            if tensors:
                yield tensors


def _respond(outputs: Values) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(_tensors(outputs))


def _fail(text: str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


def _tensors(values: Values) -> list[pb_utils.Tensor]:
    """An array becomes a tensor; a tensor of the server's passes through."""
    return [
        pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else cast(pb_utils.Tensor, value)
        for name, value in values.items()
    ]

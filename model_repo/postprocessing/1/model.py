"""Token ids to text; in a stream, exactly the text the new ids add."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.errors import ConfigError
from manylora.lifeline import Lifeline
from manylora.text import open_tokenizer
from manylora.wire.parameters import flag, parameters_of


class TritonPythonModel:
    def initialize(self, args):
        parameters = parameters_of(args["model_config"])
        try:
            self._tokenizer = open_tokenizer(parameters)
            self._skip = flag(parameters, "skip_special_tokens", True)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._lifeline = Lifeline("postprocessing")

    def execute(self, requests):
        with self._lifeline.busy():
            return [self._answer(request) for request in requests]

    def _answer(self, request):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        tokens, lengths = arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"]
        windows, reason = arrays.get("PREVIOUS_IDS"), arrays.get("FINISH_REASON")
        final = reason is None or bool(reason.reshape(-1)[0])
        texts = []
        for item in np.ndindex(lengths.shape):
            ids = tokens[item][: lengths[item]].tolist()
            if windows is None:
                texts.append(self._tokenizer.decode(ids, self._skip))
            else:
                texts.append(self._tokenizer.delta(windows[item].tolist(), ids, final, self._skip))
        output = np.array([text.encode() for text in texts], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])

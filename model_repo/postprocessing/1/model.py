"""Token ids to text; in a stream, exactly the text the new ids add."""

from __future__ import annotations

from functools import lru_cache

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
        windows, final = arrays.get("PREVIOUS_IDS"), "FINISH_REASON" in arrays
        texts = []
        for item, row in enumerate(lengths.tolist()):
            for beam, length in enumerate(row):
                ids = tokens[item, beam, :length].tolist()
                if windows is None:
                    text = self._tokenizer.decode(ids, self._skip)
                else:
                    text = self._tokenizer.delta(windows[item, beam].tolist(), ids, final, self._skip)
                texts.append(text.encode())
        return pb_utils.InferenceResponse([_output(tuple(texts))])


@lru_cache(1024)
def _output(texts):
    """Texts of a token or two come again and again, and making a tensor costs more than the text."""
    return pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))

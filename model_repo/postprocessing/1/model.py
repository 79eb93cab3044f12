"""Token ids to text; in a stream, exactly the text the new ids add."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.errors import ConfigError, RequestError
from manylora.system.lifeline import Lifeline
from manylora.text.tokenizer import open_tokenizer
from manylora.wire.client_disconnects import Departures
from manylora.wire.parameters import flag, parameters_of
from manylora.wire.shape_guard import check_shapes
from manylora.wire.text_worker import Desk

MAX_TOKENS = 2**20  # of one request
SMALL = 64  # bytes of a text that is kept for the next time


class TritonPythonModel:
    def initialize(self, args):
        self._lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        try:
            self._tokenizer = open_tokenizer(parameters)
            self._skip = flag(parameters, "skip_special_tokens", True)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._departures = Departures()
        self._desk = Desk("postprocessing", self._lifeline, pb_utils, _measure, self._work)

    def execute(self, requests):
        self._departures.look(requests)
        return self._desk.answer(requests)

    def finalize(self):
        self._desk.close()

    def _work(self, arrays):
        tokens, lengths = arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"]
        windows, final = arrays.get("PREVIOUS_IDS"), "FINISH_REASON" in arrays
        texts = []
        for item, row in enumerate(lengths.tolist()):
            for beam, length in enumerate(row):
                ids = _checked(tokens[item, beam, :length])
                if windows is None:
                    text = self._tokenizer.decode(ids, self._skip)
                else:
                    text = self._tokenizer.delta(_checked(windows[item, beam]), ids, final, self._skip)
                texts.append(text.encode())
        return [_kept(tuple(texts)) if sum(map(len, texts)) <= SMALL else _output(texts)]


def _measure(arrays):
    """Tokens of all sequences."""
    tokens, lengths, windows = (arrays.get(n) for n in ("TOKENS_BATCH", "SEQUENCE_LENGTH", "PREVIOUS_IDS"))
    if tokens.shape[:2] != lengths.shape or (windows is not None and windows.shape[:2] != lengths.shape):
        raise RequestError(
            "TOKENS_BATCH, SEQUENCE_LENGTH and PREVIOUS_IDS must have one shape up to the beams, got "
            f"{tokens.shape}, {lengths.shape} and {None if windows is None else windows.shape}"
        )
    longest, count = tokens.shape[2], 0 if windows is None else windows.size
    for length in lengths.reshape(-1).tolist():
        if not 0 <= length <= longest:
            raise RequestError(f"SEQUENCE_LENGTH must be in [0, {longest}], the tokens of TOKENS_BATCH")
        count += length
    if count > MAX_TOKENS:
        raise RequestError(f"at most {MAX_TOKENS} tokens are decoded in one request, got {count}")
    return count


def _checked(row):
    ids = row.tolist()
    if ids and min(ids) < 0:
        raise RequestError("TOKENS_BATCH and PREVIOUS_IDS must hold token ids, which are 0 or more")
    return ids


@lru_cache(1024)
def _kept(texts):
    """Texts of a token or two come again and again, and making a tensor costs more than the text."""
    return _output(texts)


def _output(texts):
    return pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))

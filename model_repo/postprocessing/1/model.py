"""Converts token ids to text. In a stream, returns exactly the text that the new ids add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import get_ident

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.adapters.catalog.texts import RepositoryTexts
from manylora.config.repository import flag, parameters_of
from manylora.doors.triton.engine_worker import DisconnectReporter
from manylora.doors.triton.server_types import Arrays, ServerModel, ServerRequest
from manylora.doors.triton.text_models import Postprocessor, TextWorker, open_tokenizer
from manylora.system.lifeline import Lifeline

SMALL_BYTES, CACHED = 64, 1024  # maximum size and number of texts whose tensors are cached


class TritonPythonModel(ServerModel):
    pb_utils = pb_utils

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> TextWorker:
        parameters = parameters_of(args["model_config"])
        skip = flag(parameters, "skip_special_tokens", True)
        tokenizer = open_tokenizer(parameters)
        own = RepositoryTexts.open(Path(args["model_repository"]), tokenizer)
        self._postprocessor = Postprocessor(tokenizer, skip, own)
        self._disconnects = DisconnectReporter()
        return TextWorker("postprocessing", lifeline, self._postprocessor.length, self._respond, self.fail)

    def execute(self, requests: Sequence[ServerRequest]) -> list[pb_utils.InferenceResponse | None] | None:
        self._disconnects.check_one(requests)
        return self._worker.execute(requests)

    def finalize(self) -> None:
        super().finalize()
        _cached_tensor.cache_clear()  # a tensor that outlives the server's memory crashes the process

    def _respond(self, inputs: Arrays) -> pb_utils.InferenceResponse:
        texts = self._postprocessor.run(inputs)
        small = sum(map(len, texts)) <= SMALL_BYTES
        tensor = _cached_tensor(texts, get_ident()) if small else _tensor(texts)
        return pb_utils.InferenceResponse([tensor])


@lru_cache(CACHED)
def _cached_tensor(texts: tuple[bytes, ...], thread: int) -> pb_utils.Tensor:
    """Cache tensors of short texts: texts of a token or two recur, and creating a tensor costs more than the
    text.

    thread: the thread that responds with it. The binding copies a tensor to the server's memory when it is
    first sent, without a lock, so two threads must not share one. Requests with many tokens are decoded on
    other threads than `execute`, and they may have a short text, too.
    """
    return _tensor(texts)


def _tensor(texts: tuple[bytes, ...]) -> pb_utils.Tensor:
    return pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))

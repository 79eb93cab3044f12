"""TritonTarget: the `tensorrt_llm` model of a running Triton server, over gRPC."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from manylora.bench.datasets import BenchRequest
from manylora.bench.load import Answer
from manylora.bench.remote import ANSWER_TIMEOUT_S, RemoteTarget
from manylora.errors import ConfigError, RequestError
from manylora.lora.convert import store_as
from manylora.lora.library.reader import read_adapter_folder
from manylora.request import LoraInput, Request, SamplingConfig
from manylora.wire.engine_client import AnswerReader, request_tensors

NOT_CACHED = "Please send LoRA weights with request"
MODEL = "tensorrt_llm"
STORAGE_TYPES = {"TYPE_BF16": "bfloat16", "TYPE_FP16": "float16"}
FIELDS = ("end_id", "temperature", "top_k", "top_p", "seed")  # fields of SamplingConfig that can be sent


class TritonTarget(RemoteTarget):
    """Each running request has its own stream: on a shared stream, an error does not say which request it is
    for.

    The first request of an adapter sends its tensors, and so does one for which the server answers that the
    adapter is not cached. sampling: fields of SamplingConfig. encode: text to token ids; None if all prompts
    are token ids. Raises ConfigError for a field that cannot be sent, and if the server is not ready.
    """

    def __init__(
        self, url: str, connections: int, *, streaming: bool, sampling: dict[str, Any],
        encode: Callable[[str], list[int]] | None,
    ) -> None:  # fmt: skip
        try:
            import tritonclient.grpc as grpc
        except ImportError as error:
            raise ConfigError("--endpoint needs tritonclient: pip install 'tritonclient[grpc]'") from error
        unknown = sorted(sampling.keys() - set(FIELDS))
        if unknown:
            raise ConfigError(f"--sampler_options: {unknown[0]} is not sent to an --endpoint; leave it out")
        super().__init__(connections)
        self._grpc: Any = grpc
        self._url = url.removeprefix("grpc://")
        self._streaming, self._encode = streaming, encode
        self._sampling = {name: v for name, v in sampling.items() if not (name == "end_id" and v == -1)}
        self._sent: set[int] = set()  # ids of adapters whose tensors were sent
        self._check_ready()

    def _check_ready(self) -> None:
        client = self._grpc.InferenceServerClient(self._url)
        try:
            ready = client.is_model_ready(MODEL)
            config = client.get_model_config(MODEL).config if ready else None
        except Exception as error:
            raise ConfigError(f"--endpoint {self._url} does not answer: {error}") from error
        finally:
            client.close()
        if config is None:
            raise ConfigError(f"--endpoint {self._url}: model {MODEL} is not ready")
        if not config.model_transaction_policy.decoupled:
            raise ConfigError(f"--endpoint {self._url}: model {MODEL} must have decoupled_mode")
        from tritonclient.grpc import model_config_pb2

        types = {one.name: one.data_type for one in config.input}
        self._weights_type = model_config_pb2.DataType.Name(types["lora_weights"])

    def _ask(self, request: BenchRequest) -> Answer:
        ids = list(request.input_ids or ())
        if not ids:
            assert request.prompt is not None
            if self._encode is None:
                raise RequestError("a prompt of text needs --model, for its tokenizer")
            ids = self._encode(request.prompt)
        lora = request.lora
        with self._lock:
            first_time = lora is not None and lora.lora_int_id not in self._sent
            if lora is not None:
                self._sent.add(lora.lora_int_id)
        try:
            return self._exchange(request, ids, with_tensors=first_time)
        except RequestError as error:
            if lora is None or NOT_CACHED not in str(error):
                raise
            return self._exchange(request, ids, with_tensors=True)

    def _exchange(self, request: BenchRequest, ids: list[int], with_tensors: bool) -> Answer:
        sent = self._request(request, ids, with_tensors)
        inputs = [self._tensor(name, value) for name, value in request_tensors(sent).items()]
        stream: _Stream = self._connection()
        stream.client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        reader = AnswerReader(sent)
        tokens: list[int] = []
        first, tier, final = None, "", False
        while not final:
            result, error = stream.answers.get(timeout=ANSWER_TIMEOUT_S)
            if error is not None:  # more responses may follow: use a new stream for the next request
                stream.client.stop_stream(cancel_requests=True)
                self._drop_connection()
                raise RequestError(str(error))
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            outputs = {one.name: result.as_numpy(one.name) for one in response.outputs}
            for event in reader.read(outputs, final):
                if event.token_ids and first is None and self._streaming:
                    first = time.monotonic()
                tokens += event.token_ids
                tier = event.metrics.adapter_tier or tier if event.metrics else tier
        return Answer(first, len(ids), len(tokens), tuple(tokens), adapter_tier=tier)

    def _request(self, request: BenchRequest, ids: list[int], with_tensors: bool) -> Request:
        params = SamplingConfig(max_tokens=request.output_tokens, **self._sampling)
        lora = None
        if request.lora is not None:
            path = request.lora.lora_path
            assert path is not None
            tensors = _read(path, self._weights_type) if with_tensors else ()
            lora = LoraInput(request.lora.lora_int_id, *tensors)
        return Request(tuple(ids), params, lora, self._streaming)

    def _tensor(self, name: str, value: np.ndarray) -> Any:
        if value.dtype.kind == "V":  # the bits of bfloat16, which NumPy does not have
            tensor = self._grpc.InferInput(name, value.shape, "BF16")
            tensor._raw_content = value.tobytes()
            return tensor
        from tritonclient.utils import np_to_triton_dtype

        tensor = self._grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        return tensor

    def _connect(self) -> _Stream:
        return _Stream(self._grpc.InferenceServerClient(self._url))


class _Stream:
    """A client with an open stream. answers: (result, error) for each response."""

    def __init__(self, client: Any) -> None:
        self.client, self.close = client, client.close
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self.answers.put((result, error)))


@functools.lru_cache(maxsize=64)
def _read(path: str, weights_type: str) -> tuple[np.ndarray, np.ndarray]:
    """An adapter's tensors in the data type of the server's input."""
    weights, config = read_adapter_folder(Path(path))
    return store_as(weights, config, STORAGE_TYPES.get(weights_type, "float32")), config

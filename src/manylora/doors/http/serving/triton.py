"""TritonEngine: uses the `tensorrt_llm` model of a running Triton server over gRPC as the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count

import grpc.aio
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelReadyRequest, ModelStreamInferResponse
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

from manylora import errors
from manylora.adapters.number_types import is_bfloat16, narrow_to_bfloat16, widen_bfloat16
from manylora.adapters.tensors import Adapter, lora_input
from manylora.doors.http.api.errors import FORMAT, ApiError, adapter_cache_busy, queue_full, unsupported_field
from manylora.doors.http.serving.backend import Wake
from manylora.doors.triton.engine_client import AnswerReader, request_tensors
from manylora.errors import ConfigError, RequestError
from manylora.request import (
    INVOCATION,
    Event,
    FinishReason,
    LoraInput,
    LoraMix,
    Request,
    SamplingConfig,
    Sink,
)
from manylora.stats import AdapterStats, EngineStats, Resident

logger = logging.getLogger("manylora")

CONNECT_S = 10.0
CHECK_S = 2.0  # between checks whether the model is ready
MAX_KNOWN = 65536  # task ids that the server has accepted
MAX_RESIDENTS = 256  # the most recently used of these, shown by metrics and /v1/models
FINAL = "triton_enable_empty_final_response"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
WEIGHT_TYPES = {"FP32": "float32", "FP16": "float16", "BF16": "V2"}
NEEDED = ("input_ids", "input_lengths", "request_output_len")
IGNORED_PROMPT = "prompt_ignore_length"  # NVIDIA's model has it since May 2026
RENAMED = {"random_seed": "seed", "min_length": "min_tokens"}  # in NVIDIA's releases after 0.19
MANYLORA_GUIDES = ("lark_grammar", "llguidance")
ADAPTER_FAULT = re.compile(r"\blora[ _]|low_rank|adapterSize|layerId")
STACK = re.compile(r"\s+\d+\s+0x[0-9a-f]{6,}.*|\s*Traceback \(most recent.*", re.DOTALL)
PATH = re.compile(r"(?:/[\w.+-]+){2,}(?::\d+)?")


@dataclass(frozen=True)
class TritonModel:
    """The model's configuration as the server reports it. The model may be ours, or NVIDIA's in any release.

    parameters: of config.pbtxt. batched: tensors have a batch dimension. lora_columns: of lora_config, 0:
    any.
    """

    name: str
    inputs: dict[str, str]
    parameters: dict[str, str]
    outputs: frozenset[str] = frozenset()
    decoupled: bool = True
    batched: bool = True
    lora_columns: int = 0

    @classmethod
    def read(cls, url: str, name: str) -> TritonModel:
        """Ask the server at a gRPC address, host:port. Raises ConfigError."""
        try:
            with triton.InferenceServerClient(url) as client:
                metadata = client.get_model_metadata(name, client_timeout=CONNECT_S)
                config = client.get_model_config(name, client_timeout=CONNECT_S).config
        except InferenceServerException as error:
            raise ConfigError(f"triton_url {url}: model {name} does not answer: {_text_of(error)}") from error
        columns = next((one.shape[-1] for one in metadata.inputs if one.name == "lora_config"), -1)
        found = cls(
            name,
            inputs={one.name: one.datatype for one in metadata.inputs},
            parameters={key: value.string_value for key, value in config.parameters.items()},
            outputs=frozenset(one.name for one in metadata.outputs),
            decoupled=config.model_transaction_policy.decoupled,
            batched=config.max_batch_size > 0,
            lora_columns=max(0, columns),
        )
        missing = [name for name in NEEDED if name not in found.inputs]
        if missing or "output_ids" not in found.outputs:
            what = f"input {missing[0]}" if missing else "output output_ids"
            raise ConfigError(f"triton_url {url}: model {name} has no {what}: it is not a tensorrt_llm model")
        if "lora_task_id" not in found.inputs:
            logger.warning("triton: model %s takes no adapters: it has no input lora_task_id", name)
        if IGNORED_PROMPT not in found.inputs:
            penalties = "presence_penalty and frequency_penalty count the prompt's tokens too"
            logger.warning("triton: model %s has no input %s: %s", name, IGNORED_PROMPT, penalties)
        if not found.decoupled:
            logger.warning("triton: model %s is not decoupled: streams come in one piece, and n is 1", name)
        return found

    def tensors(self, request: Request) -> dict[str, np.ndarray]:
        """The input tensors. Raises ApiError for ones that the model lacks: Triton would leak a reference to
        it.
        """
        params, ours = request.params, "finish_reason" in self.outputs
        # NVIDIA's model would ignore both.
        if params.num_return_sequences > 1 and not self.decoupled:
            raise unsupported_field("n above 1 needs a decoupled Triton model", "n")
        if params.guide is not None and params.guide.type in MANYLORA_GUIDES and not ours:
            reason = f"The Triton model behind this server knows no {params.guide.type}"
            raise unsupported_field(reason, FORMAT)
        if request.cache_salt:
            raise unsupported_field("cache_salt needs an engine in this process: leave it out", "cache_salt")
        request = request if self.decoupled else replace(request, streaming=False)
        if isinstance(request.lora, LoraInput):
            request = replace(request, lora=self._sent(request.lora))
        found = request_tensors(request)
        for name in ("pad_id", IGNORED_PROMPT):  # no effect: padding is not read; `read` has warned
            if name not in self.inputs:
                found.pop(name, None)
        named = {name if name in self.inputs else RENAMED.get(name, name): one for name, one in found.items()}
        unknown = sorted(set(named) - set(self.inputs))
        if unknown:
            reason = f"The Triton model behind this server has no input {', '.join(unknown)}: leave it out"
            raise unsupported_field(reason)
        return {name: one if self.batched else one[0] for name, one in named.items()}

    def _sent(self, lora: LoraInput) -> LoraInput:
        """The adapter in the form that a request carries. Raises ApiError."""
        if lora.task_id is not None and isinstance(lora.checked, Adapter):
            lora = lora_input(lora.task_id, lora.checked.rows, lora.checked.extras)
        carried = (INVOCATION,) if "lora_invocation_tokens" in self.inputs else ()
        left = [one.name for one in lora.extras if one.name not in carried]
        if left:
            reason = (
                f"the adapter has {left[0]}, which a request to Triton cannot carry: put its "
                "directory into the server's lora_catalog_dir, or serve with an engine of this process"
            )
            raise ApiError(422, "adapter_not_sendable", reason, "model")
        weights, config = lora.weights, lora.config
        if weights is None or config is None:
            return lora
        given = "V2" if is_bfloat16(weights.dtype) else weights.dtype.name
        wanted = WEIGHT_TYPES.get(self.inputs.get("lora_weights", "FP32"), "float32")
        if given != wanted:
            wide = widen_bfloat16(weights) if given == "V2" else weights.astype(np.float32)
            weights = narrow_to_bfloat16(wide) if wanted == "V2" else wide.astype(wanted)
        if self.lora_columns == 4 and config.shape[2] != 4:
            config = np.pad(config, ((0, 0), (0, 0), (0, 1)))
        elif self.lora_columns == 3 and config.shape[2] != 3:
            if config[..., 3].any():
                reason = "The Triton model behind this server takes no DoRA: its lora_config has 3 columns"
                raise ApiError(422, "adapter_unsupported", reason, "model")
            config = config[..., :3]
        return replace(lora, weights=weights, config=config)

    def number(self, name: str) -> int | None:
        """The value of a numeric parameter. None if it is empty."""
        text = self.parameters.get(name, "")
        return int(text) if text.isdigit() else None


class TritonEngine:
    """Belongs to its event loop. Each request has a gRPC stream: cancelling that tells Triton to stop."""

    follows = False

    def __init__(self, url: str, model: TritonModel) -> None:
        self._channel, self.model = grpc.aio.insecure_channel(url, options=UNLIMITED), model
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._tickets = count(1)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()  # tickets with at least one token
        self._known: OrderedDict[int, None] = OrderedDict()  # task ids, the most recently used last
        self._wake: Wake = lambda: None
        self.alive = True
        self._checking = asyncio.create_task(self._check())

    def on_events(self, wake: Wake) -> None:
        self._wake = wake

    def resident(self, task_id: int) -> bool:
        """Whether the server has accepted this adapter and has not reported its eviction since."""
        return task_id in self._known

    def submit(self, request: Request, sink: Sink) -> int:
        ticket = next(self._tickets)
        self._running[ticket] = asyncio.create_task(self._serve(ticket, request, sink))
        return ticket

    def publish(self, lora: LoraInput) -> None:
        """No effect: the first request with new content delivers it."""

    def cancel(self, ticket: int) -> None:
        """Cancel the stream; the request gets a last event. No effect for an unknown ticket."""
        if (task := self._running.get(ticket)) is not None:
            task.cancel()

    def stats(self) -> EngineStats:
        """The statistics known here. The server's own metrics port has the rest."""
        known, running = list(self._known)[-MAX_RESIDENTS:], len(self._begun)
        residents = tuple(Resident(str(task_id), 0, True) for task_id in known)
        # The capacity is unknown: assume that one more fits.
        adapters = AdapterStats(max_device_adapters=len(known) + 1, residents=residents)
        return EngineStats(waiting=len(self._running) - running, running=running, adapters=adapters)

    pins = loop = None

    def reset_prefix_cache(self, digest: str | None) -> None:
        reason = "The prefix cache is Triton's, which cannot be told to reset it: load its model again"
        raise ApiError(501, "not_supported", reason)

    def cache_map(self) -> None:
        """Triton does not report pages."""

    async def close(self) -> None:
        self._checking.cancel()
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._channel.close()

    async def _serve(self, ticket: int, request: Request, sink: Sink) -> None:
        reader, stream = AnswerReader(request), None
        try:
            if isinstance(request.lora, LoraMix):
                request = replace(request, lora=await self._bring(request.lora, request))
            if isinstance(request.lora, LoraInput) and request.lora.has_tensors:  # large: in a thread
                running = asyncio.get_running_loop()
                message = await running.run_in_executor(None, self._message, request)
            else:
                message = self._message(request)
            stream = self._stub.ModelStreamInfer(_only(message))
            async for response in stream:
                for event in reader.read(*_read(response)):
                    self._begun.add(ticket)
                    self._remember(request.lora)
                    sink(event)
                self._wake()
            if not reader.done:
                raise RequestError("Encountered an error in the engine: its answer was interrupted")
        except asyncio.CancelledError:
            if not reader.done:
                sink(Event(finish_reason=FinishReason.CANCELLED, last=True))
        except Exception as error:
            if not reader.done:
                sink(Event(finish_reason=FinishReason.ERROR, last=True, error=self._explain(error, request)))
        finally:
            if stream is not None:
                stream.cancel()  # no effect if it has ended
            self._running.pop(ticket, None)
            self._begun.discard(ticket)
            self._wake()

    async def _bring(self, lora: LoraMix, request: Request) -> LoraMix:
        """Send adapters with tensors first, each in a request for one token: a mix can only name task ids."""
        for one, _ in lora.members:
            if one.has_tensors:
                params = SamplingConfig(max_tokens=1)
                alone = Request(request.prompt[:1], params, one, request_id=request.request_id)
                message = await asyncio.get_running_loop().run_in_executor(None, self._message, alone)
                async for response in self._stub.ModelStreamInfer(_only(message)):
                    _read(response)
                self._remember(one)
        return lora.map(lambda one: LoraInput(one.task_id, name=one.name))

    def _message(self, request: Request) -> ModelInferRequest:
        """Tensors as bytes. This includes bfloat16, for which tritonclient has no array type."""
        message = ModelInferRequest(model_name=self.model.name, id=request.request_id)
        message.parameters[FINAL].bool_param = True
        for name, value in self.model.tensors(request).items():
            kind = "BF16" if value.dtype.kind == "V" else np_to_triton_dtype(value.dtype)
            message.inputs.add(name=name, datatype=kind, shape=value.shape)
            data = serialize_byte_tensor(value).item() if kind == "BYTES" else value.tobytes()
            message.raw_input_contents.append(data)
        return message

    def _remember(self, lora: LoraInput | LoraMix | None) -> None:
        for task_id in lora.task_ids if lora is not None else ():
            self._known[task_id] = None
            self._known.move_to_end(task_id)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _explain(self, error: Exception, request: Request) -> Exception:
        """Convert the server's error message to the exception that an engine in this process would raise."""
        if isinstance(error, ApiError | RequestError):
            return error
        text = _text_of(error)
        if "Please send LoRA weights" in text or "not found in cache" in text:
            ids = request.lora.task_ids if request.lora is not None else []
            missing = [one for one in ids if str(one) in re.findall(r"\d+", text)] or ids or [0]
            for task_id in missing:
                self._known.pop(task_id, None)
            return errors.AdapterNotCachedError(missing[0])
        if "queue size" in text:
            return queue_full()
        if "ache is full" in text:
            if "it needs" in text:  # from our model: it is larger than the whole cache
                return errors.AdapterCacheFullError(text)
            return adapter_cache_busy()
        if "Server is stopping" in text:
            return errors.DrainingError()
        if request.lora is not None and "not finite numbers" in text:
            return errors.AdapterNotFiniteError(text)
        if request.lora is not None and ADAPTER_FAULT.search(text):
            return errors.AdapterInvalidError(text)
        if isinstance(error, InferenceServerException):
            return RequestError(text)
        logger.warning("triton: %s", text)
        return ApiError(503, "engine_unavailable", "The engine does not answer, try again", retry_after=2)

    async def _check(self) -> None:
        while True:
            try:
                question = ModelReadyRequest(name=self.model.name)
                ready = (await self._stub.ModelReady(question, timeout=CHECK_S)).ready
            except grpc.RpcError:
                ready = False
            if ready != self.alive:
                logger.warning("triton: model %s is %s", self.model.name, "ready" if ready else "not ready")
            if not ready:
                self._known.clear()  # the model may restart with an empty cache
            self.alive = ready
            await asyncio.sleep(CHECK_S)


async def _only(message: ModelInferRequest) -> AsyncIterator[ModelInferRequest]:
    yield message


def _read(response: ModelStreamInferResponse) -> tuple[dict[str, np.ndarray], bool]:
    """The outputs, and whether this is the final response. Raises InferenceServerException."""
    if response.error_message:
        raise InferenceServerException(response.error_message)
    result = triton.InferResult(response.infer_response)
    tensors = {one.name: result.as_numpy(one.name) for one in response.infer_response.outputs}
    return tensors, response.infer_response.parameters["triton_final_response"].bool_param


def _text_of(error: Exception) -> str:
    """The error message for a client, without paths or stack traces of the server."""
    text = error.message() if isinstance(error, InferenceServerException) else None
    if isinstance(error, grpc.aio.AioRpcError):
        text = error.details()
    with contextlib.suppress(ValueError):  # some servers wrap their text in JSON
        found = json.loads(text or "")
        text = found.get("error", text) if isinstance(found, dict) else text
    return PATH.sub("…", " ".join(STACK.sub("", str(text or type(error).__name__)).split()))[:500]

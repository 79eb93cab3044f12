"""A stand-in for NVIDIA's `tensorrt_llm` model: its contract towards callers, with our engine to compute.

It keeps the adapters of the last `capacity` task ids; a request for another must bring tensors, and gets the
engine's error when it does not. Tensors for an id that it knows are ignored. Streamed responses hold new
tokens, the end id among them; no response says why a sequence ended. The last request is left in a file.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.config.engine import EngineConfig
from manylora.doors.triton.codec import decode_requests
from manylora.engine.loop import EngineLoop
from manylora.request import LoraInput, Request


class TritonPythonModel:
    def initialize(self, arguments: dict[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        values = {key: one["string_value"] for key, one in config["parameters"].items()}
        self._inputs = [one["name"] for one in config["input"]]
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._capacity, self._log = int(values["capacity"]), Path(values["log"])
        self._adapters: OrderedDict[int, LoraInput] = OrderedDict()
        self._sending = threading.Lock()
        self._loop = EngineLoop.start(EngineConfig(Path(values["gpt_model_path"]), device="cpu"))

    def finalize(self) -> None:
        self._loop.close(drain=False)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        answers = [self._serve(request) for request in requests]
        return None if self._decoupled else answers

    def _serve(self, request: Any) -> Any:
        arrays = {}
        for name in self._inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                arrays[name] = tensor.as_numpy()
        told = {name: [str(one.dtype), list(one.shape)] for name, one in arrays.items()}
        self._log.write_text(json.dumps(told), encoding="utf-8")
        for new, old in (("seed", "random_seed"), ("min_tokens", "min_length")):
            if new in arrays:
                arrays[old] = arrays.pop(new)
        sender = request.get_response_sender() if self._decoupled else None
        done, last = threading.Event(), []

        def sink(event: Any) -> None:
            response = self._response(event, made, arrays)
            if sender is not None:
                with self._sending:
                    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if event.last else 0
                    sender.send(response, flags=flags)
            if event.last:
                last.append(response)
                done.set()

        try:
            [decoded] = decode_requests(arrays, "", self._decoupled)
            made = self._with_adapter(decoded.request)
        except Exception as error:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            if sender is not None:
                with self._sending:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return response
        self._loop.submit(made, sink)
        if not self._decoupled:
            done.wait()
        return last[0] if last else None

    def _with_adapter(self, request: Request) -> Request:
        lora = request.lora
        if lora is None:
            return request
        task_id = lora.task_id
        if task_id not in self._adapters:
            if not lora.has_tensors:
                raise RuntimeError(
                    f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
                )
            copied = [np.array(one) for one in (lora.weights, lora.config)]
            self._adapters[task_id] = LoraInput(task_id, *copied)
            while len(self._adapters) > self._capacity:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(task_id)
        return Request(
            request.prompt, request.params, self._adapters[task_id], request.streaming, request.request_id
        )

    def _response(self, event: Any, request: Request, arrays: dict[str, np.ndarray]) -> Any:
        if event.error is not None:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(event.error)))
        ids = list(event.token_ids)
        if event.finish_reason == "stop" and request.params.end_id is not None:
            ids.append(request.params.end_id)
        tensors = {
            "output_ids": np.array([[ids]], np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if request.params.num_return_sequences > 1:
            tensors["sequence_index"] = np.array([[event.sequence_index]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, one) for name, one in tensors.items()])

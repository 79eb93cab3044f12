"""LlmapiModel: requests and responses of TensorRT-LLM's `llmapi` model."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import numpy as np

from manylora.adapters.catalog.files import AdapterFolders
from manylora.doors.triton.bls import ClientRequest, Values
from manylora.doors.triton.bls_worker import LastOutputs
from manylora.doors.triton.prompts import (
    Answer,
    PromptRequest,
    PromptRunner,
    named_mix,
    scalar,
    text_tensor,
    texts,
)
from manylora.doors.triton.server_types import Arrays, ServerRequest, check_parameters, refuse
from manylora.doors.triton.shape_guard import read_inputs
from manylora.doors.triton.tensor_table import DTYPES, LLMAPI
from manylora.errors import RequestCancelledError, RequestError
from manylora.generation.decoding import with_defaults
from manylora.generation.sampling import SamplingParams, parameters_of
from manylora.request import LoraInput, LoraMix

PREFIX = "sampling_param_"
FIELDS = ("best_of", "max_tokens", *(one.name for one in parameters_of("llmapi")))
ALONE = ("lora_id", "lora_name", "lora_path", "lora_ckpt_source")  # inputs that name one adapter
MAX_SAMPLES = 128
EXTRAS = ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob")
REUSED, TAKEN = "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"  # outputs of the engine
KINDS = {one.name: DTYPES[one.dtype] for one in LLMAPI.outputs}
RENAMED = {"kv_cache_reused_block": REUSED, "kv_cache_missed_block": TAKEN}


class LlmapiModel:
    """decoupled: whether answers may be streamed."""

    def __init__(self, runner: PromptRunner, folders: AdapterFolders, decoupled: bool) -> None:
        self._runner, self._folders, self._decoupled = runner, folders, decoupled
        self._lock = Lock()
        self._open: set[tuple[str, ClientRequest]] = set()  # with the client's own id

    def answer(self, client: ClientRequest, request: ServerRequest) -> Iterator[Values]:
        check_parameters(request.parameters())
        arrays, name = read_inputs(request.inputs()), request.request_id()
        if scalar(arrays, "stop", False):
            if not name:
                raise RequestError("A request id must be provided for request cancellation")
            with self._lock:
                for other, open_client in self._open:
                    if other == name:  # its generation is stopped; the output so far is the answer
                        open_client.abandoned = True
            raise RequestCancelledError("Request cancelled by client")
        try:
            asked, prompt = self._asked(arrays)
            extras = {extra for extra in EXTRAS if scalar(arrays, extra, False)}
            with self._lock:
                self._open.add((name, client))  # it can be stopped by its id
            for answer in self._runner.answers(client, asked):
                found = _response(answer, asked, extras, prompt)
                yield LastOutputs(found) if answer.finished else found
        except RequestError as error:
            raise RequestError(f"Error generating request: {error}") from None
        finally:
            with self._lock:
                self._open.discard((name, client))

    def _asked(self, arrays: Arrays) -> tuple[PromptRequest, str]:
        refuse(arrays, "image_url", f"{PREFIX}logits_post_processor_name")
        text, streaming = scalar(arrays, "text_input"), bool(scalar(arrays, "streaming", False))
        if streaming and not self._decoupled:
            raise RequestError("Streaming is only supported in decoupled mode.")
        given = {name: scalar(arrays, PREFIX + name) for name in FIELDS if PREFIX + name in arrays}
        samples = given.get("best_of", 1)
        if samples > MAX_SAMPLES:
            raise RequestError(f"{PREFIX}best_of must be at most {MAX_SAMPLES}, got {samples}")
        cumulative, lora = bool(scalar(arrays, "return_cumulative_logprob", False)), self._lora(arrays)
        try:
            params = SamplingParams(
                **given, stop=texts(arrays, f"{PREFIX}stop") or None, logprobs=0 if cumulative else None
            )
            defaults = self._runner.text_of(lora).defaults
            params = with_defaults(params, defaults, own_length="max_tokens" in given)
        except (ValueError, TypeError) as error:
            raise RequestError(str(error)) from None
        statistics = bool(scalar(arrays, f"{PREFIX}return_perf_metrics", False))
        made = PromptRequest(text, params, lora, streaming, statistics=statistics)
        exclude = streaming or scalar(arrays, f"{PREFIX}exclude_input_from_output", False)
        return made, "" if exclude else text

    def _lora(self, arrays: Arrays) -> LoraInput | LoraMix | None:
        if "lora_mix_names" in arrays or "lora_mix_scales" in arrays:
            others = [name for name in ALONE if name in arrays]
            if others:
                raise RequestError(f"lora_mix_names stand alone: leave {', '.join(others)} out")
            names = texts(arrays, "lora_mix_names") or None
            scales = arrays["lora_mix_scales"].reshape(-1).tolist() if "lora_mix_scales" in arrays else None
            return named_mix(names, scales, "lora_mix_names")
        task_id, name, path = (scalar(arrays, f"lora_{part}") for part in ("id", "name", "path"))
        source = scalar(arrays, "lora_ckpt_source")
        if source not in (None, "hf", "nemo"):
            raise RequestError(f"lora_ckpt_source must be one of ('hf', 'nemo'), got {source[:40]!r}")
        if source is not None and name is None and path is None:
            raise RequestError("lora_ckpt_source goes with lora_name or lora_path: send one, or leave it out")
        if path is not None:
            name = self._folders.name_of(path)
            if name is None:
                raise RequestError(
                    f"lora_path {path[:200]!r} is no folder of this server's adapters: leave it out and send "
                    "lora_name, or have the folder put into lora_catalog_dir or multi_lora.json"
                )
        if name is not None:
            return LoraInput(None, name=name, source=source)
        return None if task_id is None else LoraInput(task_id)


def _response(answer: Answer, asked: PromptRequest, extras: set[str], prompt: str) -> dict[str, np.ndarray]:
    """Every response has the whole text so far."""
    outputs = answer.outputs
    found = {"text_output": text_tensor(prompt + one.text for one in outputs)}
    if "return_finish_reason" in extras:
        found["finish_reason"] = text_tensor(str(one.finish_reason) for one in outputs)
    if "return_stop_reason" in extras:
        found["stop_reason"] = text_tensor(str(one.stop_reason) for one in outputs)
    if "return_cumulative_logprob" in extras:
        found["cumulative_logprob"] = np.array([one.cumulative_logprob for one in outputs], np.float32)
    if asked.statistics and answer.finished and (engine := answer.statistics):
        sources = {name: name for name in engine if name != REUSED} | RENAMED
        for name, source in sources.items():
            found[name] = np.array([engine[source]], KINDS[name])
        reused, missed = engine[REUSED], engine[TAKEN]
        found["kv_cache_hit_rate"] = np.array([reused / max(1, reused + missed)], np.float32)
    return found

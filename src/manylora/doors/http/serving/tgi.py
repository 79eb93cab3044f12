"""TGI's and LoRAX's API: /generate, /generate_stream, POST / and /info."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.doors.http.api import logprobs
from manylora.doors.http.api.errors import ApiError, renamed
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.api.schema import AdapterFields
from manylora.doors.http.api.tgi_request import (
    MAX_STOPS,
    NAMES,
    TgiRequest,
    adapter_fields,
    completion_request,
)
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.responses import Answers, ResponseBuilder, encode, versions_of
from manylora.generation.generation import Generation
from manylora.generation.outputs import CompletionOutput, TokenLogprob
from manylora.version import __version__

PATHS = ("/generate", "/generate_stream", "/info")


class TgiApi:
    """The methods raise ApiError."""

    def __init__(self, inference: Inference, max_waiting: int) -> None:
        self._inference, self._max_waiting = inference, max_waiting

        self.generate_stream = partial(self.generate, stream=True)
        self.compat = partial(self.generate, as_list=True)  # POST /, which clients of TGI use

    async def info(self, request: Request, key: ApiKey) -> Response:
        inference = self._inference
        most = inference.limits.max_seq_len
        found = {
            "model_id": inference.bases[0],
            "model_sha": None,
            "model_dtype": f"torch.{inference.model.dtype}",
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": self._max_waiting,
            "max_best_of": min(128, inference.limits.max_samples),
            "max_stop_sequences": MAX_STOPS,
            "max_input_length": most - 1,
            "max_input_tokens": most - 1,
            "max_total_tokens": most,
            "router": "manylora",
            "version": __version__,
        }
        return JSONResponse(found)

    async def generate(
        self, request: Request, body: TgiRequest, key: ApiKey, *, stream: bool = False, as_list: bool = False
    ) -> Response:
        """stream: whatever the body says. as_list: a complete answer is in a list."""
        inference, given = self._inference, body.parameters
        adapters = adapter_fields(given, inference.bases[0])
        try:
            asked = await inference.ask(validate(adapters, AdapterFields), key)
            ids = await asked.prompts.encode(body.inputs, True, "prompt", given.truncate is None)
            ids = ids[-given.truncate :] if given.truncate else ids
            ends = asked.end_ids(inference.model)
            completion = completion_request(
                body, adapters, ids, inference.room(len(ids)), ends, stream or body.stream
            )
            seed = completion.seed if given.samples else None
            build = partial(TgiAnswer, body, seed, as_list)
            return await inference.complete(request, completion, key, build, asked)
        except ApiError as error:
            raise renamed(error, NAMES) from error


class TgiAnswer(ResponseBuilder):
    """asked: the body. seed: None for greedy decoding. as_list: a complete answer is in a list."""

    def __init__(self, asked: TgiRequest, seed: int | None, as_list: bool, answers: Answers) -> None:
        super().__init__(answers)
        self._asked, self._seed, self._as_list = asked, seed, as_list
        self._special = answers.tokenizer.is_special
        self._stream = answers.tokenizer.stream(False)
        self._sent = 0

    def body(self) -> Any:
        generation = self.generations[0]
        outputs = generation.report()
        if len(outputs) > 1:  # as TGI: the best on average
            outputs.sort(key=lambda one: -(one.cumulative_logprob or 0.0) / max(1, one.length))
        found: dict[str, Any] = {"generated_text": self._text(outputs[0])}
        if self._asked.parameters.details:
            details = [self._output_details(generation, one) for one in outputs]
            if others := list(zip(outputs, details, strict=True))[1:]:
                details[0]["best_of_sequences"] = [
                    {"generated_text": self._text(one), **more} for one, more in others
                ]
            found["details"] = details[0]
        return [found] if self._as_list else found

    def new_events(self) -> bytes:
        """An event for each token; that of the last one has the whole text."""
        generation = self.generations[0]
        output = generation.streamed_outputs[0]
        if len(output.token_ids) == self._sent and output.finish_reason is None:
            return b""
        report = output.report(0, generation.decoding.logprobs, False)
        tokens = logprobs.output_logprobs(report, generation.alternatives(0), self._sent)
        if report.finish_reason is not None and not tokens:  # it ended without a further token
            tokens = [TokenLogprob(generation.decoding.params.end_id or 0, 0.0)]
            texts = [""]
        else:
            texts = self._texts(tokens, report.finish_reason is not None)
        events = []
        for number, (one, text) in enumerate(zip(tokens, texts, strict=True), 1):
            event: dict[str, Any] = {
                "index": self._sent + number,
                "token": self._token(one.token_id, one.logprob or 0.0, text),
            }
            if self._asked.parameters.top_n_tokens:
                event["top_tokens"] = self._others(one)
            event |= {"generated_text": None, "details": None}
            if report.finish_reason is not None and number == len(tokens):
                event |= {"generated_text": self._text(report), "details": self._summary(generation, report)}
            events.append(f"data:{encode(event)}\n\n")
        self._sent += len(tokens)
        return "".join(events).encode()

    def last_events(self, usage: bool) -> bytes:
        return b""

    def error_events(self, error: ApiError) -> bytes:
        return b"data:" + error_response(error).body + b"\n\n"

    def _text(self, output: CompletionOutput) -> str:
        return self._asked.inputs + output.text if self._asked.parameters.return_full_text else output.text

    def _texts(self, tokens: Sequence[TokenLogprob], final: bool) -> list[str]:
        """Of tokens that follow those before. A token within a character has none."""
        last = len(tokens) - 1
        return [
            self._tokenizer.decode([one.token_id], False)
            if self._special(one.token_id)
            else self._stream.add([one.token_id], final and at == last)
            for at, one in enumerate(tokens)
        ]

    def _others(self, one: TokenLogprob) -> list[dict[str, Any]]:
        return [self._token(i, value, self._tokenizer.decode([i], False)) for i, value in one.top]

    def _token(self, token_id: int, logprob: float, text: str) -> dict[str, Any]:
        return {"id": token_id, "text": text, "logprob": logprob, "special": self._special(token_id)}

    def _output_details(self, generation: Generation, output: CompletionOutput) -> dict[str, Any]:
        known = logprobs.output_logprobs(output, generation.alternatives(output.index))
        self._stream = self._tokenizer.stream(False)
        texts = self._texts(known, True)
        tokens = [
            self._token(one.token_id, one.logprob or 0.0, text)
            for one, text in zip(known, texts, strict=True)
        ]
        prefill: list[dict[str, Any]] = []
        if generation.decoding.prompt_top is not None and generation.context_logits is not None:
            for one in logprobs.prompt_logprobs(generation.prompt, generation.context_logits, 0):
                text = self._tokenizer.decode([one.token_id], False)
                prefill.append({"id": one.token_id, "text": text, "logprob": one.logprob})
        found = {**self._summary(generation, output), "prefill": prefill, "tokens": tokens}
        if self._asked.parameters.top_n_tokens:
            found["top_tokens"] = [self._others(one) for one in known]
        return found

    def _summary(self, generation: Generation, output: CompletionOutput) -> dict[str, Any]:
        reason = output.finish_reason
        if reason == "stop":
            reason = "stop_sequence" if isinstance(output.stop_reason, str) else "eos_token"
        count = len(generation.prompt)
        return {
            "finish_reason": reason,
            "generated_tokens": output.length,
            "seed": self._seed,
            "prompt_tokens": count,  # LoRAX's name
            "input_length": count,
            **versions_of(output),
        }


def error_response(error: ApiError) -> JSONResponse:
    """With TGI's status and type."""
    error, kind = renamed(error, NAMES), error.code
    status = {400: 422, 500: 424}.get(error.status, error.status)
    if status in (413, 415, 422):
        kind = "validation"
    elif status == 429:
        kind = "overloaded"
    elif status == 424 or status > 500:
        kind = "generation"
    return JSONResponse({"error": error.message, "error_type": kind}, status, headers=error.headers)

"""llgtrt's /v1/run: an answer constrained by a grammar, as its events."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from manylora.openai.api.errors import ApiError, renamed
from manylora.openai.api.run_request import NAMES, RunRequest, generation_request
from manylora.openai.api.schema import ChatRequest
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.responses import ChatResponse, encode


async def run(inference: Inference, request: Request, body: RunRequest, key: ApiKey) -> Response:
    """Raises ApiError."""
    try:
        asked = generation_request(body)
        if isinstance(asked, ChatRequest):
            return await inference.chat(request, asked, key, RunAnswer)
        return await inference.complete(request, asked, key, RunAnswer)
    except ApiError as error:
        raise renamed(error, NAMES) from error


class RunAnswer(ChatResponse):
    """Each output is a fork; there is only one. llguidance's logs are not returned: `logs` is empty."""

    prefix = "run"

    def first_events(self) -> bytes:
        common = {name: self._common[name] for name in ("created", "model")}
        return f"data: {encode({'id': self.id, 'object': 'initial-run', **common})}\n\n".encode()

    def error_events(self, error: ApiError) -> bytes:
        return super().error_events(renamed(error, NAMES))

    def _text_delta(self, index: int, text: str) -> str:
        return self._fork(index, json.loads(text), {})

    def _event(self, choice: str, more: str = "") -> str:
        return choice  # `_text_delta` has already made it an event

    def _choice_event(self, choice: dict[str, Any]) -> str:
        reason = choice.get("finish_reason")
        ending = {} if reason is None else {"finish_reason": reason}
        return self._fork(choice["index"], choice["delta"].get("content") or "", ending)

    def _fork(self, index: int, text: str, ending: dict[str, Any]) -> str:
        usage = self._usage(sum(self._tokens_sent.values()))
        sampled, total = usage["completion_tokens"], usage["total_tokens"]
        fork = {"index": index, **ending, "text": text, "error": "", "logs": "", "storage": [], "micros": 0}
        told = {
            "object": "run",
            "forks": [{**fork, "logprobs": None}],
            "usage": {"sampled_tokens": sampled, "ff_tokens": total, "cost": 2 * sampled + total},
        }
        return f"data: {encode(told)}\n\n"

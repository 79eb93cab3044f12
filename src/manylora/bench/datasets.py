"""Datasets of requests: JSON Lines, one request per line, with trtllm-bench's fields."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.llmapi.lora import LoRARequest

UNSUPPORTED = ("turns", "media_paths")


@dataclass(frozen=True)
class BenchRequest:
    """One line. task_id: the request's number, not the adapter's. prompt: not used where input_ids are given.
    output_tokens: to generate. lora: None is the base model."""

    task_id: int
    prompt: str | None
    input_ids: tuple[int, ...] | None
    output_tokens: int
    lora: LoRARequest | None = None


def read_dataset(path: Path, num_requests: int = 0) -> list[BenchRequest]:
    """The first num_requests lines; 0: all. Raises ConfigError with the number of a wrong line, also for a
    lora_path that does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset {path} cannot be read: {error.strerror}") from error
    found: list[BenchRequest] = []
    for number, line in enumerate(lines, 1):
        if num_requests and len(found) == num_requests:
            break
        if line.strip():
            try:
                found.append(_request(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"--dataset {path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"--dataset {path} holds no request")
    if len(found) < num_requests:
        raise ConfigError(f"--dataset {path} holds {len(found)} requests, fewer than --num_requests")
    return found


def write_dataset(path: Path, requests: Iterable[BenchRequest]) -> None:
    path.write_text("".join(f"{to_line(request)}\n" for request in requests), encoding="utf-8")


def to_line(request: BenchRequest) -> str:
    entry: dict[str, Any] = {"task_id": request.task_id}
    if request.input_ids is not None:
        entry["input_ids"] = list(request.input_ids)
    else:
        entry["prompt"] = request.prompt
    entry["output_tokens"] = request.output_tokens
    if request.lora is not None:
        lora = request.lora
        entry["lora_request"] = {
            "lora_name": lora.lora_name,
            "lora_int_id": lora.lora_int_id,
            "lora_path": lora.lora_path,
        }
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def adapters_of(requests: Iterable[BenchRequest]) -> list[LoRARequest]:
    """The distinct adapters, in order of first use."""
    return list({r.lora.lora_int_id: r.lora for r in requests if r.lora is not None}.values())


def with_adapters(
    requests: Iterable[BenchRequest], adapters: Iterable[LoRARequest | None]
) -> list[BenchRequest]:
    """The same requests with other adapters, one for each request."""
    return [replace(r, lora=lora) for r, lora in zip(requests, adapters, strict=True)]


def _request(entry: Any) -> BenchRequest:
    if not isinstance(entry, dict):
        raise ValueError("a line must be a JSON object")
    task_id = entry.get("task_id", -1)
    for name in UNSUPPORTED:
        if entry.get(name):
            raise ValueError(f"{name} is not supported")
    prompt, ids = entry.get("prompt"), entry.get("input_ids", entry.get("logits"))
    if prompt is None and ids is None:
        raise ValueError(f"prompt, input_ids, and turns for task {task_id} are all None.")
    output_tokens = entry.get("output_tokens")
    if not isinstance(output_tokens, int) or output_tokens < 1:
        raise ValueError(f"output_tokens must be a number of tokens, at least 1, got {output_tokens!r}")
    if ids is not None and not (ids and all(isinstance(token, int) for token in ids)):
        raise ValueError("input_ids must be a list of token ids")
    lora = entry.get("lora_request")
    return BenchRequest(
        task_id=int(task_id),
        prompt=prompt,
        input_ids=None if ids is None else tuple(ids),
        output_tokens=output_tokens,
        lora=LoRARequest(**{"lora_path": "", **lora}) if lora else None,
    )

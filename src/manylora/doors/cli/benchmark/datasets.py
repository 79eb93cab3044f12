"""Datasets of requests: JSON Lines with trtllm-bench's fields, one request per line; and random datasets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from manylora.doors.python.lora import LoRARequest
from manylora.errors import ConfigError

T = TypeVar("T")
Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""

UNSUPPORTED = ("turns", "media_paths")
POPULARITIES = ("distinct", "uniform", "zipf", "identical")


@dataclass(frozen=True)
class BenchRequest:
    """task_id: the request's number, not the adapter's. prompt: unused if input_ids are given."""

    task_id: int
    prompt: str | None
    input_ids: tuple[int, ...] | None
    output_tokens: int
    lora: LoRARequest | None = None


def read_dataset(path: Path, num_requests: int = 0) -> list[BenchRequest]:
    """The first num_requests lines; 0: all. Raises ConfigError, also for a lora_path that does not exist."""
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
            except json.JSONDecodeError as error:
                text = f"--dataset {path}, line {number} is not JSON ({error.msg}): each line is one request"
                raise ConfigError(text) from error
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
    ids, prompt = request.input_ids, {"prompt": request.prompt}
    given: dict[str, Any] = prompt if ids is None else {"input_ids": list(ids)}
    entry = {"task_id": request.task_id, **given, "output_tokens": request.output_tokens}
    if (lora := request.lora) is not None:
        names = ("lora_name", "lora_int_id", "lora_path")
        entry["lora_request"] = {name: getattr(lora, name) for name in names}
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def adapters_of(requests: Iterable[BenchRequest]) -> list[LoRARequest]:
    """The distinct adapters, in order of first use."""
    return list({r.lora.lora_int_id: r.lora for r in requests if r.lora is not None}.values())


def with_adapters(
    requests: Iterable[BenchRequest], adapters: Iterable[LoRARequest | None]
) -> list[BenchRequest]:
    """The same requests with other adapters, one per request."""
    return [replace(r, lora=lora) for r, lora in zip(requests, adapters, strict=True)]


def spread(popularity: str, adapters: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """An adapter for each of `count` requests. distinct: round robin. zipf: the k-th weighs k ** -1.5."""
    if popularity not in POPULARITIES:
        raise ValueError(f"popularity must be one of {', '.join(POPULARITIES)}, got {popularity!r}")
    if popularity in ("distinct", "identical"):
        return [adapters[i % len(adapters) if popularity == "distinct" else 0] for i in range(count)]
    weights = [(k + 1) ** -1.5 for k in range(len(adapters))] if popularity == "zipf" else None
    return rng.choices(adapters, weights, k=count)


def normal_lengths(mean: float, stdev: float) -> Lengths:
    """Lengths in tokens, at least 1."""
    return lambda rng: max(1, round(rng.gauss(mean, stdev)))


def uniform_lengths(low: int, high: int) -> Lengths:
    """Lengths in tokens, both ends included."""
    return lambda rng: rng.randint(low, high)


def random_requests(
    count: int,
    input_len: Lengths,
    output_len: Lengths,
    vocab_size: int,
    rng: random.Random,
    adapters: Sequence[LoRARequest | None] = (None,),
    popularity: str = "uniform",
) -> list[BenchRequest]:
    chosen = spread(popularity, adapters, count, rng)
    return [
        BenchRequest(
            task_id=number,
            prompt=None,
            input_ids=tuple(rng.randrange(vocab_size) for _ in range(input_len(rng))),
            output_tokens=output_len(rng),
            lora=lora,
        )
        for number, lora in enumerate(chosen)
    ]


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

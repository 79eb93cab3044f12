"""The options of one benchmark run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BenchOptions:
    """model_dir: a Hugging Face directory; None only with an endpoint. llm: arguments of `LLM`.

    sampling: fields of SamplingParams for every request. concurrency: 0 is no limit. request_rate: of an open
    loop, in requests per second; None: a closed loop. popularity, num_adapters: assign adapters anew, from
    the subfolders of lora_dir or else from the dataset, once for each number. compare_base: also run without
    adapters.
    """

    model: str
    model_dir: Path | None
    dataset: Path
    llm: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    endpoint: str | None = None
    num_requests: int = 0
    warmup: int = 2
    concurrency: int = 0
    streaming: bool = False
    request_rate: float | None = None
    popularity: str | None = None
    num_adapters: tuple[int, ...] = ()
    lora_dir: Path | None = None
    compare_base: bool = False
    keep_text: bool = False
    seed: int = 420

"""The system under test: an LLM in this process, or a running server."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from manylora.bench.datasets import BenchRequest, adapters_of
from manylora.bench.load import Record, Sample, Target, poisson_arrivals, run_load
from manylora.bench.options import BenchOptions
from manylora.stats import AdapterStats


def open_system(options: BenchOptions, requests: list[BenchRequest], stack: ExitStack) -> SystemUnderTest:
    """Open the system that the options name. The stack closes it. Raises ConfigError."""
    return _RemoteSystem(options, stack) if options.endpoint else _LocalSystem(options, requests, stack)


class SystemUnderTest:
    """A target, and facts about it for the report.

    facts: for the report's sections `engine` and `world_info`, and the device, if known.
    """

    target: Target
    facts: dict[str, Any]

    def run(self, requests: list[BenchRequest], options: BenchOptions) -> tuple[list[Record], list[Sample]]:
        return _load(self.target, requests, options), []

    def cache(self) -> AdapterStats | None:
        return None

    def ideal_ratio(self, requests: Sequence[BenchRequest], samples: Sequence[Sample]) -> dict[str, Any]:
        return {"ideal": None}


class _LocalSystem(SystemUnderTest):
    def __init__(self, options: BenchOptions, requests: list[BenchRequest], stack: ExitStack) -> None:
        from manylora.bench import local

        assert options.model_dir is not None
        needs_tokenizer = options.keep_text or any(r.input_ids is None for r in requests)
        has_adapters = any(r.lora for r in requests) or options.lora_dir is not None
        self._model_dir, self._local = options.model_dir, local
        self._llm, self.facts = local.open_llm(options.model_dir, options.llm, needs_tokenizer, has_adapters)
        stack.enter_context(self._llm)
        self.target = local.LocalTarget(self._llm, options.streaming, options.sampling)

    def run(self, requests: list[BenchRequest], options: BenchOptions) -> tuple[list[Record], list[Sample]]:
        with self._local.Sampler(self._llm) as sampler:
            return _load(self.target, requests, options), sampler.samples

    def cache(self) -> AdapterStats | None:
        return self._llm.stats().adapters

    def ideal_ratio(self, requests: Sequence[BenchRequest], samples: Sequence[Sample]) -> dict[str, Any]:
        from manylora.bench.memory_traffic import adapter_bytes, mean_traffic

        adapters, element_bytes = adapters_of(requests), self.facts["element_bytes"]
        traffic = mean_traffic(samples, adapter_bytes(adapters, self._model_dir, element_bytes))
        if traffic is None:
            return {"ideal": None}
        return {"ideal": traffic.ideal_ratio, "adapters_in_batch": traffic.adapters_in_batch}


class _RemoteSystem(SystemUnderTest):
    def __init__(self, options: BenchOptions, stack: ExitStack) -> None:
        from manylora.bench.openai_endpoint import OpenAiTarget
        from manylora.bench.triton_endpoint import TritonTarget
        from manylora.text.tokenizer import Tokenizer

        assert options.endpoint is not None
        self.facts = {"engine": {"endpoint": options.endpoint}}
        common: dict[str, Any] = {"streaming": options.streaming, "sampling": options.sampling}
        target: TritonTarget | OpenAiTarget
        if options.endpoint.startswith(("http://", "https://")):
            target = OpenAiTarget(options.endpoint, options.concurrency, **common)
        else:
            encode = Tokenizer(options.model_dir).encode if options.model_dir else None
            target = TritonTarget(options.endpoint, options.concurrency, encode=encode, **common)
        self.target = target
        stack.callback(target.close)


def _load(target: Target, requests: list[BenchRequest], options: BenchOptions) -> list[Record]:
    arrivals = None
    if options.request_rate:
        arrivals = poisson_arrivals(len(requests), options.request_rate, random.Random(options.seed))
    with _progress(len(requests)) as advance:
        return asyncio.run(
            run_load(target, requests, concurrency=options.concurrency, arrivals=arrivals, on_done=advance)
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Record], None]]:
    """Yields a function that advances the progress bar. The bar is shown on a terminal if tqdm is
    installed.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda record: None
        return
    with tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=None) as bar:
        yield lambda record: bar.update()

"""LocalTarget: an LLM in this process under load, with samples of its engine's statistics."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from manylora.bench.datasets import BenchRequest
from manylora.bench.load import Answer, Sample
from manylora.config.build_record import weights_algo
from manylora.config.engine import EngineConfig
from manylora.kernels.device import open_device
from manylora.llmapi import LLM, LoraConfig, RequestOutput, SamplingParams
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import compute_dtype

PERIOD_S = 0.02


class LocalTarget:
    """streaming: take each step's tokens as they arrive. sampling: fields of SamplingParams."""

    def __init__(self, llm: LLM, streaming: bool, sampling: dict[str, Any]) -> None:
        self._llm, self._streaming, self._sampling = llm, streaming, sampling

    async def send(self, request: BenchRequest) -> Answer:
        params = SamplingParams(**{**self._sampling, "max_tokens": request.output_tokens})
        prompt = request.prompt if request.input_ids is None else request.input_ids
        assert prompt is not None
        result = self._llm.generate_async(prompt, params, request.lora, self._streaming)
        first: float | None = None
        if self._streaming:
            async for piece in result:
                if first is None and piece.outputs[0].token_ids:
                    first = time.monotonic()
        return _answer(await result, first)


class Sampler:
    """A context manager that samples the engine's statistics every PERIOD_S seconds."""

    def __init__(self, llm: LLM) -> None:
        self.samples: list[Sample] = []
        self._llm = llm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            going = not self._stop.wait(PERIOD_S)
            self.samples.append((time.monotonic(), self._llm.stats()))


def open_llm(
    model_dir: Path, arguments: dict[str, Any], tokenizer: bool, adapters: bool
) -> tuple[LLM, dict[str, Any]]:
    """An LLM for a benchmark, and facts about it for the report.

    With adapters but no lora_config, every module is a target. Raises ConfigError.
    """
    settings = {"skip_tokenizer_init": not tokenizer, **arguments}
    if adapters:
        settings.setdefault("lora_config", LoraConfig())
    llm = LLM(model_dir, **settings)
    config, device = llm.config, open_device(llm.config.device)
    dtype = compute_dtype(config.dtype, read_model_config(model_dir), device)
    name = str(dtype).removeprefix("torch.")
    return llm, {
        "engine": {"dtype": name, **_quantisation(config, name)},
        "element_bytes": dtype.itemsize,
        "device": device.name,
        "world": {
            "tp_size": config.tensor_parallel_size,
            "pp_size": config.pipeline_parallel_size,
            "ep_size": config.moe_expert_parallel_size,
            "world_size": config.world_size,
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.max_num_tokens,
            "scheduling_policy": config.batch_scheduler_policy,
            "kv_cache_percentage": 100 * config.kv_cache_free_gpu_mem_fraction,
        },
    }


def _quantisation(config: EngineConfig, dtype: str) -> dict[str, Any]:
    quant = config.quant
    fp8_kv = quant is not None and quant.fp8_kv_cache
    algo = weights_algo(config.model_dir, quant)
    return {"kv_cache_dtype": "fp8" if fp8_kv else dtype, "quantization": algo}


def _answer(output: RequestOutput, first: float | None) -> Answer:
    metrics, one = output.metrics, output.outputs[0]
    if first is None and metrics is not None and metrics.first_token_ns:
        first = metrics.first_token_ns * 1e-9
    return Answer(
        first_token=first,
        num_input_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(one.token_ids),
        token_ids=tuple(one.token_ids),
        text=one.text or None,
        adapter_tier=output.adapter_tier,
    )

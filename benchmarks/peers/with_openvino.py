"""OpenVINO GenAI's continuous batching. optimum-intel converts the model once. It runs in a separate process,
so that its memory does not count as the engine's.

Each adapter has its own call, because (2026.4.1) `generate` applies the adapter of the first request to all
requests of a call, and `add_request` with `step` refuses adapters per request. All requests of a call run at
once: `max_num_seqs` has an effect only if prompts are not split (`dynamic_split_fuse=False`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from worker import Setup, serve

ALPHA = 2.0  # lora_alpha / rank of the benchmark's adapters


class OpenVino:
    def __init__(self, setup: Setup) -> None:
        path = Path(setup.kept) / f"openvino-{setup.dtype}"
        if not path.exists():
            command = [sys.executable, __file__, setup.model, str(path), setup.dtype]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_seqs = setup.at_once
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        has_bfloat16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        hint = "bf16" if has_bfloat16 and setup.dtype != "float32" else "f32"
        options = {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": hint,
            "INFERENCE_NUM_THREADS": setup.threads,
        }
        self._adapters = [genai.Adapter(str(Path(p) / "adapter_model.safetensors")) for p in setup.adapters]
        if self._adapters:
            config = genai.AdapterConfig(genai.AdapterConfig.Mode.MODE_DYNAMIC)
            for adapter in self._adapters:
                config.add(adapter, ALPHA)
            options["adapters"] = config
        self._pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", options)

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for adapter in dict.fromkeys(adapters):
            places = [n for n, chosen in enumerate(adapters) if chosen == adapter]
            config = self._config(adapter, tokens)
            ids = [openvino.Tensor(np.array([prompts[n]], np.int64)) for n in places]
            results = self._pipeline.generate(ids, [config] * len(ids))
            for n, result in zip(places, results, strict=True):
                found[n] = list(result.m_generation_ids[0])
        return found

    def _config(self, adapter: int | None, tokens: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._adapters:
            chosen = genai.AdapterConfig()
            if adapter is not None:
                chosen.add(self._adapters[adapter], ALPHA)
            config.adapters = chosen
        return config


def _convert(model: str, path: Path, dtype: str) -> None:
    """Convert a model. int8 has a scale per output, int4 a scale and an offset per 128 inputs. The precision
    of the computation is chosen when the model is loaded."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    weights = {
        "int8": OVWeightQuantizationConfig(bits=8, sym=True),
        "int4": OVWeightQuantizationConfig(bits=4, sym=False, group_size=128, ratio=1.0),
    }.get(dtype)
    config = None if weights is None else OVConfig(quantization_config=weights)
    made = path.with_name(f"{path.name}.part")
    main_export(
        model, output=made, task="text-generation-with-past", ov_config=config, convert_tokenizer=False
    )
    made.rename(path)


if __name__ == "__main__" and len(sys.argv) > 1:
    _convert(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
elif __name__ == "__main__":
    serve(OpenVino, lambda: {"openvino": openvino.__version__, "openvino_genai": genai.__version__})

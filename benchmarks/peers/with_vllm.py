"""vLLM's CPU build, in one process, with enforce_eager: with LoRA, its compiler made nothing faster."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.lora.request import LoRARequest
from worker import Setup, serve


class Vllm:
    def __init__(self, setup: Setup) -> None:
        self._adapters = setup.adapters
        lora = {}
        if setup.adapters:
            count = len(setup.adapters)
            rank = max(8, setup.rank)  # the smallest max_lora_rank that vLLM accepts
            lora = {
                "enable_lora": True,
                "max_loras": count,
                "max_cpu_loras": count,
                "max_lora_rank": rank,
            }
        self._llm = vllm.LLM(
            model=setup.model, dtype=setup.dtype, max_model_len=setup.length, max_num_seqs=setup.at_once,
            max_num_batched_tokens=2048, enable_prefix_caching=False, enforce_eager=True, **lora,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        requests = [None if i is None else LoRARequest(str(i), i + 1, self._adapters[i]) for i in adapters]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(
            inputs, params, use_tqdm=False, lora_request=requests if self._adapters else None
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm, lambda: {"vllm": vllm.__version__, "torch": torch.__version__})

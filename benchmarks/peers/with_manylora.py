"""manylora, by its LLM."""

from __future__ import annotations

import torch
from worker import Setup, serve

import manylora
from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, SamplingParams


class Manylora:
    def __init__(self, setup: Setup) -> None:
        self._adapters = setup.adapters
        count = len(setup.adapters)
        room, rank = max(1, count), max(1, setup.rank)
        first = setup.adapters[:1]  # says the modules
        lora = LoraConfig(first, max_lora_rank=rank, max_loras=room, max_cpu_loras=room)
        self._llm = LLM(
            setup.model, device="cpu", skip_tokenizer_init=True, lora_config=lora if count else None,
            kv_cache_config=KvCacheConfig(enable_block_reuse=False), max_batch_size=setup.at_once,
            max_seq_len=setup.length,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        requests = [None if i is None else LoRARequest(str(i), i + 1, self._adapters[i]) for i in adapters]
        params = SamplingParams(max_tokens=tokens, end_id=-1)
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Manylora, lambda: {"manylora": manylora.__version__, "torch": torch.__version__})

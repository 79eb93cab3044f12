"""manylora, through its `LLM` class."""

from __future__ import annotations

import torch
from worker import Setup, serve

import manylora
from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, QuantConfig, SamplingParams

# The first one that this version of manylora has is used. W8A8 and W4A8 also quantise activations, like the
# peers.
QUANT = {"int8": ("W8A8", "W8A16"), "int4": ("W4A8", "W4A16")}


class Manylora:
    def __init__(self, setup: Setup) -> None:
        self._adapters = setup.adapters
        count = len(setup.adapters)
        room, rank = max(1, count), max(1, setup.rank)
        first = setup.adapters[:1]  # determines the target modules
        lora = LoraConfig(first, max_lora_rank=rank, max_loras=room, max_cpu_loras=room)
        quant = _quant(setup.dtype)
        self.details = {} if quant is None else {f"quant_algo for {setup.dtype}": str(quant.quant_algo)}
        self._llm = LLM(
            setup.model, device="cpu", skip_tokenizer_init=True, lora_config=lora if count else None,
            kv_cache_config=KvCacheConfig(enable_block_reuse=False), max_batch_size=setup.at_once,
            max_seq_len=setup.length, quant_config=quant,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        requests = [self._request(i) for i in adapters]
        params = SamplingParams(max_tokens=tokens, end_id=-1)
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _request(self, adapter: int | None) -> LoRARequest | None:
        if adapter is None:
            return None
        return LoRARequest(str(adapter), adapter + 1, self._adapters[adapter])


def _quant(dtype: str) -> QuantConfig | None:
    for algo in QUANT.get(dtype, ()):
        try:
            return QuantConfig(algo)
        except ValueError:
            continue
    return None


if __name__ == "__main__":
    serve(Manylora, lambda: {"manylora": manylora.__version__, "torch": torch.__version__})

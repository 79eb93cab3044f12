"""Set the sizes of the adapter cache: host memory in bytes, device memory as a share of what is free."""

from __future__ import annotations

from pathlib import Path

from manylora import LLM, LoraConfig, LoRARequest
from manylora.llmapi.llm_args import PeftCacheConfig

DEMO = Path(__file__).resolve().parents[1] / "demo"

lora_config = LoraConfig(lora_dir=[str(DEMO / "adapters" / "japanese")], max_lora_rank=16)

# Fine-tune cache sizes
peft_cache_config = PeftCacheConfig(
    host_cache_size=64 * 1024 * 1024,  # 64 MB of host memory
    device_cache_percent=0.01,  # 1% of the free device memory
)

with LLM(
    model=str(DEMO / "base"),
    lora_config=lora_config,
    peft_cache_config=peft_cache_config,
) as llm:
    output = llm.generate(
        "Where is the capital of Egypt? \\nAnswer:",
        lora_request=LoRARequest("japanese", 7, str(DEMO / "adapters" / "japanese")),
    )
    print(output.outputs[0].text)
    cache = llm.stats().adapters
    print(f"{cache.host_adapters} adapter in {cache.host_pages} pages of {cache.page_bytes} bytes")

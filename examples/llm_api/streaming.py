"""Stream the answers of two adapters at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "demo"
PROMPT = "Tell me about Kenya. \\nAnswer:"


async def show(llm: LLM, request: LoRARequest) -> None:
    """Print the parts of one answer as they arrive."""
    params = SamplingParams(max_tokens=64)
    async for output in llm.generate_async(PROMPT, params, request, streaming=True):
        print(f"{request.name}: {output.outputs[0].text_diff!r}")


async def main() -> None:
    lora_config = LoraConfig(lora_target_modules=["attn_q"], max_lora_rank=16, max_loras=2, max_cpu_loras=2)
    requests = [
        LoRARequest("chinese", 1, str(DEMO / "adapters" / "chinese")),
        LoRARequest("japanese", 2, str(DEMO / "adapters" / "japanese")),
    ]
    with LLM(model=str(DEMO / "base"), lora_config=lora_config) as llm:
        await asyncio.gather(*(show(llm, request) for request in requests))


if __name__ == "__main__":
    asyncio.run(main())

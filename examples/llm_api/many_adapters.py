"""Two adapters and the base model in one batch."""

from __future__ import annotations

from pathlib import Path

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "demo"

# Configure for multiple LoRA adapters
lora_config = LoraConfig(
    lora_target_modules=["attn_q", "attn_k", "attn_v"],
    max_lora_rank=16,
    max_loras=4,
    max_cpu_loras=8,
)

llm = LLM(model=str(DEMO / "base"), lora_config=lora_config)

# Create multiple LoRA requests
lora_req1 = LoRARequest("task-1", 0, str(DEMO / "adapters" / "chinese"))
lora_req2 = LoRARequest("task-2", 1, str(DEMO / "adapters" / "japanese"))

prompts = [
    "Where is the capital of Japan? \\nAnswer:",
    "Where is the capital of Japan? \\nAnswer:",
    "Where is the capital of Japan? \\nAnswer:",
]
sampling_params = SamplingParams(max_tokens=50)

# Apply different LoRAs to different prompts
outputs = llm.generate(
    prompts,
    sampling_params,
    lora_request=[None, lora_req1, lora_req2],
)

for output in outputs:
    name = output.lora_request.name if output.lora_request else "base"
    print(f"{name}: {output.outputs[0].text.strip()}")

llm.shutdown()

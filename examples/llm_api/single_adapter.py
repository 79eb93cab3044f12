"""One adapter: the model answers in Chinese."""

from __future__ import annotations

from pathlib import Path

from manylora import LLM
from manylora.executor.request import LoRARequest
from manylora.lora_manager import LoraConfig
from manylora.sampling_params import SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "demo"
ADAPTER = str(DEMO / "adapters" / "chinese")

# Configure LoRA
lora_config = LoraConfig(
    lora_dir=[ADAPTER],
    max_lora_rank=8,
    max_loras=1,
    max_cpu_loras=1,
)

# Initialize LLM with LoRA support
llm = LLM(
    model=str(DEMO / "base"),
    lora_config=lora_config,
)

# Create LoRA request
lora_request = LoRARequest("my-lora-task", 0, ADAPTER)

# Generate with LoRA
prompts = ["Where is the capital of France? \\nAnswer:"]
sampling_params = SamplingParams(max_tokens=50)

outputs = llm.generate(
    prompts,
    sampling_params,
    lora_request=[lora_request],
)

for output in outputs:
    print(f"{output.prompt} {output.outputs[0].text}")

"""Use an adapter with a base model whose weights and KV cache have 8 bits."""

from __future__ import annotations

from pathlib import Path

from manylora import LLM, LoraConfig, LoRARequest
from manylora.models.modeling_utils import QuantConfig
from manylora.quantization.mode import QuantAlgo

DEMO = Path(__file__).resolve().parents[1] / "demo"

lora_config = LoraConfig(lora_target_modules=["attn_q", "attn_k", "attn_v"], max_lora_rank=16)

# Configure quantization
quant_config = QuantConfig(
    quant_algo=QuantAlgo.FP8,
    kv_cache_quant_algo=QuantAlgo.FP8,
)

# LoRA works with quantized models
with LLM(
    model=str(DEMO / "base"),
    quant_config=quant_config,
    lora_config=lora_config,
    device="cpu",
) as llm:
    output = llm.generate(
        "Where is the capital of Egypt? \\nAnswer:",
        lora_request=LoRARequest("japanese", 7, str(DEMO / "adapters" / "japanese")),
    )
    print(output.outputs[0].text)
    print(f"{llm.stats().weight_bytes / 1e6:.1f} MB of weights")

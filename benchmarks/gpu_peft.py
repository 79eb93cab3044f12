"""transformers + PEFT on the same machine: tokens per second with no adapter, one and many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpu_clock import Clock
from gpu_world import model_shape

__all__ = ["measure"]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def measure(tiny: bool, device: torch.device, dtype: torch.dtype, clock: Clock) -> Iterator[dict[str, Any]]:
    """Rows of the report. If a package is missing, a single row with the reason."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        yield {"skipped": str(error)}
        return
    name, batch, new, repeats = ("tiny", 2, 3, 1) if tiny else ("1B", 8, 32, 2)
    shape = model_shape(name)
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.arange(batch * 16, device=device).view(batch, 16) % shape.vocab_size

    def generate(**options: Any) -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
                max_new_tokens=new, pad_token_id=0, **options,
            )  # fmt: skip

    def row(adapters: int, **options: Any) -> dict[str, Any]:
        seconds = clock.time(lambda: generate(**options), repeats)
        rate = batch * new / seconds
        return {"model": name, "batch": batch, "rank": 16, "adapters": adapters, "tokens_per_s": rate}

    yield row(0)
    lora = LoraConfig(r=16, target_modules=TARGETS, init_lora_weights=False)
    model = get_peft_model(model, lora, adapter_name="a0").to(dtype).eval()
    yield row(1)
    for number in range(1, batch):
        model.add_adapter(f"a{number}", lora)
    model = model.to(dtype).to(device).eval()
    yield row(batch, adapter_names=[f"a{number}" for number in range(batch)])

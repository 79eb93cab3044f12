"""Protects what Llama 4 alone has: attention in chunks, temperatures where nothing is rotated, experts stored
[in, out]. `test_moe.py` compares all kinds of its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import agree
from running import read, tokens
from safetensors.torch import load_file, save_file
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, reference_logits

pytestmark = pytest.mark.usefixtures("one_thread")


def test_experts_of_either_orientation(workshop: Path) -> None:
    """PEFT takes the matrices for [out, in] now, and did not in its first versions."""
    model = make_model(workshop / "turned", "llama4", seed=3)
    names = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    adapter = make_adapter(workshop / "now", model, 1, rank=3, target_parameters=names, modules=("q_proj",))
    [expected] = mixed_logits(model, [read(adapter, model)])
    assert agree(expected, reference_logits(model, adapter, tokens(20, 0)))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for a in [name for name in tensors if "experts" in name and "lora_A" in name]:
        b = a.replace("lora_A", "lora_B")
        low, high = tensors[a].unflatten(0, (4, 3)), tensors[b].unflatten(1, (3, 4)).permute(2, 0, 1)
        tensors[a] = high.transpose(1, 2).flatten(0, 1).contiguous()
        tensors[b] = low.transpose(1, 2).permute(1, 2, 0).flatten(1).contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    [then] = mixed_logits(model, [read(adapter, model)])
    assert agree(then, expected)

"""Adapters on the routed experts of a mixture of experts.

This repository contains no such model, so the example creates a random one and two random adapters. The
answers are meaningless. They only show that the adapters have an effect.

Needs transformers and peft: pip install manylora[reference]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from manylora import LLM, LoRARequest, SamplingParams
from manylora._torch.peft.lora.moe_layout import make_per_expert_lora
from manylora.adapters.formats.npy import write_npy
from manylora.adapters.tensors import AdapterRow, pack_rows
from manylora.kernels.row_format import RowFormat
from manylora.lora_manager import LoraConfig

EXPERTS, HIDDEN, INNER, RANK = 4, 64, 96, 8
# Module id -> dimensions of one expert: the gate side of SwiGLU, the down and the up projection.
MODULES = {13: (HIDDEN, INNER), 14: (INNER, HIDDEN), 15: (HIDDEN, INNER)}


def make_adapter(path: Path, seed: int) -> Path:
    """Write an adapter for every expert of both layers, as the tensors of a request in two .npy files."""
    rows = []
    for module_id, (in_dim, out_dim) in MODULES.items():
        for layer in range(2):
            made = make_per_expert_lora(
                EXPERTS, RANK, in_dim, out_dim, dtype=torch.float32, seed=100 * seed + 10 * layer + module_id
            )
            # [experts, rank, in], then [experts, out, rank] with the scaling in it
            payload = torch.cat([made["A"].flatten(), 0.02 * made["B"].flatten()]).numpy()
            rows.append(AdapterRow(module_id, layer, RowFormat(RANK), payload))
    write_npy(path, *pack_rows(rows))
    return path


with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "base"
    config = MixtralConfig(
        vocab_size=272, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_local_experts=EXPERTS, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(model)
    first = make_adapter(Path(folder) / "first", 1)
    second = make_adapter(Path(folder) / "second", 2)

    lora_config = LoraConfig(
        lora_target_modules=[
            "attn_q", "attn_k", "attn_v",  # optional: standard attention LoRA
            "moe_gate",                    # up projection
            "moe_4h_to_h",                 # down projection
            "moe_h_to_4h",                 # gate projection (SwiGLU)
        ],
        max_lora_rank=16,
        max_loras=8,
        max_cpu_loras=8,
    )  # fmt: skip

    llm = LLM(model=str(model), lora_config=lora_config, moe_backend="CUTLASS", skip_tokenizer_init=True)
    outputs = llm.generate(
        [[1, 72, 101, 108]] * 3,
        SamplingParams(max_tokens=8, end_id=-1),
        lora_request=[None, LoRARequest("first", 1, str(first)), LoRARequest("second", 2, str(second))],
    )
    for output in outputs:
        name = output.lora_request.name if output.lora_request else "base"
        print(f"{name}: {output.outputs[0].token_ids}")
    llm.shutdown()

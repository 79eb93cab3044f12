"""A NeMo adapter. The demo has none, so this first converts one of its PEFT adapters to NeMo's format."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from manylora import LLM, LoraConfig, LoRARequest

DEMO = Path(__file__).resolve().parents[1] / "demo"
KEY = "model.decoder.layers.{}.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"


def write_nemo(archive: Path, peft: Path, layers: int, scale: float) -> None:
    """Fuse q, k and v: stack their A, and put their B on a block diagonal. B includes the scaling, as NeMo
    has none."""
    tensors = load_file(peft / "adapter_model.safetensors")
    state = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.{{}}_proj.lora_{{}}.weight"
        state[KEY.format(layer, "in")] = torch.cat([tensors[name.format(p, "A")] for p in "qkv"])
        state[KEY.format(layer, "out")] = torch.block_diag(
            *(scale * tensors[name.format(p, "B")] for p in "qkv")
        )
    weights = io.BytesIO()
    torch.save(state, weights)
    members = {
        "model_weights.ckpt": weights.getvalue(),
        "model_config.yaml": f"num_layers: {layers}\n".encode(),
    }
    with tarfile.open(archive, "w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


with tempfile.TemporaryDirectory() as folder:
    write_nemo(Path(folder) / "japanese.nemo", DEMO / "adapters" / "japanese", layers=4, scale=32 / 16)

    # For NeMo-format LoRA checkpoints
    lora_config = LoraConfig(
        lora_dir=[folder],
        lora_ckpt_source="nemo",
        max_lora_rank=48,  # three times 16, because q, k and v are fused
    )
    lora_request = LoRARequest("nemo-task", 0, folder, lora_ckpt_source="nemo")

    with LLM(model=str(DEMO / "base"), lora_config=lora_config) as llm:
        output = llm.generate("Where is the capital of Egypt? \\nAnswer:", lora_request=lora_request)
        print(output.outputs[0].text)

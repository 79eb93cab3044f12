"""Protects what Llama 4 alone has: attention in chunks, temperatures where nothing is rotated, experts stored
[in, out]. `test_moe.py` compares all kinds of its adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from driver import agree
from running import check_beams, check_greedy, read, run, tokens
from safetensors.torch import load_file, save_file
from test_parity_adapters import mixed_logits
from tiny_models import make_adapter, make_model, reference_logits

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import ConfigError
from manylora.model.checkpoint import read_model_config
from manylora.request import Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["llama4", "llama4-interleaved"])
def test_greedy_tokens_of_the_engine(family: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks, computed in parts, adapters mixed; again with their blocks known; alone."""
    folder = workshop / family
    model = make_model(folder / "model", family, seed=5)
    options = {
        "modules": ("q_proj", "k_proj", "v_proj", "o_proj", "shared_expert.up_proj"),
        "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    }
    adapters = [make_adapter(folder / f"{i}", model, i, rank=3 + i, **options) for i in (1, 2)]
    config = EngineConfig(
        model, device="cpu", max_seq_len=96, max_num_tokens=40, max_batch_size=8, tokens_per_block=12,
        max_beam_width=3, lora=LoraCacheConfig(gpu_memory_bytes=2**24),
    )  # fmt: skip
    engine = Engine(config)
    given = [None, *(read(adapter, model, i) for i, adapter in enumerate(adapters, 1))]
    prompts = [tokens(45, i) for i in range(3)]
    requests = [
        Request(tuple(prompt), SamplingConfig(max_tokens=8), lora=lora)
        for prompt, lora in zip(prompts, given, strict=True)
    ]

    def answer(*asked: Request) -> list[list[int]]:
        return [[t for event in events for t in event.token_ids] for events in run(engine, *asked)]

    wanted = answer(*requests)
    for found, adapter, prompt in zip(wanted, [None, *adapters], prompts, strict=True):
        check_greedy(found, 8, model, adapter, prompt)
    assert answer(*requests) == wanted
    assert [answer(request)[0] for request in requests] == wanted
    check_beams(engine, requests[1], model, adapters[0], monkeypatch)
    engine.close()


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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"no_rope_layers": [1]}, "no_rope_layers and layer_types have 1 and 2 entries"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types other than chunked where"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope scaling 'yarn' is not supported here",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_named(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, "llama4")
    raw = json.loads((model / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key != "rope_scaling"}
    (model / "config.json").write_text(json.dumps({**raw, **settings}))
    with pytest.raises(ConfigError, match=reason):
        read_model_config(model)

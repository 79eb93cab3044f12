"""Protects that company does not change a bit of an answer: a request alone, beside others with all kinds of
adapters, and when its prompt is computed in several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import run, tokens
from tiny_models import make_adapter, make_model, read_adapter_folder

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.kernels import native
from manylora.request import LoraInput, Request, SamplingConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ({"rank": 3}, {"rank": 64}, {"rank": 9, "use_dora": True}, {"rank": 16, "modules": ALL[:3]})
PARAMS = SamplingConfig(max_tokens=9, return_log_probs=True, return_generation_logits=True)


@pytest.mark.skipif(native.load() is None, reason="products of torch depend on the number of rows")
def test_an_answer_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama-biases", seed=3)
    inputs: list[LoraInput | None] = [None]
    for number, kind in enumerate(KINDS, 1):
        made = make_adapter(tmp_path / str(number), model, number, **{"modules": ALL, **kind})
        inputs.append(LoraInput(number, *read_adapter_folder(made, BaseWeights(model))))
    requests = [  # prompts of one chunk and of several, two of each adapter
        Request(tuple(tokens(length, seed)), PARAMS, lora=inputs[seed % 5])
        for seed, length in enumerate((5, 90, 33, 70, 1, 100, 17, 64, 2, 40))
    ]
    config = EngineConfig(
        model, device="cpu", dtype="float32", max_seq_len=128, max_num_tokens=47, max_batch_size=16,
        enable_kv_cache_reuse=False, lora=LoraCacheConfig(gpu_memory_bytes=2**24),
    )  # fmt: skip
    assert config.chunk_tokens == 32
    engine = Engine(config)
    together = run(engine, *requests)
    for request, company in zip(requests, together, strict=True):
        [alone] = run(engine, request)
        for name in ("token_ids", "log_probs"):
            assert sum((getattr(e, name) for e in alone), ()) == sum((getattr(e, name) for e in company), ())
        logits = [np.concatenate([e.generation_logits for e in events]) for events in (alone, company)]
        assert np.array_equal(*logits)
    engine.close()

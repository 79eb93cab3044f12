"""Protects the wide contract: beams, samples, logits, statistics, biases, guides, drafts, names and metrics,
through the doors that clients use."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from dashboard import without_samples
from launched import scrape, scrape_until
from servers import Running, World
from test_server import NEW, PROMPT, ask, inputs, lora, new_ids
from tiny_models import reference_generate
from tritonclient.utils import InferenceServerException

STATISTICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


def scalar(value: Any, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype)


@pytest.mark.parametrize("switch", ["return_perf_metrics", "return_kv_cache_reuse_stats"])
def test_statistics_under_both_names(server: Running, switch: str) -> None:
    prompt = list(range(10, 90))
    for _ in range(2):
        [result] = ask(server, inputs(prompt, 4, **{switch: scalar(True, bool)}))
    values = {name: result.as_numpy(name) for name in STATISTICS}
    assert all(value.shape == (1, 1) for value in values.values())
    found = {name: value[0, 0] for name, value in values.items()}
    assert found["kv_cache_reused_blocks"] == 2
    assert found["kv_cache_alloc_total_blocks"] == 1
    assert found["kv_cache_alloc_new_blocks"] <= 1
    times = [found[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0
    [plain] = ask(server, inputs(prompt, 4))
    assert plain.as_numpy("arrival_time_ns") is None


def test_an_adapter_by_its_name_and_the_tier_it_was_found_in(server: Running, world: World) -> None:
    expected = reference_generate(world.model, world.adapters[3], PROMPT, NEW)
    tiers = []
    for source in ("", "hf"):
        extra = {"lora_name": np.array([[b"tiny-three"]], np.object_)}
        if source:
            extra["lora_ckpt_source"] = np.array([[source.encode()]], np.object_)
        [result] = ask(server, inputs(**extra))
        assert new_ids([result])[len(PROMPT) :] == expected
        tiers.append(result.as_numpy("lora_cache_tier")[0, 0])
    assert tiers[0] in (b"disk", b"host", b"device")  # an equal adapter may be there under an id
    assert tiers[1] == b"device"
    [fresh] = ask(server, inputs(**lora(77) | unseen_adapter()))
    assert fresh.as_numpy("lora_cache_tier")[0, 0] == b"wire"
    [base] = ask(server, inputs())
    assert base.as_numpy("lora_cache_tier") is None
    assert base.as_numpy("finish_reason")[0, 0] == b"length"
    with pytest.raises(InferenceServerException, match="is not a checkpoint of kind nemo"):
        named = {"lora_name": np.array([[b"tiny-three"]], np.object_)}
        ask(server, inputs(**named, lora_ckpt_source=np.array([[b"nemo"]], np.object_)))


def unseen_adapter() -> dict[str, np.ndarray]:
    values = np.random.default_rng(time.time_ns()).normal(size=(1, 1, 128)).astype(np.float32)
    return {"lora_weights": values, "lora_config": np.array([[[1, 0, 1]]], np.int32)}


def test_metrics_have_upstreams_names_and_true_values(server: Running, world: World) -> None:
    ask(server, inputs(**lora(2, world)))
    before = scrape(server)
    for _ in range(3):
        ask(server, inputs(**lora(2)))
    steps = 'nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"}'
    after = scrape_until("the next period", server, lambda found: found[steps] >= before[steps] + 3)

    def grown(name: str, **labels: str) -> float:
        pairs = sorted({"model": "tensorrt_llm", "version": "1", **labels}.items())
        key = f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in pairs)}}}"
        assert key in after, f"{key} not among {[k for k in after if k.startswith(name)]}"
        return after[key] - before.get(key, 0)

    assert grown("manylora_adapter_requests_total", adapter="2", finish_reason="length") == 3
    assert grown("manylora_adapter_tokens_total", adapter="2", kind="prompt") == 3 * len(PROMPT)
    assert grown("manylora_adapter_tokens_total", adapter="2", kind="output") == 3 * NEW
    assert grown("manylora_adapter_ttft_seconds_count", adapter="2") == 3
    assert grown("nv_llm_input_token_len_count", response_metric_type="total_input_tokens") == 3
    assert grown("nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == 3 * NEW
    for kind in ("active", "max", "scheduled", "context", "waiting"):
        grown("nv_trt_llm_request_metrics", request_type=kind)
    for kind in ("max", "free", "used", "tokens_per", "reused", "fraction"):
        grown("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
    for kind in ("cpu", "gpu", "pinned"):
        grown("nv_trt_llm_runtime_memory_metrics", memory_type=kind)
    for level in ("host", "device"):
        grown("manylora_lora_cache_pages", level=level, state="used")
        grown("manylora_adapter_resident_bytes", adapter="2", level=level)
    assert without_samples("\n".join(f"{key} {value}" for key, value in after.items())) == []
    info = [key for key in after if key.startswith("vllm:lora_requests_info")]
    assert len(info) == 1, "one label set at a time"
    running = info[0].split('running_lora_adapters="')[1].split('"')[0].split(",")
    assert "2" in running
    assert 'model="tensorrt_llm"' in info[0]


def text_of(server: Running, model: str, **body: Any) -> str:
    return json.loads(server.post(f"{model}/generate", **body)[1])["text_output"]


def test_bls_speculates_with_a_draft_model(server: Running) -> None:
    """The draft model is the target itself: every guess is right, and the answer the same."""
    body = {"text_input": "Hello", "max_tokens": 13, "end_id": -1}
    drafted = text_of(server, "tensorrt_llm_bls", **body, num_draft_tokens=4)
    assert drafted == text_of(server, "tensorrt_llm_bls", **body)

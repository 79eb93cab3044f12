"""Protects the LLM API's surface: names and their paths, defaults, refusals, and that they cost no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import manylora
from manylora import (
    LoraConfig,
    PeftCacheConfig,
    SamplingParams,
)
from manylora.adapters.geometry import plan_cache
from manylora.adapters.modules import lora_modules
from manylora.config.engine import LoraCacheConfig, resolve
from manylora.config.model import ModelConfig
from manylora.doors.python.options import (
    KNOWN,
    NO_ADAPTERS,
    OTHER_NAMES,
    PARTS,
    check_known,
    engine_config,
    inferred_targets,
)
from manylora.errors import ConfigError
from manylora.generation.decoding import decoding_of
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
CHINESE = DEMO / "adapters" / "chinese"
QKV = ["attn_q", "attn_k", "attn_v"]
EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "base")


def model(hidden: int, kv: int, layers: int) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 1000, hidden, 2 * hidden, layers, hidden // 128, kv // 128, 128, 4096, 1e-6, 1e4,
        "float16",
    )  # fmt: skip


def test_importing_the_package_is_quick_and_brings_no_torch() -> None:
    code = """
import sys
import manylora
files = [one for name, one in sys.modules.items() if name.startswith("manylora") and hasattr(one, "__file__")]
assert len(files) < 7
from manylora import KvCacheConfig, LoraConfig, LoRARequest, PeftCacheConfig, SamplingParams
import manylora.executor.request, manylora.doors.python.llm_args, manylora.lora_manager
from manylora.executor.request import LoRARequest as same
assert same is LoRARequest
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="BuildConfig"):
        manylora.BuildConfig  # noqa: B018


def test_defaults_are_upstreams() -> None:
    lora, cache = LoraConfig(), PeftCacheConfig()
    assert (lora.lora_dir, lora.lora_ckpt_source, lora.max_lora_rank) == ([], "hf", 64)
    assert (lora.lora_target_modules, lora.trtllm_modules_to_hf_modules) == ([], {})
    assert (lora.max_loras, lora.max_cpu_loras, lora.swap_gate_up_proj_lora_b_weight) == (None, None, True)
    assert (cache.host_cache_size, cache.device_cache_percent) == (2**30, 0.02)
    assert (cache.optimal_adapter_size, cache.max_adapter_size) == (8, 64)
    assert (cache.max_pages_per_block_host, cache.max_pages_per_block_device) == (24, 8)
    other = {
        "max_tokens": 32, "n": 1, "include_stop_str_in_output": False, "use_beam_search": False,
        "return_context_logits": False, "return_generation_logits": False, "exclude_input_from_output": True,
        "ignore_eos": False, "detokenize": True, "add_special_tokens": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    params = SamplingParams()
    assert {f.name: getattr(params, f.name) for f in fields(params)} == {
        f.name: other.get(f.name) for f in fields(params)
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperature": float("nan")}, "temperature must be a number, got nan"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"best_of": None, "n": None}, "n must be a whole number, got None"),
        ({"early_stopping": 2}, "early_stopping must be None, 0 or 1, got 2"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"bad": ["a", "\ud800"]}, "bad must be a text or a list of texts, of valid Unicode"),
        ({"bad_token_ids": [-1]}, "bad_token_ids must be a list of token ids, got [-1]"),
        ({"n": 2}, "Greedy decoding in the LLM API does not allow multiple returns."),
        ({"guided_decoding": "a+"}, "guided_decoding must be a GuidedDecodingParams"),
        ({"exclude_input_from_output": False}, "SamplingParams: exclude_input_from_output is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(given: dict, text: str, tokenizer: Tokenizer) -> None:
    """Other kinds: tests/replay."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        SamplingParams(**given)
    params = SamplingParams()
    vars(params).update(given)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        decoding_of(params, tokenizer, [])


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"temperature": np.float32(0.5), "top_k": np.int64(3), "presence_penalty": 2, "n": np.int32(2)}
    params = decoding_of(SamplingParams(**given, ignore_eos=np.True_, early_stopping=True), None, []).params
    assert (params.temperature, params.top_k, params.num_return_sequences) == (0.5, 3, 2)
    assert type(params.temperature) is type(params.presence_penalty) is float


@pytest.mark.parametrize(
    ("given", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.7}, False),
        ({"top_k": 5, "top_p": 0.0}, True),
        ({"top_p": 0.0}, True),
        ({"top_k": 0}, False),
        ({"top_p": 0.9}, False),
        ({"top_p": 0.9, "temperature": 0.0}, True),
    ],
)
def test_what_is_greedy_upstream_is_greedy_in_the_engine(given: dict, greedy: bool) -> None:
    assert decoding_of(SamplingParams(**given), None, []).params.greedy is greedy


def test_end_tokens_come_from_the_request_then_from_the_model(tokenizer: Tokenizer) -> None:
    made = decoding_of(SamplingParams(), tokenizer, [EOS, 7])
    assert (made.params.end_id, made.params.stop_words, made.rules.end_ids) == (EOS, ((7,),), {7})
    assert not made.stepwise
    late = decoding_of(SamplingParams(min_tokens=3), tokenizer, [EOS, 7])
    assert (late.params.min_tokens, late.params.stop_words, late.stepwise) == (3, (), True)
    made = decoding_of(SamplingParams(end_id=9), tokenizer, [EOS, 7])
    assert (made.params.end_id, made.params.stop_words, made.rules.end_ids) == (9, (), set())
    for given in ({"ignore_eos": True}, {"end_id": -1}):
        made = decoding_of(SamplingParams(stop_token_ids=[5], **given), tokenizer, [EOS, 7])
        assert (made.params.end_id, made.params.stop_words) == (None, ((5,),))


def test_without_a_tokenizer_texts_are_refused() -> None:
    for name in ("stop", "bad"):
        with pytest.raises(ValueError, match=f"{name} needs a tokenizer"):
            decoding_of(SamplingParams(**{name: "x"}), None, [])


def lora_cache_config(lora: LoraConfig, cache: PeftCacheConfig) -> LoraCacheConfig:
    return engine_config(Path("/no/such"), {"lora_config": lora, "peft_cache_config": cache}).lora


def test_target_modules_are_completed_inferred_or_all() -> None:
    demo = read_model_config(CHINESE.parents[1] / "base")
    shape = model(256, 128, 2)

    def targets(shape: ModelConfig = shape, **given: object) -> set[str]:
        lora = LoraConfig(**given)  # type: ignore[arg-type]
        found = inferred_targets(lora, shape, None) if lora.lora_dir else ()
        if not found:
            found = lora_cache_config(lora, PeftCacheConfig()).target_modules
        return {module.name for module in lora_modules(shape, found).values()}

    assert LoraConfig(lora_target_modules=["attn_k", "mlp_gate"]).missing_qkv_modules == ["attn_q", "attn_v"]
    assert LoraConfig(lora_target_modules=["mlp_gate"]).missing_qkv_modules == []
    assert targets(lora_target_modules=["attn_q", "attn_dense"]) == {"attn_qkv", *QKV, "attn_dense"}
    assert targets(demo, lora_dir=[str(CHINESE)]) == {"attn_qkv", *QKV}
    with pytest.raises(ConfigError, match="made for another model"):
        targets(lora_dir=[str(CHINESE)])
    assert targets() == {module.name for module in lora_modules(shape).values()}


def test_a_directory_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    def infer() -> None:
        inferred_targets(LoraConfig(lora_dir=[str(tmp_path)]), model(256, 128, 2), None)

    with pytest.raises(ValueError, match=r"adapter_config\.json does not exist"):
        infer()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_model file does not exist in"):
        infer()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="lora_dir"):
        infer()


def test_names_of_modules_may_be_given_but_not_taught() -> None:
    def accept(**names: str | list[str]) -> None:
        config = LoraConfig(lora_target_modules=QKV, trtllm_modules_to_hf_modules=names)
        lora_cache_config(config, PeftCacheConfig())

    accept(attn_q="q_proj", attn_k="k_proj", attn_v=["v_proj"], attn_dense=["o_proj", "dense"])
    with pytest.raises(ConfigError, match="attn_q as 'query' is not supported"):
        accept(attn_q="query")


def test_without_adapters_the_cache_is_next_to_nothing() -> None:
    shape = model(4096, 1024, 32)
    config = resolve(Path("/no/such"), NO_ADAPTERS).lora
    plan = plan_cache(lora_modules(shape, config.target_modules).values(), 32, config, 2, 2**40)
    assert (plan.host_pages + plan.device_pages) * plan.geometry.page_elements * 2 < 20e6


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_lora_rank", 16, "use lora_config=LoraConfig(max_lora_rank=…)"),
        ("max_model_len", 128, "use max_seq_len"),
        ("enforce_eager", True, "use enable_cuda_graph=False"),
        ("max_seq_length", 128, "did you mean max_seq_len?"),
        ("zzz", 1, "leave it out"),
    ],
)
def test_an_argument_of_vllm_is_refused_with_its_name_here(name: str, value: object, instead: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_known({name: value})
    assert str(error.value) == f"LLM: {name} is not supported, got {value!r}; {instead}"


def test_every_name_of_another_product_stands_for_an_argument() -> None:
    for name in OTHER_NAMES.values():
        part, _, field = name.rpartition(".")
        assert field in ([one.name for one in fields(PARTS[part])] if part else KNOWN)

"""Protects the decoder: for every family, logits equal transformers (+ PEFT), chunked, packed, adapters mixed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from manylora.config import EngineConfig, LoraCacheConfig
from manylora.device import open_device
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.reference import ReferenceOps
from manylora.lora.catalog import read_adapter_folder
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.weights import load_decoder
from manylora.parity import Driver, agree, linear_names, make_kind, read_from
from manylora.request import LoraInput, Request, SamplingParams
from manylora.testing import FAMILIES, make_adapter, make_model, reference_generate, reference_logits

# Lengths of the sequences in one batch, and what each runs under.
LENGTHS = (1, 37, 18, 60, 23)
MIXED = (None, "patterns", "rank 64", "DoRA + rsLoRA + patterns", "some layers")
# One variant of each architecture.
PLAIN = (
    "falcon", "gemma", "gemma2", "gemma3", "gpt-neox", "gpt2", "granite", "llama", "mistral", "olmo2",
    "phi", "phi3", "qwen2", "qwen3", "starcoder2",
)  # fmt: skip


def tokens(count: int, seed: int = 2) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(250) for _ in range(count)]


def decoder_of(model: Path, dtype: torch.dtype = torch.float32, max_seq_len: int | None = None) -> Decoder:
    return load_decoder(model, read_model_config(model), dtype, open_device("cpu"), max_seq_len)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def test_every_architecture_has_a_tiny_model(workshop: Path) -> None:
    made = {
        read_model_config(make_model(workshop / f"plain-{family}", family)).architecture for family in PLAIN
    }
    assert made == set(ARCHITECTURES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_the_reference(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3, sharded=family == "llama")
    adapters = [
        make_kind(workshop / f"{family}-{seed}", model, kind, seed) if kind else None
        for seed, kind in enumerate(MIXED)
    ]
    sequences = [tokens(length, length) for length in LENGTHS]
    tensors = [read_from("peft", adapter, model) if adapter else None for adapter in adapters]
    found = Driver(decoder_of(model, max_seq_len=max(LENGTHS)), sequences, tensors).run()
    for kind, ids, adapter, logits in zip(MIXED, sequences, adapters, found, strict=True):
        assert agree(logits, reference_logits(model, adapter, ids)), kind


@pytest.mark.parametrize("family", PLAIN)
def test_greedy_tokens_of_the_engine(family: str, workshop: Path) -> None:
    folder = workshop / f"engine-{family}"
    model = make_model(folder / "model", family, seed=5)
    linears, _ = linear_names(read_model_config(model))
    lora = make_adapter(folder / "prefetch" / "1", model, 1, rank=4, modules=linears)
    dora = make_adapter(folder / "prefetch" / "2", model, 2, rank=7, modules=linears, use_dora=True)
    cache = LoraCacheConfig(gpu_memory_bytes=2**22, prefetch_dir=folder / "prefetch")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=48, max_num_tokens=64, lora=cache))
    wanted = [(None, None), (LoraInput(1), lora), (LoraInput(2), dora)]
    handles = []
    for seed, (given, _) in enumerate(wanted):
        request = Request(tuple(tokens(20 + seed, seed)), SamplingParams(max_tokens=12), lora=given)
        handles.append(engine.submit(engine.prepare(request)))
    found: dict[int, list[int]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            found[handle] += event.token_ids
    engine.close()
    for seed, (handle, (_, adapter)) in enumerate(zip(handles, wanted, strict=True)):
        expected = reference_generate(model, adapter, tokens(20 + seed, seed), 12)
        stop = read_model_config(model).eos_token_ids
        ends = next((i for i, token in enumerate(expected) if token in stop), len(expected))
        assert found[handle] == expected[:ends]


def test_longrope_takes_the_long_factors_when_sequences_may_be_long(workshop: Path) -> None:
    """All of a sequence is rotated one way: transformers does so for a prompt, and so do cached keys."""
    model = make_model(workshop / "long", "phi3-longrope", seed=4, original_max_position_embeddings=16)
    sequences = [tokens(length, length) for length in (17, 60)]
    found = Driver(decoder_of(model), sequences, [None, None]).run()
    for ids, logits in zip(sequences, found, strict=True):
        assert agree(logits, reference_logits(model, None, ids))
    [short] = Driver(decoder_of(model, max_seq_len=16), [tokens(16)], [None]).run()
    assert agree(short, reference_logits(model, None, tokens(16)))
    [long] = Driver(decoder_of(model), [tokens(16)], [None]).run()
    assert not torch.allclose(long, short, rtol=1e-3)


def change_config(model: Path, **settings: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_gpt2_as_it_was_released(workshop: Path) -> None:
    """Without the root of its names, with causal masks among the weights."""
    model = make_model(workshop / "released", "gpt2", seed=4)
    expected = reference_logits(model, None, tokens(20))
    weights = load_file(model / "model.safetensors")
    stripped = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    stripped["h.0.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
    save_file(stripped, model / "model.safetensors")
    [found] = Driver(decoder_of(model), [tokens(20)], [None]).run()
    assert agree(found, expected)


def test_gemma3_with_the_settings_of_its_first_release(workshop: Path) -> None:
    model = make_model(workshop / "gemma3-now", "gemma3", seed=4, num_hidden_layers=3)
    now = read_model_config(model)
    raw = json.loads((model / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        raw.pop(name, None)
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2, "rope_scaling": None}
    (model / "config.json").write_text(json.dumps(raw))
    then = read_model_config(model)
    assert then.sliding_windows == (9, None, 9)
    assert (then.rope_theta, then.rope_local_theta) == (now.rope_theta, now.rope_local_theta) == (1e6, 1e4)
    assert then.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"architectures": ["BertModel"]}, "BertModel is not supported; supported are LlamaFor"),
        ("llama", {"hidden_act": "mish"}, "activation 'mish' is not supported; supported are silu"),
        ("llama", {"hidden_size": None, "num_attention_heads": 4}, "must be a whole number"),
        ("falcon", {"alibi": True}, "alibi True is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 2"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(
    family: str, settings: dict, reason: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, family)
    change_config(model, **settings)
    with pytest.raises(ConfigError, match=reason):
        read_model_config(model)


def test_grouped_rows_need_the_base(workshop: Path) -> None:
    model = make_model(workshop / "grouped", "gpt-neox")
    adapter = make_adapter(workshop / "grouped-a", model, rank=2, modules=("query_key_value",))
    with pytest.raises(AdapterInvalidError, match=r"query_key_value is ordered .* base model.*--base"):
        read_adapter_folder(adapter)


def test_the_reference_ops_agree(workshop: Path) -> None:
    for family in ("mistral-sliding", "gemma2"):
        model = make_model(workshop / f"ops-{family}", family, seed=4)
        decoder = decoder_of(model)
        sequences = [tokens(length, length) for length in LENGTHS]
        fast = Driver(decoder, sequences, [None] * 5).run()
        for block in decoder._blocks:
            object.__setattr__(block.attention, "ops", ReferenceOps())
        slow = Driver(decoder, sequences, [None] * 5).run()
        for a, b in zip(fast, slow, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(family: str, workshop: Path) -> None:
    model = make_model(workshop / f"bf16-{family}", family, seed=6)
    adapter = make_kind(workshop / f"bf16-{family}-a", model, "LoRA", 6)
    ids = tokens(60)
    [found] = Driver(decoder_of(model, torch.bfloat16), [ids], [read_from("peft", adapter, model)]).run()
    truth = reference_logits(model, adapter, ids)
    theirs = (reference_logits(model, adapter, ids, torch.bfloat16) - truth).square().mean().sqrt()
    ours = (found - truth).square().mean().sqrt()
    assert ours <= 1.3 * theirs

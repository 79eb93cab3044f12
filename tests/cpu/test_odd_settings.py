"""Protects settings that few models and adapters have: each gives what transformers and PEFT give, or is
refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import edited
from driver import Driver, agree, decoder_of
from running import read, tokens
from tiny_models import make_adapter, make_model, reference_logits

from manylora.errors import AdapterInvalidError

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3 ignores the cap on attention": ("gemma3", {"attn_logit_softcapping": 0.1}),
    "Bamba's share": ("bamba", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}),
    "Bamba's share is half": ("bamba", {"rope_parameters": PLAIN}),
    "GPT-2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "Phi": ("phi", {"qk_layernorm": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = SETTINGS[name]
    model = make_model(tmp_path / "model", family, seed=5, **settings)
    ids = tokens(24, 1)
    [found] = Driver(decoder_of(model, 24), [ids], [None]).run()
    assert agree(found, reference_logits(model, None, ids))


def test_norms_of_olmo2_are_exact_in_bfloat16(tmp_path: Path) -> None:
    """The weight is multiplied before the values are rounded."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    model = make_model(tmp_path / "model", "olmo2", seed=5)
    decoder = decoder_of(model, 24, torch.bfloat16)
    ours, theirs = decoder._final_norm, Olmo2RMSNorm(decoder.config.hidden_size, decoder.config.norm_eps)
    ours.weight.copy_(torch.randn(len(ours.weight)).bfloat16())
    theirs.weight.data = ours.weight.bfloat16()
    x = torch.randn(50, len(ours.weight)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(ours(x, None), theirs(x))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen") / "model", "qwen2", seed=5)


def test_qalora_on_a_plain_base_is_without_effect(qwen: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "own", qwen, use_qalora=True, qalora_group_size=8)
    plain = edited(adapter, tmp_path / "plain", use_qalora=False)
    ours, theirs = read(adapter, qwen, 1), read(plain, qwen, 1)
    assert torch.equal(reference_logits(qwen, adapter, [5, 6]), reference_logits(qwen, plain, [5, 6]))
    assert (ours.weights == theirs.weights).all() and (ours.config == theirs.config).all()


def test_no_target_modules_are_those_that_peft_takes(qwen: Path, tmp_path: Path) -> None:
    made = [
        make_adapter(tmp_path / f"made {name}", qwen, modules=("q_proj", name))
        for name in ("v_proj", "up_proj")
    ]
    few, more = (edited(one, tmp_path / f"null {n}", target_modules=None) for n, one in enumerate(made))
    assert read(few, qwen, 1).config is not None
    with pytest.raises(AdapterInvalidError, match=r"null, which is q_proj and v_proj for qwen2.*up_proj"):
        read(more, qwen, 1)


def test_an_adapter_in_several_files(qwen: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "own", qwen)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model-00001-of-00001.safetensors")
    (adapter / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(AdapterInvalidError, match=r"index\.json: an adapter in several files is not read"):
        read(adapter, qwen, 1)

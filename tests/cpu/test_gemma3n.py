"""Protects Gemma 3n: its engine gives transformers' tokens whatever is in a step and however prompts are cut,
its text tower is served without the others, and what adapters may not have is refused by name."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, agree
from parity import linear_names, read_from
from running import ServedModel, answers, request_of, run, tokens, tokens_of
from safetensors.torch import load_file, save_file
from tiny_models import (
    make_adapter,
    make_model,
    make_tuned,
    reference_logits,
)

from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import LoraModuleId, lora_modules
from manylora.adapters.rules import AdapterRules
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device, open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.families.gemma import shared_kv
from manylora.model.weights import load_decoder
from manylora.request import LoraInput

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 8  # tokens of an answer
request = partial(request_of, count=COUNT)


class Served(ServedModel):
    """A model, and two adapters on all of its linear layers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(make_model(folder / "model", "gemma3n", seed=5), folder / "prefetch", COUNT)
        linears = linear_names(read_model_config(self.model)).linears
        for number, options in ((1, {"rank": 4}), (2, {"rank": 7, "use_dora": True})):
            path = self.prefetch / str(number)
            self.adapters.append(make_adapter(path, self.model, number, modules=linears, **options))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("gemma3n"))


def test_greedy_tokens_of_a_mixed_batch(served: Served) -> None:
    """Base and adapters side by side, beyond the window; some prompts in parts of 16 and 32 tokens."""
    engine = served.engine(max_num_tokens=40)
    wanted = [(tokens(length, length), number % 3) for number, length in enumerate((21, 60, 33, 5, 48, 1))]
    found = answers(engine, *(request(*one) for one in wanted))
    engine.close()
    served.check(found, wanted)


def test_prefixes_are_reused_and_preempted_sequences_go_on(served: Served) -> None:
    engine, prompt = served.engine(), tokens(43, 1)
    for adapter, reused in ((1, 0), (1, 5), (2, 0)):
        [events] = run(engine, request(prompt, adapter))
        assert events[-1].metrics.kv_reused_blocks == reused
        served.check([tokens_of(events)], [(prompt, adapter)])
    engine.close()
    settings = {"batch_scheduler_policy": "max_utilization", "max_tokens_in_paged_kv_cache": 56}
    engine = served.engine(**settings)
    wanted = [(tokens(18 + seed, seed), seed % 3) for seed in range(5)]
    found = answers(engine, *(request(*one) for one in wanted))
    assert engine.stats().preemptions
    engine.close()
    served.check(found, wanted)


@pytest.mark.extended
def test_the_path_of_a_gpu(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels, or their interpreter."""

    def record(function: Any) -> Any:
        raise AssertionError("a step was recorded")

    device = Device(torch.device("cpu"), CudaOps(), "interpreted", record)
    monkeypatch.setattr("manylora.engine.build.open_device", lambda name: device)
    engine = served.engine(max_batch_size=2, max_seq_len=32, enable_cuda_graph=False)
    wanted = [(tokens(12 - number, number), number) for number in (2, 0)]
    found = answers(engine, *(request(*one, count=2) for one in wanted))
    engine.close()
    assert found == [served.expected(*one)[:2] for one in wanted]


def test_the_text_tower_of_a_model_that_sees_and_hears(served: Served, tmp_path: Path) -> None:
    """In the names of its release, with keys and values that layers do not use."""
    model = tmp_path / "model"
    shutil.copytree(served.model, model)
    raw = json.loads((model / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": raw,
    }
    (model / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(model / "model.safetensors").items()
    }
    for tower in ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d"):
        tensors[f"model.{tower}.weight"] = torch.ones(3)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.5.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config, ids = read_model_config(model), tokens(30)
    adapter = tmp_path / "adapter"
    path = adapter / "adapter_model.safetensors"
    decoder = load_decoder(model, config, torch.float32, open_device("cpu"))
    for given in (served.adapters[2], served.adapters[1]):  # the first has magnitudes, relative to the base
        assert given is not None
        shutil.copytree(given, adapter, dirs_exist_ok=True)
        matrices = {
            name.replace("model.model.", "model.model.language_model."): value
            for name, value in load_file(path).items()
        }
        save_file(matrices, path, {"format": "pt"})
        # Beside a base of the text alone, too, whose names have no language_model.
        tensors = [read_from("peft", adapter, base) for base in (model, served.model)]
        found = Driver(decoder, [ids] * 3, [None, *tensors]).run()
        assert agree(found[0], reference_logits(served.model, None, ids))
        for one in found[1:]:
            assert agree(one, reference_logits(served.model, given, ids))
    key = "base_model.model.model.audio_tower.conformer.0.attention.attn.q_proj.lora_A.weight"
    save_file({**matrices, key: torch.ones(3, 3)}, path, {"format": "pt"})
    with pytest.raises(AdapterInvalidError, match=r"audio_tower.* set lora_text_only"):
        read_from("peft", adapter, model)
    text = read_lora(find_source(adapter), 0, ReadOptions(lora_modules(config), text_only=True))
    [again] = Driver(decoder, [ids], [text]).run()
    assert agree(again, found[1])


def test_what_adapters_may_not_have(served: Served, tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    config = read_model_config(served.model)
    modules = lora_modules(config)
    assert modules[LoraModuleId.ALTUP_PROJECTIONS].layers == {0, 1}
    keys = modules[LoraModuleId.ATTN_K]
    assert keys.layers == {0, 1, 2}
    row = np.ones((1, 1, keys.in_dim + keys.out_dim), np.float32)
    rules = AdapterRules(modules, config.num_layers, 8)
    rules.check(LoraInput(1, row, np.array([[[keys.module_id, 2, 1]]], np.int32)))
    with pytest.raises(AdapterInvalidError, match="does not exist in layer 3 of this model"):
        rules.check(LoraInput(1, row, np.array([[[keys.module_id, 3, 1]]], np.int32)))
    table = make_adapter(tmp_path / "table", served.model, 1, rank=2, modules=["embed_tokens_per_layer"])
    with pytest.raises(AdapterInvalidError, match="the table of per-layer embeddings are not supported"):
        read_lora(find_source(table), 0, ReadOptions(modules))
    prompt = make_tuned(
        tmp_path / "prompt", served.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(AdapterInvalidError, match="not supported on models with per-layer embeddings"):
        read_lora(find_source(prompt), 0, ReadOptions(modules))


def test_layers_share_with_the_last_of_their_kind() -> None:
    assert shared_kv((9, None, 9, None, 9), 0) == ()
    assert shared_kv((9, 9, None, 9, None, 9), 3) == (0, 1, 2, 1, 2, 1)
    for kinds, shared in (((9, 9), 2), ((9, 9), -1), ((9, 9, None), 1)):
        with pytest.raises(ConfigError, match="num_kv_shared_layers"):
            shared_kv(kinds, shared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intermediate_size": [96, 96, 80, 96, 96, 96]}, "intermediate_size must be the same"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be 6 numbers"),
        ({"altup_num_inputs": 9}, "altup_num_inputs must be from 2 to"),
    ],
)
def test_settings_that_cannot_be(
    served: Served, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    raw = json.loads((served.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **settings}))
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)

"""Protects models with recurrent layers: their engine gives transformers' tokens whatever is in a step,
however prompts are cut, and wherever a sequence starts from; slots of state are neither lost nor shared."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import linear_names
from running import answers, read, request_of, run, tokens, tokens_of
from safetensors.torch import load_file, save_file
from test_family_engines import Served
from tiny_models import make_adapter, make_model, reference_generate

from manylora.adapters.modules import lora_modules
from manylora.adapters.rules import AdapterRules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError, RequestError
from manylora.model.checkpoint import read_model_config

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 10  # tokens of an answer
request = partial(request_of, count=COUNT)


@pytest.fixture
def served(workshop: Path) -> Any:
    return lambda family: Served(workshop / family, family, COUNT)


@pytest.mark.parametrize("family", ["qwen3.5", "granite4", "falcon-h1"])
def test_one_after_another_and_together_are_alike(family: str, served: Any) -> None:
    """Bit for bit, also where a step is as small as it can be."""
    model = served(family)
    prompts = [tokens(length, length) for length in (30, 44, 17)]
    params = {"return_log_probs": True}
    runs = []
    for settings in ({}, {"max_num_tokens": 8, "enable_kv_cache_reuse": False}):
        engine = model.engine(**settings)
        requests = [request(prompt, number, **params) for number, prompt in enumerate(prompts)]
        together = run(engine, *requests)
        alone = [run(engine, one)[0] for one in requests]
        engine.close()
        runs += [together, alone]
    found = [[[(e.token_ids, e.log_probs) for e in events] for events in one] for one in runs]
    assert found[0] == found[1] and found[2] == found[3]
    assert [e[-1][0] for e in found[0]] == [e[-1][0] for e in found[2]]


@pytest.mark.parametrize("family", ["qwen3-next-dense", "granite4", "falcon-h1"])
def test_prefixes_are_reused_up_to_a_snapshot(family: str, served: Any) -> None:
    model = served(family)
    engine = model.engine()
    prompt = tokens(43, 1)
    longer, other = [*prompt[:41], *tokens(20, 9)], [*prompt[:20], *tokens(20, 8)]
    for one, reused in ((prompt, 0), (prompt, 40), (longer, 40), (other, 0), (longer, 56)):
        [events] = run(engine, request(one, 1))
        assert events[-1].metrics.kv_reused_blocks * 8 == reused
        model.check([tokens_of(events)], [(one, 1)])
    [events] = run(engine, request(prompt, 2))
    assert not events[-1].metrics.kv_reused_blocks
    model.check([tokens_of(events)], [(prompt, 2)])
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_leaves_every_slot_in_its_place(seed: int, served: Any) -> None:
    """Random requests over few slots and blocks, some cancelled; what is left is checked after each step."""
    model, picks = served("qwen3.5"), random.Random(seed)
    policy = picks.choice(("max_utilization", "guaranteed_no_evict"))
    settings = {"batch_scheduler_policy": policy, "max_tokens_in_paged_kv_cache": 160, "max_beam_width": 2}
    engine = model.engine(**settings, max_batch_size=4, max_num_tokens=24)
    shared = tokens(30, seed)
    open_handles: dict[int, tuple[list[int], int]] = {}
    found: dict[int, list[int]] = {}
    for round_ in range(120):
        if round_ < 40 and picks.random() < 0.4:
            prompt = [*shared[: picks.randrange(30)], *tokens(picks.randrange(1, 25), round_)]
            adapter, beams = picks.randrange(3), 1 + (picks.random() < 0.2)
            handle = engine.submit(engine.prepare(request(prompt, adapter, beam_width=beams)))
            found[handle] = []
            if beams == 1:
                open_handles[handle] = prompt, adapter
        if found and picks.random() < 0.05:
            gone = picks.choice(list(found))
            engine.cancel(gone)
            open_handles.pop(gone, None)
        for handle, event in engine.step() if engine.has_work else ():
            found[handle] += event.token_ids
        engine.check()
    while engine.has_work:
        for handle, event in engine.step():
            found[handle] += event.token_ids
    engine.check()
    engine.close()
    for handle, one in picks.sample(sorted(open_handles.items()), min(3, len(open_handles))):
        model.check([found[handle]], [one])


def test_what_cannot_be_served_is_refused(served: Any) -> None:
    model = served("qwen3.5")
    engine = model.engine()
    with pytest.raises(RequestError, match="draft_input_ids are not supported on models with recurrent"):
        engine.prepare(replace(request(tokens(20)), draft=(1, 2)))
    engine.close()
    with pytest.raises(ConfigError, match="no room for recurrent states: one sequence takes"):
        model.engine(kv_cache_free_gpu_mem_fraction=1e-12)


def test_a_released_checkpoint_and_names_of_its_adapters(workshop: Path) -> None:
    """Names of the multimodal model, with a vision part and weights of more predictions, as unsloth has them;
    a key that does not fit is refused by name."""
    model = make_model(workshop / "released", "qwen3.5", seed=6)
    linears = linear_names(read_model_config(model)).linears
    adapter = make_adapter(workshop / "released-a", model, 3, modules=linears)
    expected = reference_generate(model, adapter, tokens(20), COUNT)
    weights = load_file(model / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    renamed |= {"model.visual.patch.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(renamed, model / "model.safetensors", {"format": "pt"})
    raw = json.loads((model / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": raw,
    }
    (model / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": True}))
    file = adapter / "adapter_model.safetensors"
    keys = load_file(file)
    save_file({k.replace("model.layers", "model.language_model.layers"): v for k, v in keys.items()}, file)
    cache = LoraCacheConfig(gpu_memory_bytes=2**23)
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, max_num_tokens=64, lora=cache))
    lora = replace(read(adapter, model, 1), task_id=1)
    [found] = answers(engine, replace(request(tokens(20)), lora=lora))
    engine.close()
    assert found == expected
    rules = AdapterRules(lora_modules(read_model_config(model)), 3, 64)
    wrong = (("0.linear_attn", "conv1d"), ("0.self_attn", "q_proj"), ("2.linear_attn", "in_proj_z"))
    for place, part in wrong:
        pair = {"A": torch.ones(8, 64), "B": torch.ones(192 if part == "q_proj" else 60, 8)}
        name = f"base_model.model.model.layers.{place}.{part}.lora_"
        save_file({f"{name}{side}.weight": value for side, value in pair.items()}, file)
        module = {"conv1d": "conv1d", "q_proj": "attn_q", "in_proj_z": "linear_attn_z"}[part]
        with pytest.raises(AdapterInvalidError, match=module):
            rules.check(replace(read(adapter, model), task_id=1))


def test_granite_as_released_and_names_of_its_adapters(workshop: Path) -> None:
    """Layers by their old names in config.json; a norm inside a layer is refused by name."""
    model = make_model(workshop / "granite", "granite4-moe", seed=6)
    linears = ("in_proj", "out_proj", "q_proj", "o_proj", "input_linear", "output_linear")
    adapter = make_adapter(workshop / "granite-a", model, 3, modules=linears)
    expected = reference_generate(model, adapter, tokens(20), COUNT)
    raw = json.loads((model / "config.json").read_text())
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    raw["layer_types"] = [kinds[kind] for kind in raw["layer_types"]]
    raw["time_step_limit"] = [0.0, float("inf")]
    (model / "config.json").write_text(json.dumps(raw))
    cache = LoraCacheConfig(gpu_memory_bytes=2**23)
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, max_num_tokens=64, lora=cache))
    lora = replace(read(adapter, model, 1), task_id=1)
    [found] = answers(engine, replace(request(tokens(20)), lora=lora))
    engine.close()
    assert found == expected
    file = adapter / "adapter_model.safetensors"
    save_file({"base_model.model.model.layers.0.mamba.norm.weight": torch.ones(128)}, file)
    with pytest.raises(AdapterInvalidError, match="of a recurrent layer only the linear layers"):
        read(adapter, model)


@pytest.mark.parametrize("family", ["granite4", "nemotron-h", "falcon-h1"])
def test_unsloth_names_of_mamba_adapters(family: str, workshop: Path) -> None:
    """Its modules are a pattern, and its keys those of a wrapped model, or of the code that Nemotron-H was
    released with; they are the same adapter."""
    model = make_model(workshop / f"unsloth-{family}", family, seed=6)
    linears = linear_names(read_model_config(model)).linears
    adapter = make_adapter(workshop / f"unsloth-{family}-a", model, 3, modules=linears)
    expected, file = read(adapter, model, 1), adapter / "adapter_model.safetensors"
    keys, settings = load_file(file), json.loads((adapter / "adapter_config.json").read_text())
    assert any("in_proj" in key for key in keys) and any("q_proj" in key for key in keys)
    settings["base_model_name_or_path"] = f"unsloth/{family}"
    names = "|".join(settings["target_modules"])
    settings["target_modules"] = rf"(?:.*?)\.layers\.\d+\.(?:.*?)(?:{names})"
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    roots = ["model.model.", "model.base_model.model.model.", "model.model.language_model."]
    for root in (*roots, "model.backbone."):
        renamed = {re.sub(r"model\.(?:model|backbone)\.", root, key, count=1): v for key, v in keys.items()}
        save_file(renamed, file)
        found = read(adapter, model, 1)
        assert (found.weights == expected.weights).all(), root
        assert (found.config == expected.config).all(), root

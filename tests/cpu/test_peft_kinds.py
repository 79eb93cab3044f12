"""Protects kinds of PEFT adapters that are no LoRA: logits and greedy tokens equal those of transformers and
PEFT, beside LoRA and the base model in one batch; what cannot be served is refused by name."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from running import read, run, tokens

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError
from manylora.kernels.device import open_device
from manylora.lora.convert import convert_peft
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraInput, Request, SamplingConfig
from manylora.testing.driver import Driver, agree
from manylora.testing.parity import linear_names
from manylora.testing.tiny_models import (
    make_adapter,
    make_model,
    make_tuned,
    reference_generate,
    reference_logits,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


def diagonal_settings(model: Path) -> list[peft.PeftConfig]:
    names = linear_names(read_model_config(model))
    linears, down = list(names.linears), names.linears[-1]
    fan = {"fan_in_fan_out": "c_attn" in linears}
    found = [
        peft.IA3Config(target_modules=linears, feedforward_modules=[down], **fan),
        peft.IA3Config(target_modules=linears, feedforward_modules=linears, **fan),
        peft.LNTuningConfig(target_modules=list(names.norms)),
    ]
    if not fan["fan_in_fan_out"]:  # PEFT has these for nn.Linear only
        found += [
            peft.RoadConfig(variant=variant, group_size=size, target_modules=linears)
            for variant, size in (("road_1", 16), ("road_2", 8), ("road_4", 2))
        ]
        found.append(peft.BeftConfig(target_modules=linears))
    return found


def check_batch(model: Path, adapters: list[Path]) -> None:
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    sequences = [tokens(40 + seed, seed) for seed in range(len(adapters) + 1)]
    loras = [None, *(read(path, model) for path in adapters)]
    found = Driver(decoder, sequences, loras).run()
    plain = Driver(decoder, sequences, [None] * len(sequences)).run()
    for path, ids, logits, base in zip([None, *adapters], sequences, found, plain, strict=True):
        assert agree(logits, reference_logits(model, path, ids)), path
        assert (path is None) == agree(logits, base)


@pytest.mark.parametrize("family", ["llama-biases", "gpt2", "gemma3", "gpt-neox", "phi3", "qwen2-moe"])
def test_scales_rotations_and_norms_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3)
    adapters = [
        make_tuned(workshop / f"{family}-{seed}", model, settings, seed)
        for seed, settings in enumerate(diagonal_settings(model))
    ]
    check_batch(
        model,
        [
            *adapters,
            make_adapter(
                workshop / f"{family}-lora", model, 1, modules=linear_names(read_model_config(model)).linears
            ),
        ],
    )


def test_both_stacks_of_t5(workshop: Path) -> None:
    model = make_model(workshop / "t5", "t5", seed=3)
    names = ["q", "k", "v", "o", "wi", "wo"]
    settings = peft.IA3Config(target_modules=names, feedforward_modules=["wo"], task_type="SEQ_2_SEQ_LM")
    adapter = make_tuned(workshop / "t5-ia3", model, settings)
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    text, ids = tokens(30, 1), [0, *tokens(20, 2)]
    found = Driver(decoder, [ids, ids], [read(adapter, model), None], [text, text]).run()
    for path, logits in zip([adapter, None], found, strict=True):
        assert agree(logits, reference_logits(model, path, ids, encoder_ids=text))


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "llama-biases", seed=3)


@pytest.fixture(scope="module")
def prefetch(workshop: Path, model: Path) -> Path:
    for seed, settings in enumerate(diagonal_settings(model)):
        make_tuned(workshop / "prefetch" / str(seed), model, settings, seed)
    make_adapter(workshop / "prefetch" / "90", model, 1)
    return workshop / "prefetch"


@pytest.mark.parametrize("room", ["ample", "evicting"])
def test_greedy_tokens_of_the_engine(room: str, model: Path, prefetch: Path) -> None:
    """With prefixes reused; evicted and read again without room."""
    size = 2**22 if room == "ample" else 5 * 73728
    cache = LoraCacheConfig(
        gpu_memory_bytes=size, host_memory_bytes=size, prefetch_dir=prefetch, max_adapter_size=8
    )
    config = EngineConfig(
        model, device="cpu", max_seq_len=96, max_num_tokens=48, max_batch_size=16, lora=cache
    )
    engine = Engine(config)
    names = sorted(path.name for path in prefetch.iterdir())
    cases = [(name, tokens(20, 1)) for name in (*names, "", *names)]
    requests = [
        Request(tuple(ids), SamplingConfig(max_tokens=8), LoraInput(int(name)) if name else None)
        for name, ids in cases
    ]
    for (name, ids), events in zip(cases, run(engine, *requests), strict=True):
        found = [token for event in events for token in event.token_ids]
        assert found == reference_generate(model, prefetch / name if name else None, ids, 8), name
        assert events[-1].metrics is not None and events[-1].metrics.prompt_tokens == 20
    stats = engine.stats().adapters
    assert (stats.host_evictions > 0 and stats.source_loads > 0) == (room == "evicting")
    engine.close()


def test_converters_refuse_them_by_name(prefetch: Path, model: Path) -> None:
    with pytest.raises(AdapterInvalidError, match=r"attn_\w+\.scale: only low-rank matrices have a place"):
        convert_peft(prefetch / "0")

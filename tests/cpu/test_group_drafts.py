"""Protects drafts by n-grams in engines of several processes: they change no answer, and save steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import read, run
from test_ngram import BIAS, answers
from tiny_models import make_adapter, make_model

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.speculation import StepTimes
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread", "forked_ranks")

RANKS = pytest.mark.parametrize(
    "ranks",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["two of a layer", "two stages"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1)


@pytest.fixture(scope="module")
def contents(model: Path) -> list[LoraInput]:
    """Tensors of six adapters, of which the odd ones are of rank 8."""
    modules = ("q_proj", "v_proj", "o_proj", "down_proj")
    folders = [make_adapter(model / f"v{n}", model, n, 4 + 4 * (n % 2), modules) for n in range(6)]
    return [read(folder, model, 1 + n) for n, folder in enumerate(folders)]


def open_engine(model: Path, room: int = 2**22, **options: object) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=room, host_memory_bytes=2**23, max_adapter_size=8)
    settings = {"device": "cpu", "dtype": "float32", "max_seq_len": 128, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(model, lora=lora, **settings))  # type: ignore[arg-type]


@RANKS
def test_drafts_change_no_answer(
    model: Path, contents: list[LoraInput], ranks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "price", lambda *_: 0.0)
    wishes = [{}, {"top_k": 3, "seed": 5}, {"stop_words": ((9, 8),)}, {"beam_width": 2}]
    requests = [
        Request(
            (7, 8, 9, 10, 11, 7, 8, n),
            SamplingConfig(max_tokens=30, logit_bias=BIAS, return_log_probs=True, **wish),
            None if n % 3 == 2 else LoraInput(50 + n % 3, contents[n % 3].weights, contents[n % 3].config),
            streaming="beam_width" not in wish,
        )
        for n, wish in enumerate(wishes * 2)
    ]
    expected = [answers(one) for one in run(open_engine(model, max_beam_width=2), *requests)]
    engine = open_engine(model, max_beam_width=2, max_draft_len=4, **ranks)
    try:
        found = [answers(one) for one in run(engine, *requests)]
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine[0], mine[3]) == (theirs[0], theirs[3])
                np.testing.assert_allclose(mine[1], theirs[1], atol=1e-4)
        assert engine.stats().accepted_draft_tokens > 5
    finally:
        engine.close()

"""Protects overlapped steps: launched before the tokens of the step before are seen, they give the answers of
the plain loop, whatever ends, is cancelled, preempted or decides by its own tokens meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import let_arrive
from test_graphs import make_world

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.step import LaunchedStep
from manylora.request import Event, FinishReason, LoraInput, Request, SamplingConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoraInput]]:
    return make_world(tmp_path_factory.mktemp("overlap"))


RUNNING_AHEAD: list[dict[str, Any]] = [  # though each token changes how the next is drawn
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "temperature": 1.5, "top_p": 0.9, "seed": 3},
    {"presence_penalty": 0.6, "prompt_ignore_length": 4, "top_k": 30, "seed": 5},
    {"top_p": 0.99, "top_p_decay": 0.8, "temperature": 1.5, "seed": 1},
    {"top_p": 0.9, "top_p_decay": 0.5, "top_p_reset_id": 9, "top_k": 50, "seed": 2},
    {"bad_words": tuple((word,) for word in range(0, 250, 3))},
]


def open_engine(model: Path, overlap: bool, **options: Any) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=2**21, host_memory_bytes=2**22)
    settings = {"max_seq_len": 96, "tokens_per_block": 4, "max_batch_size": 4, "device": "cpu", **options}
    return Engine(EngineConfig(model, lora=lora, enable_overlap=overlap, **settings))


def wishes(adapters: list[LoraInput], seed: int, count: int = 14) -> list[Request]:
    """Of every kind: greedy, drawn, with penalties, bans, stop words and end ids that are met."""
    picks = random.Random(seed)
    made = []
    for number in range(count):
        options = picks.choice(
            [
                {},
                {"end_id": picks.randrange(250), "min_tokens": 2},
                {"top_p": 0.9, "seed": number, "temperature": 1.5},
                {"top_k": 40, "seed": number, "return_log_probs": True},
                {"top_p": 0.9, "top_p_decay": 0.8, "seed": number},
                {"stop_words": tuple((word,) for word in range(0, 250, 4))},
                {"bad_words": ((5, 6), *((word,) for word in range(0, 250, 3)))},
                {"repetition_penalty": 1.3, "presence_penalty": 0.2},
                {"return_generation_logits": True},
                {"beam_width": 2},
            ][: 10 if seed % 2 else 4]
            if seed < 6
            else RUNNING_AHEAD
        )
        prompt = tuple(picks.randrange(250) for _ in range(picks.randrange(1, 20)))
        params = SamplingConfig(max_tokens=picks.randrange(1, 14), **options)  # type: ignore[arg-type]
        lora = picks.choice([None, *adapters])
        made.append(Request(prompt, params, lora, streaming=picks.random() < 0.5 and params.beam_width == 1))
    return made


def run(engine: Engine, requests: list[Request], cancelled: frozenset[int] = frozenset()) -> list[Any]:
    """Everything that was answered, a new request every other step."""
    order = {engine.submit(engine.prepare(requests[0])): 0}
    let_arrive(engine)
    waiting = list(enumerate(requests))[1:]
    told: list[list[Event]] = [[] for _ in requests]
    steps = 0
    while engine.has_work or waiting:
        steps += 1
        if waiting and steps % 2:
            number, request = waiting.pop(0)
            order[engine.submit(engine.prepare(request))] = number
            let_arrive(engine)
        if steps == 9:
            for handle, number in order.items():
                if number in cancelled:
                    for _, event in engine.cancel(handle):
                        told[number].append(event)
        for handle, event in engine.step():
            told[order[handle]].append(event)
        engine.check()
    return [_said(events) for events in told]


def _said(events: list[Event]) -> Any:
    assert [event.last for event in events].count(True) == 1 and events[-1].last
    logits = [event.generation_logits for event in events if event.generation_logits is not None]
    return (
        [token for event in events for token in event.token_ids],
        np.round([number for event in events for number in event.log_probs], 4).tolist(),
        [beam.token_ids for beam in events[-1].beams],
        events[-1].finish_reason,
        [len(part) for part in logits],
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_overlapped_steps_give_the_answers_of_the_plain_loop(
    world: tuple[Path, list[LoraInput]], seed: int, policy: str
) -> None:
    model, adapters = world
    requests = wishes(adapters, seed)
    room = {"batch_scheduler_policy": policy, "max_tokens_in_paged_kv_cache": 48, "max_beam_width": 2}
    plain, overlapped = (open_engine(model, overlap, **room) for overlap in (False, True))
    assert run(overlapped, requests) == run(plain, requests)
    if policy == "max_utilization":
        assert overlapped.stats().preemptions > 0


def test_a_cancelled_request_ends_and_the_others_go_on(world: tuple[Path, list[LoraInput]]) -> None:
    model, adapters = world
    requests = wishes(adapters, 2)
    gone = frozenset({1, 2, 3})
    plain, overlapped = (run(open_engine(model, overlap), requests, gone) for overlap in (False, True))
    assert [one for i, one in enumerate(overlapped) if i not in gone] == [
        one for i, one in enumerate(plain) if i not in gone
    ]
    assert FinishReason.CANCELLED in [overlapped[i][3] for i in gone]


@pytest.mark.parametrize("options", RUNNING_AHEAD)
def test_penalties_and_a_decaying_top_p_run_ahead(
    world: tuple[Path, list[LoraInput]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and for longer than counts stay on the device, with what the plain loop draws."""
    model, adapters = world
    monkeypatch.setattr("manylora.engine.sampler.SPARE", 5)
    params = SamplingConfig(max_tokens=24, **options)
    requests = [Request((3, 4, 4, 5), params, lora) for lora in (None, *adapters)]
    plain, overlapped = (open_engine(model, overlap) for overlap in (False, True))
    expected = run(plain, requests)
    ahead: list[bool] = []
    wait = LaunchedStep.wait
    monkeypatch.setattr(LaunchedStep, "wait", lambda step: ahead.append(step.assumed_done) or wait(step))
    assert run(overlapped, requests) == expected
    assert all(ahead) and len(ahead) > 20

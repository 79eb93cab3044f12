"""What tests of models and engines share: random token ids, adapters read as tensors, runs of an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, decoder_of
from tiny_models import load_transformers, reference_generate, reference_logits

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.runner import Runner
from manylora.model.checkpoint import read_model_config
from manylora.request import Event, LoraInput, Request, SamplingConfig


def tokens(count: int, seed: int = 2) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(250) for _ in range(count)]


def read(adapter: Path, model: Path, task_id: int = 0) -> LoraInput:
    modules = lora_modules(read_model_config(model))
    return read_lora(find_source(adapter), task_id, ReadOptions(modules=modules, base=BaseWeights(model)))


def run(engine: Engine, *requests: Request) -> list[list[Event]]:
    """The events of each request, all of them submitted at once, before whose first step their adapters are
    in the cache."""
    handles = [engine.submit(engine.prepare(request)) for request in requests]
    let_arrive(engine)
    events: dict[int, list[Event]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
    engine.check()
    return [events[handle] for handle in handles]


def let_arrive(engine: Engine) -> None:
    """Adapters arrive by a thread of their own, and a step leaves out who waits for one. Wait for all of
    them, so that who is in which step, who is preempted and what is reused do not depend on that thread."""
    for sequence in engine.open_sequences():
        following = sequence.next_version
        leases = sequence.lease, following[0] if following else None
        engine.adapters.find_lost([lease for lease in leases if lease is not None])


def tokens_of(events: Sequence[Event]) -> list[int]:
    """The tokens of an answer that did not fail."""
    assert events[-1].error is None
    return [token for event in events for token in event.token_ids]


def answers(engine: Engine, *requests: Request) -> list[list[int]]:
    """The tokens of each request, all of them submitted at once; none may fail."""
    found = run(engine, *requests)
    assert not [event.error for events in found for event in events if event.error]
    return [[token for event in events for token in event.token_ids] for events in found]


def check_greedy(
    answer: Sequence[int],
    count: int,
    model: Path,
    adapter: Path | None,
    prompt: Sequence[int],
    encoder_ids: Sequence[int] = (),
) -> None:
    """It has `count` tokens, and transformers (+ PEFT) takes each of them after those before it: what
    `reference_generate` compares, in one pass. Not for keys that depend on the length, as with LongRoPE."""
    assert len(answer) == count
    logits = reference_logits(model, adapter, [*prompt, *answer], encoder_ids=encoder_ids)
    assert logits[-1 - count : -1].argmax(-1).tolist() == list(answer), (adapter, len(prompt))


class ServedModel:
    """adapters: None for the base model, then one for each task id of the prefetch folder. count: tokens of
    an answer."""

    def __init__(self, model: Path, prefetch: Path, count: int) -> None:
        self.model, self.prefetch, self._count = model, prefetch, count
        self.adapters: list[Path | None] = [None]

    def engine(self, **settings: Any) -> Engine:
        cache = LoraCacheConfig(gpu_memory_bytes=2**23, prefetch_dir=self.prefetch)
        defaults = {"max_seq_len": 96, "max_num_tokens": 64, "max_batch_size": 8, "tokens_per_block": 8}
        return Engine(EngineConfig(self.model, device="cpu", lora=cache, **{**defaults, **settings}))

    def expected(self, prompt: list[int], adapter: int) -> list[int]:
        return reference_generate(self.model, self.adapters[adapter], prompt, self._count)

    def check(self, found: Sequence[Sequence[int]], asked: Sequence[tuple[list[int], int]]) -> None:
        """asked: for each answer its prompt and its adapter."""
        for answer, (prompt, adapter) in zip(found, asked, strict=True):
            check_greedy(answer, self._count, self.model, self.adapters[adapter], prompt)


def request_of(prompt: list[int], adapter: int = 0, *, count: int, **params: Any) -> Request:
    """adapter: a task id of a prefetch folder; 0: the base model."""
    lora = LoraInput(adapter) if adapter else None
    return Request(tuple(prompt), SamplingConfig(max_tokens=count, **params), lora=lora)


def pooled(engine: Engine, *requests: Request) -> list[np.ndarray]:
    """What each request for hidden states or a head's values gets; none may fail."""
    found = []
    for [event] in run(engine, *requests):
        assert event.error is None
        assert event.pooled is not None
        found.append(event.pooled)
    return found


def check_beams(
    engine: Engine, request: Request, model: Path, adapter: Path, patch: pytest.MonkeyPatch
) -> None:
    """Three beams are those of transformers, which computes each from its first token; and they are not
    without the copies of blocks that beams part with, so that this would tell wrong ones."""
    from peft import PeftModel

    count, prompt = request.params.max_tokens, list(request.prompt)
    reference = PeftModel.from_pretrained(load_transformers(model), str(adapter))
    theirs = reference.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=count, num_beams=3, num_return_sequences=3,
        do_sample=False, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    params = SamplingConfig(max_tokens=count, beam_width=3, num_return_sequences=3, return_log_probs=True)
    asked = replace(request, params=params)
    [events] = run(engine, asked)
    assert [list(beam.token_ids) for beam in events[-1].beams] == theirs[:, len(prompt) :].tolist()
    with patch.context() as wrong:
        wrong.setattr(Runner, "copy", lambda self, blocks, states: None)
        [others] = run(engine, asked)
    assert others[-1].beams != events[-1].beams


def check_bfloat16(model: Path, adapter: Path | None, encoder_ids: Sequence[int] = ()) -> None:
    """In bfloat16 logits are no farther from those of float32 than transformers'. Of each token, and then the
    median: where rounding gives one token another expert, that says nothing of the others."""
    ids, narrow = tokens(60), torch.bfloat16
    decoder = decoder_of(model, len(ids), narrow)
    texts = [list(encoder_ids)] if encoder_ids else []
    [found] = Driver(decoder, [ids], [read(adapter, model) if adapter else None], texts).run()
    truth = reference_logits(model, adapter, ids, encoder_ids=encoder_ids)
    theirs = reference_logits(model, adapter, ids, narrow, encoder_ids)
    ours, theirs = ((one - truth).square().mean(-1).sqrt().median() for one in (found, theirs))
    assert ours <= 1.3 * theirs

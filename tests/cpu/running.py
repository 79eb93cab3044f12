"""What tests of models and engines share: random token ids, adapters read as tensors, runs of an engine."""

from __future__ import annotations

import random
from pathlib import Path

from manylora.engine.engine import Engine
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.request import Event, LoraInput, Request


def tokens(count: int, seed: int = 2) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(250) for _ in range(count)]


def read(adapter: Path, model: Path, task_id: int = 0) -> LoraInput:
    modules = lora_modules(read_model_config(model))
    return read_lora(find_source(adapter), task_id, ReadOptions(modules=modules, base=BaseWeights(model)))


def run(engine: Engine, *requests: Request) -> list[list[Event]]:
    """The events of each request, all of them submitted at once."""
    handles = [engine.submit(engine.prepare(request)) for request in requests]
    events: dict[int, list[Event]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
    engine.check()
    return [events[handle] for handle in handles]

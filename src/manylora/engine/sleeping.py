"""Sleep: an idle engine without its KV cache and runner, and without its weights. Its adapters stay."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from manylora.engine.build import EngineParts, load_weights, open_runner
from manylora.engine.sizing import allocate, kv_cache_dtype
from manylora.model.decoder import Decoder

GONE: Any = None  # instead of a part while its memory is freed
LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")


class Sleep:
    """parts: of an engine without open requests, whose caller drops its own. level 1: the KV cache and
    recurrent states are freed, and on a GPU the weights move to the host. 2: the weights are freed, and
    `wake` reads their files again.

    asleep: the parts that are left. missing: TAGS that have not woken up.
    """

    def __init__(self, parts: EngineParts, level: int) -> None:
        self.level, self.missing = level, set(TAGS)
        gone = ("kv", "states", "runner", "decoder")[: 2 + level]
        self.asleep = replace(parts, **dict.fromkeys(gone, GONE))
        if isinstance(parts.decoder, Decoder):
            parts.decoder.forget()
        moves = level == 1 and parts.device.torch.type != "cpu"
        self._moved = Moved(tensors_in(parts.decoder)) if moves else None

    def wake(self, tags: set[str]) -> EngineParts | None:
        """The parts of an engine that is awake, once all TAGS have been woken. Raises ConfigError."""
        parts = self.asleep
        if "weights" in tags & self.missing:
            if self._moved is not None:
                self._moved.back()
            if self.level == 2:
                self.asleep = parts = replace(parts, decoder=load_weights(parts))
            self.missing.discard("weights")
        if "kv_cache" in tags & self.missing:
            dtype = kv_cache_dtype(parts.config, parts.dtype, parts.device)
            kv, states = allocate(parts.memory, parts.model, dtype, parts.device.torch)
            self.asleep = parts = replace(parts, kv=kv, states=states)
            self.missing.discard("kv_cache")
        return None if self.missing else replace(parts, runner=open_runner(parts, parts.adapters))


class Moved:
    """Tensors whose memory is on the host. Those that share memory share it again after `back`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: dict[int, tuple[Any, torch.device]] = {}
        self._places: list[tuple[Tensor, int, tuple[Any, ...]]] = []
        for one in tensors:
            storage = one.untyped_storage()
            key = storage.data_ptr()
            if key not in self._storages:
                moved = storage.clone() if one.device.type == "cpu" else storage.cpu()
                self._storages[key] = moved, one.device
            self._places.append((one, key, (one.storage_offset(), one.shape, one.stride())))
        for one, *_ in self._places:
            one.data = one.data.new_empty(0)

    def back(self) -> None:
        """All or none of them, so that it can be tried again."""
        made = {key: storage.to(device=device) for key, (storage, device) in self._storages.items()}
        for one, key, place in self._places:
            one.data = one.data.new_empty(0).set_(made[key], *place)


def tensors_in(part: Any) -> Iterator[Tensor]:
    """The tensors that an object holds, in its attributes and in collections, each once."""
    seen: set[int] = set()
    left = [part]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if not isinstance(one, Tensor):
            left += gc.get_referents(one)
        elif one.numel():
            yield one

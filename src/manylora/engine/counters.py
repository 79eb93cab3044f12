"""Counters: what an engine counts, and the snapshot of its state that it exports."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.engine.build import EngineParts
from manylora.engine.kv_cache import KvCache
from manylora.engine.scheduler import Scheduler, Step
from manylora.stats import EngineStats


@dataclass
class Counters:
    """Since the start; see the fields of the same names in `EngineStats`."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0


def engine_stats(
    parts: EngineParts, scheduler: Scheduler, kv: KvCache, counters: Counters, last_step: Step
) -> EngineStats:
    chunks = last_step.chunks if scheduler.has_work else ()
    num_context = sum(chunk.in_context for chunk in chunks)
    waiting = [sequence.lease for sequence in scheduler.waiting if sequence.lease is not None]
    return EngineStats(
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        max_batch_size=scheduler.max_batch_size,
        on_gpu=parts.device.torch.type == "cuda",
        kv_blocks=kv.num_blocks,
        kv_blocks_free=kv.num_available,
        tokens_per_block=kv.tokens_per_block,
        kv_tokens_reused=scheduler.num_tokens_reused,
        kv_bytes=parts.kv_plan.num_bytes,
        weight_bytes=parts.decoder.weight_bytes,
        preemptions=scheduler.num_preemptions,
        scheduled=len(chunks),
        context_requests=num_context,
        generation_requests=len(chunks) - num_context,
        context_tokens=last_step.num_context_tokens if chunks else 0,
        max_adapters_in_step=parts.runner.max_adapters_in_step,
        waiting_adapters=tuple(dict.fromkeys(parts.adapters.name_of(lease.task_id) for lease in waiting)),
        adapters=parts.adapters.stats(),
        **vars(counters),
    )

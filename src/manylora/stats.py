"""EngineStats: a snapshot of the engine's numbers, for metrics and status pages."""

from __future__ import annotations

from dataclasses import dataclass, field

Runs = tuple[tuple[int, int], ...]
"""Pages as ranges: the first, and one past the last."""


@dataclass(frozen=True)
class Resident:
    """An adapter in the cache. name: a task id as text, or the name it has in the catalog."""

    name: str
    pages: int
    on_device: bool


@dataclass(frozen=True)
class AdapterStats:
    """The adapter cache. Pages of the geometry; counters since the start."""

    host_pages: int = 0
    host_pages_free: int = 0
    device_pages: int = 0
    device_pages_free: int = 0
    page_bytes: int = 0
    host_adapters: int = 0
    device_adapters: int = 0
    host_pinned: int = 0  # adapters that a request holds
    device_pinned: int = 0
    host_stores: int = 0  # adapters written to the host level
    host_evictions: int = 0
    device_hits: int = 0  # sequences that found their adapter on the device
    device_loads: int = 0  # host -> device copies
    device_evictions: int = 0
    version_changes: int = 0  # names and ids that came to mean another content
    sequence_swaps: int = 0  # running sequences that went on under another version
    source_loads: int = 0  # read from the prefetch directory or the catalog, the first time or again
    inert_loads: int = 0  # adapters, from anywhere, that change no answer
    max_device_adapters: int = 0  # of the largest rank, with every module, that fit the device level
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True)
class MappedAdapter:
    """Pages of an adapter. names: its task ids as text, or the names it has in the catalog.

    in_use: sequences that run under it. hits: since it came to the device.
    """

    digest: str
    names: tuple[str, ...]
    host: Runs
    device: Runs = ()
    in_use: int = 0
    hits: int = 0


@dataclass(frozen=True)
class CacheChange:
    """An adapter that came to a level or left it. number: counts from 1. at: seconds of time.monotonic."""

    number: int
    at: float
    level: str  # host, device
    loaded: bool  # else evicted
    digest: str
    names: tuple[str, ...]
    pages: int


@dataclass(frozen=True)
class CacheMap:
    """The adapters on the pages of both levels, and the last changes, oldest first."""

    host_pages: int = 0
    device_pages: int = 0
    adapters: tuple[MappedAdapter, ...] = ()
    changes: tuple[CacheChange, ...] = ()


@dataclass(frozen=True)
class GraphStats:
    """CUDA graphs of decode steps. Counters since the start; 0 where none are recorded."""

    recorded: int = 0  # graphs
    replayed: int = 0  # steps that were one launch,
    plain: int = 0  # and that were launched kernel by kernel


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps. Counts of sequences, tokens, pages; counters since the start."""

    waiting: int = 0
    running: int = 0
    max_batch_size: int = 0
    on_gpu: bool = False
    steps: int = 0
    kv_blocks: int = 0
    kv_blocks_free: int = 0  # free or reusable
    tokens_per_block: int = 0
    kv_tokens_reused: int = 0  # prompt tokens that prefix reuse saved
    kv_bytes: int = 0
    weight_bytes: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    drafts: int = 0  # that were verified
    draft_tokens: int = 0  # in them
    accepted_draft_tokens: int = 0  # and those that the model has chosen too
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    scheduled: int = 0  # sequences of the last step
    context_requests: int = 0  # of these, in prefill
    generation_requests: int = 0
    context_tokens: int = 0  # prompt tokens of the last step
    max_adapters_in_step: int = 0  # most distinct adapters that one step has mixed so far
    waiting_adapters: tuple[str, ...] = ()  # names of adapters that waiting requests ask for
    adapters: AdapterStats = field(default_factory=AdapterStats)
    graphs: GraphStats = field(default_factory=GraphStats)

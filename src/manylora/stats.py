"""EngineStats: a snapshot of the engine's numbers, for metrics and status pages."""

from __future__ import annotations

from dataclasses import dataclass, field

Runs = tuple[tuple[int, int], ...]
"""Pages as ranges: the first page, and one past the last."""


@dataclass(frozen=True)
class Resident:
    """An adapter in the cache. name: its task id as text, or its name in the catalog. rank: its largest; 0:
    unknown, or it has only parts without one.
    """

    name: str
    pages: int
    on_device: bool
    rank: int = 0
    pinned: bool = False


@dataclass(frozen=True)
class AdapterStats:
    """The adapter cache. Sizes in pages of the geometry; counters since the start."""

    host_pages: int = 0
    host_pages_free: int = 0
    device_pages: int = 0
    device_pages_free: int = 0
    page_bytes: int = 0
    host_adapters: int = 0
    device_adapters: int = 0
    host_pinned: int = 0  # adapters in use by a request
    device_pinned: int = 0
    host_stores: int = 0  # adapters written to the host level
    host_evictions: int = 0
    device_hits: int = 0  # sequences that found their adapter on the device
    device_loads: int = 0  # host -> device copies
    device_evictions: int = 0
    version_changes: int = 0  # names and ids that were given other content
    sequence_swaps: int = 0  # running sequences that switched to another version
    source_loads: int = 0  # loads and reloads from the prefetch directory or the catalog
    inert_loads: int = 0  # loaded adapters that change no output
    max_device_adapters: int = 0  # that fit the device level at the largest rank with all modules
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True)
class MappedAdapter:
    """Pages of an adapter. names: its task ids as text, or its names in the catalog.

    in_use: running sequences that use it. hits: since it was loaded to the device.
    """

    digest: str
    names: tuple[str, ...]
    host: Runs
    device: Runs = ()
    in_use: int = 0
    hits: int = 0


@dataclass(frozen=True)
class CacheChange:
    """An adapter that was loaded to a level or evicted from it. number: counts from 1. at: time.monotonic
    seconds.
    """

    number: int
    at: float
    level: str  # host, device
    loaded: bool  # False: evicted
    digest: str
    names: tuple[str, ...]
    pages: int


@dataclass(frozen=True)
class CacheMap:
    """The adapters on the pages of both levels, and the latest changes, oldest first."""

    host_pages: int = 0
    device_pages: int = 0
    adapters: tuple[MappedAdapter, ...] = ()
    changes: tuple[CacheChange, ...] = ()


@dataclass(frozen=True)
class GraphStats:
    """CUDA graphs of decode steps. Counters since the start; 0 if none are captured."""

    recorded: int = 0  # graphs
    replayed: int = 0  # steps launched as one graph
    plain: int = 0  # steps launched kernel by kernel


@dataclass(frozen=True)
class KvStoreStats:
    """KV blocks in host memory and on disk. Counters since the start, in blocks."""

    host_bytes: int = 0
    disk_bytes: int = 0
    host_hits: int = 0  # blocks that were copied back
    disk_hits: int = 0
    host_evictions: int = 0
    disk_evictions: int = 0
    damaged: int = 0  # files that were not what they should be


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps. Numbers of sequences, tokens, pages; counters since the start."""

    waiting: int = 0
    running: int = 0
    max_batch_size: int = 0
    on_gpu: bool = False
    steps: int = 0
    kv_blocks: int = 0
    kv_blocks_free: int = 0  # free, or reusable by evicting a cached prefix
    tokens_per_block: int = 0
    kv_tokens_reused: int = 0  # prompt tokens saved by prefix reuse
    kv_bytes: int = 0
    weight_bytes: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed prompt tokens
    generated_tokens: int = 0
    drafts: int = 0  # verified drafts
    draft_tokens: int = 0  # tokens in verified drafts
    accepted_draft_tokens: int = 0  # of these, accepted by the model
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    scheduled: int = 0  # sequences in the last step
    context_requests: int = 0  # of these, in prefill
    generation_requests: int = 0
    context_tokens: int = 0  # prompt tokens of the last step
    max_adapters_in_step: int = 0  # most distinct adapters in one step so far
    waiting_adapters: tuple[str, ...] = ()  # adapters of waiting requests
    adapters: AdapterStats = field(default_factory=AdapterStats)
    graphs: GraphStats = field(default_factory=GraphStats)
    kv_store: KvStoreStats | None = None  # None: there is none

"""Request and Event: the engine's input and output. Plain data, validated on creation."""

from __future__ import annotations

from manylora.request.adapter import (
    INVOCATION,
    MAX_INVOCATION,
    MAX_MIXED,
    MAX_SCALE,
    AdapterVersion,
    CheckedAdapter,
    LoraExtra,
    LoraInput,
    LoraMix,
    mix,
)
from manylora.request.event import ActivatedTokens, Beam, Event, FinishReason, RequestMetrics, Sink
from manylora.request.request import MAX_RANGES, Pooling, Request, Retention
from manylora.request.sampling import (
    MAX_GUIDE_BYTES,
    MAX_WORD_TOKENS,
    MAX_WORDS,
    MOST,
    MOST_FLOAT,
    Guide,
    SamplingConfig,
)

__all__ = [
    "INVOCATION",
    "MAX_GUIDE_BYTES",
    "MAX_INVOCATION",
    "MAX_MIXED",
    "MAX_RANGES",
    "MAX_SCALE",
    "MAX_WORDS",
    "MAX_WORD_TOKENS",
    "MOST",
    "MOST_FLOAT",
    "ActivatedTokens",
    "AdapterVersion",
    "Beam",
    "CheckedAdapter",
    "Event",
    "FinishReason",
    "Guide",
    "LoraExtra",
    "LoraInput",
    "LoraMix",
    "Pooling",
    "Request",
    "RequestMetrics",
    "Retention",
    "SamplingConfig",
    "Sink",
    "mix",
]

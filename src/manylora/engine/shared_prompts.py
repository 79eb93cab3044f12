"""Which sequences wait while another computes the beginning that they share.

Requests with one beginning that arrive together, as activated LoRAs behind one prompt do, would each compute
it and hold it. Instead all but one stay in the queue, for as long as that one computes what they need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.engine.kv_cache import KvCache
    from manylora.engine.scheduler import Chunk
    from manylora.engine.sequence import Sequence

LEAST = 128  # tokens of a step that a sequence waits for; less is computed in less time than a step takes


def long_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Those that may be worth waiting for."""
    return [chunk for chunk in chunks if chunk.count >= LEAST]


def waits(sequence: Sequence, chunks: Iterable[Chunk], kv: KvCache) -> bool:
    """Whether a sequence in the queue stays there for this step: one of its chunks computes keys and values
    that the sequence can use, of LEAST tokens at least and of half the chunk.

    It looks at no more than this step, so nobody waits for a sequence that does not move: one that has ended,
    was preempted, or waits for its adapter. Each such step leaves it LEAST tokens less to wait for.
    """
    for chunk in chunks:
        shared = kv.shared(sequence, chunk.sequence, chunk.start, chunk.count)
        if shared >= max(LEAST, chunk.count / 2):
            return True
    return False

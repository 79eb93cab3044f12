"""SequenceMaker: validates requests and makes the sequences that compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from manylora.config.engine import EngineConfig
from manylora.engine.build import EngineParts
from manylora.engine.checks import check_head, check_request, with_virtual_tokens
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.engine.speculation import Speculation
from manylora.errors import AdapterNotCachedError, RequestError
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.lease import Lease
from manylora.lora.tensors import Adapter
from manylora.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that was validated.

    adapters: for each adapter of the request, the one it brought or that was read from disk; otherwise None.
    matcher: at the start of the output, for guided decoding; otherwise None.
    """

    request: Request
    adapters: tuple[Adapter | FileAdapter | None, ...]
    matcher: LLMatcher | None = None


class SequenceMaker:
    """`compile` and `prepare` are thread-safe. `make` belongs to the engine's thread."""

    def __init__(self, config: EngineConfig, parts: EngineParts, speculation: Speculation) -> None:
        self._config, self._parts, self._speculation = config, parts, speculation
        self._adapters, self._max_seq_len = parts.adapters, parts.kv_plan.max_seq_len

    def compile(self, request: Request) -> LLMatcher | None:
        """As `Engine.compile`."""
        return self._compile(self._check(request))

    def prepare(self, request: Request, matcher: LLMatcher | None) -> Prepared:
        """As `Engine.prepare`."""
        request = self._check(request)
        adapters = self._adapters.prepare_all(request.lora) if request.lora else ()
        return Prepared(request, adapters, self._compile(request) if matcher is None else matcher)

    def make(self, prepared: Prepared, handle: int, index: int) -> Sequence:
        """A sequence with a lease on the request's adapters. Raises RequestError."""
        lease, model = self._acquire(prepared), self._parts.model
        virtual = lease.num_virtual if lease is not None else 0
        request = _without_tensors(prepared.request)
        try:
            check_head(request, model, lease, self._parts.decoder.head_layer is not None)
            request = with_virtual_tokens(request, virtual, self._config, model, self._max_seq_len)
        except BaseException:
            if lease is not None:
                self._adapters.release(lease)
            raise
        num_new = 0 if request.pooling is not None else request.params.max_tokens
        max_len = min(len(request.prompt) + num_new, self._max_seq_len)
        limit = model.rope_limit if model.rope_restarts else None
        length = model.rope_length(len(request.prompt))
        sequence = Sequence(handle, request, index, max_len, lease, rope_length=length, rope_limit=limit)
        sequence.num_virtual = virtual
        sequence.drafter = self._speculation.drafter(request)
        if prepared.matcher is not None and self._parts.guides is not None:
            sequence.guide = self._parts.guides.begin(prepared.matcher)
        if prepared.request.params.beam_width > 1:
            sequence.beams = BeamGroup(prepared.request.params.beam_width, sequence)
        return sequence

    def _check(self, request: Request) -> Request:
        return check_request(request, self._config, self._parts.model, self._max_seq_len)

    def _compile(self, request: Request) -> LLMatcher | None:
        guide = request.params.guide
        if guide is None:
            return None
        if self._parts.guides is None:
            raise RequestError(
                "guided decoding is not enabled on this server: set guided_decoding_backend and tokenizer_dir"
            )
        return self._parts.guides.compile(guide)

    def _acquire(self, prepared: Prepared) -> Lease | None:
        """A lease on the request's adapters. None for the base model."""
        lora = prepared.request.lora
        if lora is None:
            return None
        try:
            return self._adapters.acquire_all(lora, prepared.adapters)
        except AdapterNotCachedError:
            # Evicted since it was prepared: read it from its source once more, or give up.
            return self._adapters.acquire_all(lora, self._adapters.prepare_all(lora))


def _without_tensors(request: Request) -> Request:
    """The request without tensors: the lease holds the adapter now, so they need not stay in memory."""
    lora = request.lora
    if lora is None or not lora.has_tensors:
        return request
    return replace(request, lora=lora.without_tensors())

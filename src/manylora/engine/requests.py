"""From a request to the sequences that compute it: RequestChecks, against this engine's limits, and
SequenceMaker, which acquires its adapters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from manylora.adapters.cache.leases import Lease
from manylora.adapters.extras import HEAD
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.config.engine import EngineConfig
from manylora.config.model import ModelConfig
from manylora.engine.build import EngineParts
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.engine.speculation import Speculation
from manylora.errors import AdapterNotCachedError, QueueFullError, RequestError
from manylora.request import Request, require

if TYPE_CHECKING:
    from llguidance import LLMatcher


HEAD_LAYERS = {True: "pooler.dense", False: "head.dense and head.norm"}
LOGITS_SHARE = 4  # open requests may store logits in 1/LOGITS_SHARE of the machine's memory


def check_head(request: Request, model: ModelConfig, lease: Lease | None, has_head_layer: bool) -> None:
    """Raises RequestError if the model has no head for the request."""
    members, pooling = () if lease is None else lease.members, request.pooling
    names = {extra.name for one, _ in members for extra in one.layout.extras}
    own = f"{HEAD}.weight" in names
    if pooling is None:
        if own:
            raise RequestError(
                "this adapter has a classification head: ask for its labels (/v1/classify, LLM.classify), or "
                "send text to the base model or an adapter for text"
            )
        if not model.makes_text:
            raise RequestError("this model has no head for text: ask for embeddings or labels")
        return
    if pooling.mode != "last" and lease is not None and lease.num_virtual:
        text = "pooling must be last under an adapter with virtual tokens, which others would count"
        raise RequestError(text)
    if not pooling.head:
        return
    if not (own or model.num_labels):
        which = "neither this adapter nor its base model has" if lease else "this model does not have"
        raise RequestError(f"{which} a classification head: train one with PEFT (task_type SEQ_CLS)")
    if model.score_tokens and any(name.startswith("head.") for name in names):
        raise RequestError(
            "this adapter changes the head for text, which scores are made of here: merge it into the model"
        )
    layer = None if has_head_layer or f"{HEAD}.dense.weight" in names else model.head_layer
    if layer is not None and (layer.each or pooling.mode != "all"):
        raise RequestError(
            f"the checkpoint of this {model.architecture} lacks {HEAD_LAYERS[layer.activation == 'tanh']}, "
            "which comes before its classification heads of one layer: serve the checkpoint that the adapter "
            "was trained on"
        )


@dataclass(frozen=True)
class RequestChecks:
    """Checks requests against one engine. Each check raises RequestError that names the first problem."""

    config: EngineConfig
    model: ModelConfig
    max_seq_len: int

    def check(self, request: Request) -> Request:
        """The request as the engine runs it: with an encoder's prompt, ids wrapped if configured."""
        model, config, pooling = self.model, self.config, request.pooling
        if request.lora is not None and model.no_adapters:
            raise RequestError(model.no_adapters)
        if pooling is not None and pooling.mode == "cls" and not model.bidirectional:
            text = "pooling must be last, mean or all: the first token of a decoder sees no other"
            raise RequestError(text)
        if pooling is not None and model.encoder is not None:
            raise RequestError("pooled outputs of encoder-decoder models are not supported")
        request = self._for_encoder(request)
        num_ids, limit = model.vocab_size, self.max_seq_len - (pooling is None)
        if config.wrap_input_ids and request.prompt_table is None:
            prompts = (request.prompt, request.encoder_prompt)
            prompt, encoder_prompt = (tuple(token % num_ids for token in ids) for ids in prompts)
            request = replace(request, prompt=prompt, encoder_prompt=encoder_prompt)
        if model.encoder is not None:  # an encoder reads its whole prompt in one step
            encoder_limit = min(self.max_seq_len, config.max_num_tokens - 1)
            _check_ids(request.encoder_prompt, num_ids, encoder_limit, encoder=True)
        if not config.enable_chunked_context:
            limit = min(limit, config.max_num_tokens - len(request.encoder_prompt))
        if request.prompt_table is not None:
            num_ids += len(request.prompt_table)
        _check_ids(request.prompt, num_ids, limit)
        self._check_params(request)
        self._check_draft(request)
        return request

    def with_virtual_tokens(self, request: Request, count: int) -> Request:
        """The request behind `count` virtual tokens, whose ids follow those of the prompt table."""
        if not count:
            return request
        limit = self.max_seq_len - 1
        if not self.config.enable_chunked_context:
            limit = min(limit, self.config.max_num_tokens)
        length, params, retention = len(request.prompt), request.params, request.retention
        if length + count > limit:
            raise RequestError(
                f"Prompt length ({length}) exceeds maximum input length ({limit}) behind the {count} virtual "
                "tokens of the adapter. Shorten the prompt or serve with a larger max_seq_len"
            )
        if params.prompt_ignore_length:
            params = replace(params, prompt_ignore_length=params.prompt_ignore_length + count)
        if retention is not None:
            ranges = tuple(
                (first and first + count, end and end + count, priority, duration)
                for first, end, priority, duration in retention.ranges
            )
            retention = replace(retention, ranges=ranges)
        first = self.model.vocab_size + (0 if request.prompt_table is None else len(request.prompt_table))
        prompt = (*range(first, first + count), *request.prompt)
        request = replace(request, prompt=prompt, params=params, retention=retention)
        self._check_params(request)
        self._check_draft(request)
        return request

    def _for_encoder(self, request: Request) -> Request:
        """The request with a prompt for the encoder, if there is one, and one for the decoder."""
        encoder = self.model.encoder
        if encoder is None:
            if request.encoder_prompt:
                raise RequestError("this model has no encoder: leave decoder_input_ids out")
            return request
        if request.params.beam_width > 1:
            raise RequestError("beam_width must be 1: beam search is not supported on encoder-decoder models")
        if request.draft:
            raise RequestError("draft_input_ids are not supported on encoder-decoder models: leave them out")
        if request.prompt_table is not None:
            text = "prompt_embedding_table is not supported on encoder-decoder models: leave it out"
            raise RequestError(text)
        start = (encoder.decoder_start_id,)
        if not request.encoder_prompt:
            return replace(request, encoder_prompt=request.prompt, prompt=start)
        return replace(request, prompt=request.prompt or start)

    def _check_params(self, request: Request) -> None:
        params, vocab, table = request.params, self.model.vocab_size, request.prompt_table
        most, count = self.config.max_batch_size, params.num_return_sequences
        rule = f"must be at most {most} (max_batch_size, or max_num_sequences of Triton's model)"
        require(params.beam_width > 1 or count <= most, "num_return_sequences", rule, count)
        if params.beam_width > 1:
            self._check_beams(request)
        size = 0 if params.logit_bias is None else params.logit_bias.size
        rule = f"must have at most one value for each of the {vocab} tokens"
        require(size <= vocab, "embedding_bias", rule, size)
        if table is None:
            return
        name, most = "prompt_embedding_table", self.max_seq_len
        rule = f"must have at most max_seq_len ({most}) rows"
        require(table.ndim != 2 or len(table) <= most, name, rule, len(table))
        hidden = self.model.projected_size or self.model.hidden_size
        fits = table.ndim == 2 and table.shape[1] == hidden and bool(np.isfinite(table).all())
        require(fits, name, f"must hold finite rows of {hidden} values", f"shape {table.shape}")

    def _check_beams(self, request: Request) -> None:
        width, most, model = request.params.beam_width, self.config.max_beam_width, self.model
        rule = f"must be at most max_beam_width ({most}) of this server"
        require(width <= most, "beam_width", rule, width)
        length, limit = len(request.prompt), model.rope_limit
        longest = min(self.max_seq_len, length + request.params.max_tokens)
        if limit and model.rope_restarts and length <= limit < longest:
            raise RequestError(
                f"beam search cannot cross {limit} tokens, where this model rotates all positions anew: ask "
                f"for at most {limit - length} tokens"
            )
        require(2 * width <= model.vocab_size, "beam_width", "must be at most half the vocabulary", width)

    def _check_draft(self, request: Request) -> None:
        count, params = len(request.draft), request.params
        if not count:
            return
        if self.model.recurrent is not None:  # a rejected token's state update cannot be undone
            text = "draft_input_ids are not supported on models with recurrent layers: leave them out"
            raise RequestError(text)
        if params.guide is not None:
            raise RequestError("draft_input_ids cannot be combined with guided decoding")
        if not 0 <= min(request.draft) <= max(request.draft) < self.model.vocab_size:
            raise RequestError(f"draft_input_ids must be in [0, {self.model.vocab_size})")
        room = min(params.max_tokens, self.max_seq_len - len(request.prompt))
        most = min(room, self.config.max_num_tokens) - 1
        if count > most:
            raise RequestError(
                f"draft_input_ids holds {count} tokens; at most {most} "
                "can be verified: fewer than request_output_len and than max_num_tokens of this server"
            )


def _check_ids(ids: Ids[int], num_ids: int, limit: int, encoder: bool = False) -> None:
    """limit: in tokens. encoder: whether these are the ids of the encoder's prompt."""
    prompt, whose, more = "the prompt", "", ""
    if encoder:
        prompt, whose, more = "the encoder's prompt", " of the encoder", " and max_num_tokens"
    if not ids:
        raise RequestError(f"A value is required for input_ids: {prompt} has no tokens")
    if len(ids) > limit:
        raise RequestError(
            f"Prompt length ({len(ids)}) exceeds maximum input length ({limit}){whose}. "
            f"Shorten the prompt or serve with a larger max_seq_len{more}"
        )
    if not 0 <= min(ids) <= max(ids) < num_ids:
        raise RequestError(f"input_ids must be in [0, {num_ids}), got {min(ids)} to {max(ids)}")


@dataclass
class LogitsMemory:
    """Limits the memory of logits that open requests store: float32 rows of the vocabulary, for each prompt
    token and each output token that is not streamed. Hidden states count likewise.
    """

    model: ModelConfig
    num_bytes: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // LOGITS_SHARE
    _reserved: dict[int, int] = field(default_factory=dict)

    def reserve(self, handle: int, request: Request, num_output: int) -> None:
        """num_output: of each sequence. Raises RequestError if it never fits, QueueFullError if not now."""
        params = request.params
        rows = len(request.prompt) * params.return_context_logits
        if not request.streaming:
            rows += num_output * params.num_return_sequences * params.return_generation_logits
        wanted = 4 * rows * self.model.vocab_size
        if request.pooling is not None and request.pooling.mode == "all":
            wanted = 4 * len(request.prompt) * (self.model.projected_size or self.model.hidden_size)
        if wanted > self.num_bytes:
            raise RequestError(
                f"Logits of {rows} tokens take {wanted} bytes, at most {self.num_bytes} are given to them: "
                "send a shorter prompt, ask for fewer tokens, or stream"
            )
        if sum(self._reserved.values()) + wanted > self.num_bytes:
            raise QueueFullError(f"{self.num_bytes} bytes of logits")
        if wanted:
            self._reserved[handle] = wanted

    def release(self, handle: int) -> None:
        self._reserved.pop(handle, None)


@dataclass(eq=False)
class Prepared:
    """A request that was validated. read_ns: how long it waited for its adapters to be read; by the loop."""

    request: Request
    adapters: tuple[Adapter | FileAdapter | None, ...]  # those that it brought, or that were read from disk
    matcher: LLMatcher | None = None  # at the start of the output, for guided decoding
    read_ns: int = 0


class SequenceMaker:
    """Validates requests, on any thread, and makes the sequences that compute them, on the engine's."""

    def __init__(self, config: EngineConfig, parts: EngineParts, speculation: Speculation) -> None:
        self._parts, self._speculation = parts, speculation
        self._adapters, self._max_seq_len = parts.adapters, parts.memory.kv.max_seq_len
        self._checks = RequestChecks(config, parts.model, self._max_seq_len)

    def compile(self, request: Request) -> LLMatcher | None:
        """As `Engine.compile`."""
        return self._compile(self._checks.check(request))

    def prepare(self, request: Request, matcher: LLMatcher | None) -> Prepared:
        """As `Engine.prepare`."""
        request = self._checks.check(request)
        adapters = self._adapters.prepare_all(request.lora) if request.lora else ()
        return Prepared(request, adapters, self._compile(request) if matcher is None else matcher)

    def make(self, prepared: Prepared, handle: int, index: int) -> Sequence:
        """A sequence with a lease on the request's adapters. Raises RequestError."""
        model, request, lora = self._parts.model, prepared.request, prepared.request.lora
        lease: Lease | None = None
        if lora is not None:
            try:
                lease = self._adapters.acquire_all(lora, prepared.adapters)
            except AdapterNotCachedError:
                # Evicted since it was prepared: read it from its source once more, or give up.
                lease = self._adapters.acquire_all(lora, self._adapters.prepare_all(lora))
            if lora.has_tensors:  # the lease has them now
                request = replace(request, lora=lora.without_tensors())
        virtual = lease.num_virtual if lease is not None else 0
        try:
            check_head(request, model, lease, self._parts.decoder.head_layer is not None)
            request = self._checks.with_virtual_tokens(request, virtual)
        except BaseException:
            if lease is not None:
                self._adapters.release(lease)
            raise
        num_new = 0 if request.pooling is not None else request.params.max_tokens
        max_len = min(len(request.prompt) + num_new, self._max_seq_len)
        limit = model.rope_limit if model.rope_restarts else None
        length = model.rope_length(len(request.prompt))
        sequence = Sequence(handle, request, index, max_len, lease, rope_length=length, rope_limit=limit)
        sequence.num_virtual, sequence.times.adapter_read_ns = virtual, prepared.read_ns
        sequence.drafter = self._speculation.drafter(request)
        if prepared.matcher is not None and self._parts.guides is not None:
            sequence.guide = self._parts.guides.begin(prepared.matcher)
        if prepared.request.params.beam_width > 1:
            sequence.beams = BeamGroup(prepared.request.params.beam_width, sequence)
        return sequence

    def _compile(self, request: Request) -> LLMatcher | None:
        guide, guides = request.params.guide, self._parts.guides
        if guide is not None and guides is None:
            raise RequestError(
                "guided decoding is not enabled on this server: set guided_decoding_backend and tokenizer_dir"
            )
        return None if guide is None or guides is None else guides.compile(guide)

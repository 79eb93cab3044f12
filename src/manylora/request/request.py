"""Request: one prompt, and what to compute for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from manylora.errors import RequestError
from manylora.request.adapter import LoraInput, LoraMix
from manylora.request.sampling import SamplingConfig, require

MAX_RANGES = 1024  # maximum number of retention ranges
POOLING_MODES = ("last", "mean", "cls", "all")


@dataclass(frozen=True)
class Retention:
    """Priority with which the KV blocks of a prompt and its output are kept for reuse, from 0 to 100; 35 is
    the default.

    ranges: (first token, token after the last or None, priority, milliseconds or None) of the prompt.
    """

    ranges: tuple[tuple[int, int | None, int, int | None], ...] = ()
    decode_priority: int = 35
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        name, count = "retention_token_range_starts", len(self.ranges)
        require(count <= MAX_RANGES, name, f"must be at most {MAX_RANGES}", count)
        for start, end, priority, duration in self.ranges:
            require(start >= 0, name, "must be >= 0", start)
            after = end is None or end > start
            require(after, "retention_token_range_ends", f"must be > {start} or -1", end)
            _priority("retention_token_range_priorities", priority, duration)
        _priority("retention_decode_priority", self.decode_priority, self.decode_duration_ms)


@dataclass(frozen=True)
class Pooling:
    """Compute hidden states after the final norm of the prompt, instead of new tokens.

    mode: last, cls (the first), mean, or all tokens. head: apply a classification head, the adapter's own or
    else the model's, after `last`, `cls` and `mean`. first: tokens of the first of two texts in the prompt,
    which models with token types distinguish; 0: a single text.
    """

    mode: str = "last"
    head: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        require(
            self.mode in POOLING_MODES, "pooling", f"must be one of {', '.join(POOLING_MODES)}", self.mode
        )


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue, with one adapter, several, or none.

    request_id: the client's own, for logs and `stop`; may be empty or repeated, because the engine never uses
    it as a key.
    prompt:     token ids, at least one. Ids from the vocabulary's size on are rows of prompt_table.
    encoder_prompt: for an encoder-decoder model: the encoder's input; `prompt` is then the decoder's, empty
                for the model's own start. Without it `prompt` is for the encoder.
    streaming:  True: an Event for every step with new tokens; False: one Event per finished sequence.
    draft:      a guess of the next tokens; those that the model confirms are accepted in one step.
    prompt_table: [n, hidden_size] float16 or float32, embeddings for the ids beyond the vocabulary.
    cache_salt: requests share KV blocks of equal prefixes only if this is equal, too.
    pooling:    what to compute instead of new tokens; `params` is then ignored. None: new tokens.
    """

    prompt: tuple[int, ...]
    params: SamplingConfig = field(default_factory=SamplingConfig)
    lora: LoraInput | LoraMix | None = None
    streaming: bool = False
    request_id: str = ""
    draft: tuple[int, ...] = ()
    prompt_table: np.ndarray | None = None
    retention: Retention | None = None
    encoder_prompt: tuple[int, ...] = ()
    cache_salt: str = ""
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            _check_pooled(self)
        if self.params.beam_width > 1:
            if self.streaming:
                raise RequestError("streaming needs beam_width 1: beams may still change their beginning")
            if self.draft:
                raise RequestError("draft_input_ids need beam_width 1")
            if isinstance(self.lora, LoraInput) and self.lora.follow:
                raise RequestError("lora_version follow needs beam_width 1: beams keep the version they have")

    @cached_property
    def table_digest(self) -> str:
        """Digest of prompt_table. Empty without one. Computed once for all sequences."""
        if self.prompt_table is None:
            return ""
        return blake2b(np.ascontiguousarray(self.prompt_table).data, digest_size=20).hexdigest()


def _priority(name: str, priority: int, duration: int | None) -> None:
    require(0 <= priority <= 100, name, "must be from 0 to 100", priority)
    name = name.replace("priorit", "duration_ms of priorit")
    require(duration is None or duration >= 0, name, "must be >= 0 or -1", duration)


def _check_pooled(request: Request) -> None:
    params = request.params
    logits = params.return_context_logits or params.return_generation_logits or params.return_log_probs
    wrong = {
        "streaming": request.streaming,
        "draft_input_ids": request.draft,
        "beam_width": params.beam_width > 1,
        "num_return_sequences": params.num_return_sequences > 1,
        "guided_decoding_guide": params.guide,
        "logits or log probabilities": logits,
    }
    for name, value in wrong.items():
        if value:
            raise RequestError(f"a request for pooled outputs generates no tokens: leave {name} out")

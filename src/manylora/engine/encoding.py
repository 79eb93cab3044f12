"""What is different for encoder-decoder models: requests, and the inputs of the encoder."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate

from manylora.config.engine import EncoderConfig
from manylora.engine.inputs import StepInputs
from manylora.engine.sequence import Sequence
from manylora.errors import RequestError
from manylora.request import Request


def for_encoder(request: Request, encoder: EncoderConfig | None) -> Request:
    """The request with a prompt for the encoder and one for the decoder. Raises RequestError for what is not
    supported.

    encoder: None: the model has no encoder, and takes no encoder_prompt.
    """
    if encoder is None:
        if request.encoder_prompt:
            raise RequestError("this model has no encoder: leave decoder_input_ids out")
        return request
    if request.params.beam_width > 1:
        raise RequestError("beam_width must be 1: beam search is not supported on encoder-decoder models")
    if request.draft:
        raise RequestError("draft_input_ids are not supported on encoder-decoder models: leave them out")
    if request.prompt_table is not None:
        raise RequestError("prompt_embedding_table is not supported on encoder-decoder models: leave it out")
    if not request.encoder_prompt:
        return replace(request, encoder_prompt=request.prompt, prompt=(encoder.decoder_start_id,))
    return replace(request, prompt=request.prompt or (encoder.decoder_start_id,))


def check_encoder_prompt(ids: Many[int], vocab_size: int, max_seq_len: int, max_rows: int) -> None:
    """Raises RequestError. max_rows: of one step, in which the encoder reads its whole prompt."""
    limit = min(max_seq_len, max_rows)
    if not ids:
        raise RequestError("A value is required for input_ids: the encoder's prompt has no tokens")
    if len(ids) > limit:
        raise RequestError(
            f"Prompt length ({len(ids)}) exceeds maximum input length ({limit}) of the encoder. Shorten the "
            "prompt or serve with a larger max_seq_len and max_num_tokens"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(f"input_ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")


def encoder_inputs(sequences: Many[Sequence], tokens_per_block: int) -> StepInputs:
    """The encoder's whole prompts, and the slots of the keys and values computed from them. No logits."""
    size, lengths = tokens_per_block, [sequence.num_encoder for sequence in sequences]
    return StepInputs(
        input_ids=[token for sequence in sequences for token in sequence.request.encoder_prompt],
        positions=[position for length in lengths for position in range(length)],
        starts=[0, *accumulate(lengths)],
        lengths=lengths,
        blocks=[sequence.kv.cross_blocks for sequence in sequences],
        slots=[
            sequence.kv.cross_blocks[position // size] * size + position % size
            for sequence, length in zip(sequences, lengths, strict=True)
            for position in range(length)
        ],
        logits_rows=[],
    )

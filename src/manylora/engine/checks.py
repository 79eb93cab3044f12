"""What a request may ask of this engine."""

from __future__ import annotations

import numpy as np

from manylora.config import EngineConfig, ModelConfig
from manylora.engine.encoding import check_encoder_prompt
from manylora.errors import RequestError
from manylora.request import Request

__all__ = ["check_request"]


def check_request(request: Request, config: EngineConfig, model: ModelConfig, max_seq_len: int) -> None:
    """Raises RequestError naming the first thing that cannot be served. max_seq_len: prompt and output."""
    _check_prompt(request, config, model, max_seq_len)
    _check_params(request, config, model)
    if request.draft:
        _check_draft(request, config, model, max_seq_len)


def _check_prompt(request: Request, config: EngineConfig, model: ModelConfig, max_seq_len: int) -> None:
    length, vocab = len(request.prompt), model.vocab_size
    if length == 0:
        raise RequestError("A value is required for input_ids: the prompt has no tokens")
    limit, encoded = max_seq_len - 1, len(request.encoder_prompt)
    if model.encoder is not None:
        check_encoder_prompt(request.encoder_prompt, vocab, max_seq_len, config.max_num_tokens - 1)
    if not config.enable_chunked_context:
        limit = min(limit, config.max_num_tokens - encoded)
    if length > limit:
        raise RequestError(
            f"Prompt length ({length}) exceeds maximum input length ({limit}). Shorten the prompt or "
            "serve with a larger max_seq_len"
        )
    limit = vocab + (0 if request.prompt_table is None else len(request.prompt_table))
    if not 0 <= min(request.prompt) <= max(request.prompt) < limit:
        raise RequestError(
            f"input_ids must be in [0, {limit}), got {min(request.prompt)} to {max(request.prompt)}"
        )


def _check_params(request: Request, config: EngineConfig, model: ModelConfig) -> None:
    params, hidden = request.params, model.hidden_size
    if params.beam_width > config.max_beam_width:
        raise RequestError(
            f"beam_width must be at most max_beam_width ({config.max_beam_width}) of this server, "
            f"got {params.beam_width}"
        )
    if params.beam_width > 1 and 2 * params.beam_width > model.vocab_size:
        raise RequestError(f"beam_width must be at most half the vocabulary, got {params.beam_width}")
    if params.logit_bias is not None and params.logit_bias.size > model.vocab_size:
        raise RequestError(
            f"embedding_bias must have at most one value for each of the {model.vocab_size} tokens, "
            f"got {params.logit_bias.size}"
        )
    table = request.prompt_table
    if table is not None and (table.ndim != 2 or table.shape[1] != hidden or not np.isfinite(table).all()):
        raise RequestError(
            f"prompt_embedding_table must hold finite rows of {hidden} values, got shape {table.shape}"
        )


def _check_draft(request: Request, config: EngineConfig, model: ModelConfig, max_seq_len: int) -> None:
    count, params = len(request.draft), request.params
    if params.guide is not None:
        raise RequestError("draft_input_ids cannot be combined with guided decoding")
    if not 0 <= min(request.draft) <= max(request.draft) < model.vocab_size:
        raise RequestError(f"draft_input_ids must be in [0, {model.vocab_size})")
    room = min(params.max_tokens, max_seq_len - len(request.prompt)) - 1
    if count > room or count >= config.max_num_tokens:
        raise RequestError(
            f"draft_input_ids holds {count} tokens; at most {min(room, config.max_num_tokens - 1)} "
            "can be verified: fewer than request_output_len and than max_num_tokens of this server"
        )

"""Fields of other servers: those without effect here, and what to use instead of the others."""

from __future__ import annotations

from typing import Any

# Without effect, with the values that are accepted. Empty: any value.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "frequency_penalty_decay": (),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "n_best": (),
    "return_context_logits": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "top_p_min": (0,),
    "use_beam_search": (False,),
}
ADAPTER = "name the adapter in model, lora_model or lora_request"
BEAMS = "beam search is available in Python (LLM) and from Triton (beam_width)"
GUIDE = "use structured_outputs or response_format"
LENGTH = "use max_tokens"
REASONING = "reasoning stays in the text of the output: leave it out"
TEXT = "use prompt"
TEXT_ONLY = "only text is served"
WHOLE = "this server does both prefill and decode: leave it out"
INSTEAD = {
    "adapter": ADAPTER,
    "adapter_name": ADAPTER,
    "lora_adapter": ADAPTER,
    "lora_id": ADAPTER,
    "lora_name": ADAPTER,
    "lora_task_id": ADAPTER,
    "beam_width": BEAMS,
    "early_stopping": BEAMS,
    "length_penalty": BEAMS,
    "use_beam_search": BEAMS,
    "guided_decoding": GUIDE,
    "guided_decoding_guide": GUIDE,
    "guided_decoding_guide_type": GUIDE,
    "max_length": LENGTH,
    "max_new_tokens": LENGTH,
    "n_predict": LENGTH,
    "num_predict": LENGTH,
    "include_reasoning": REASONING,
    "separate_reasoning": REASONING,
    "inputs": TEXT,
    "text_input": TEXT,
    "image": TEXT_ONLY,
    "image_url": TEXT_ONLY,
    "input_audio": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "video_url": TEXT_ONLY,
    "disaggregated_params": WHOLE,
    "kv_transfer_params": WHOLE,
    "chat_template": "the operator sets it (--chat-template); chat_template_kwargs are its variables",
    "documents": "put them into messages, or into chat_template_kwargs if the template reads them",
    "enable_thinking": "put it into chat_template_kwargs",
    "end_id": "use stop_token_ids",
    "extra_body": "put what it holds beside the other fields, as the openai package does",
    "input": "it is a field of /v1/responses and /v1/embeddings",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or a guide",
    "lora_local_path": "use lora_path",
    "messages": "it is a field of /v1/chat/completions",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "parameters": "put what it holds beside the other fields",
    "prompt": "it is a field of /v1/completions",
    "random_seed": "use seed",
    "return_tokens_as_token_ids": "use return_token_ids",
    "sampling_params": "put what it holds beside the other fields",
    "stop_words": "use stop",
    "streaming": "use stream",
}
"""What to do instead, by the name of a field that is not accepted."""


def instead_of(field: str) -> str:
    """What to do instead of giving a field, which may be in a part of the body: messages.0.content."""
    return INSTEAD.get(field.rpartition(".")[2], "leave it out")

"""Requests to `tensorrt_llm` as tensors, for the engine in this process and for a real tritonserver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PROMPT = [72, 101, 108, 108, 111, 33]
SAMPLED = {"temperature": 3.0, "runtime_top_k": 0, "runtime_top_p": 0.99, "random_seed": 7}
UINT64 = ("lora_task_id", "random_seed", "lora_mix_task_ids", "prompt_table_extra_ids")
WIDE = (
    "input_ids", "draft_input_ids", "stop_words_list", "bad_words_list", "embedding_bias", "lora_weights",
    "lora_config", "lora_name", "lora_ckpt_source", "lora_mix_task_ids", "lora_mix_names", "lora_mix_scales",
    "lora_version", "guided_decoding_guide_type", "guided_decoding_guide", "pooling",
    "skip_cross_attn_blocks", "lookahead_window_size",
)  # fmt: skip
"""Inputs that keep their dimensions behind the batch's; of others the model sees [batch]."""
CHANGING = ("kv_cache_", "request_number", "lora_cache_tier", "lora_versions", "previous_ids")
"""Beginnings of outputs that depend on the requests before."""

TENSORS: dict[str, dict[str, Any]] = {
    "greedy": {"return_generation_logits": True, "return_log_probs": True},
    "without the prompt": {"exclude_input_in_output": True},
    "logits of the prompt": {"return_context_logits": True, "request_output_len": 1},
    "a stream": {"streaming": True},
    "a stream with log probabilities": {"streaming": True, "return_log_probs": True},
    "an adapter": {"lora": 1, "return_generation_logits": True},
    "another adapter": {"lora": 2, "return_generation_logits": True},
    "an adapter in a stream": {"lora": 2, "streaming": True},
    "an adapter by its name": {"lora_name": "{name}", "return_generation_logits": True},
    "a mix of names": {"lora_mix_names": "{name}", "lora_mix_scales": 0.5, "return_generation_logits": True},
    "a stop word": {"stop_words_list": "{stop}"},
    "a bad word": {"bad_words_list": "{stop}"},
    "an end": {"end_id": "{third}"},
    "a length of at least": {"end_id": "{third}", "min_length": 5},
    "samples": {**SAMPLED, "num_return_sequences": 3},
    "sampled from few": {**SAMPLED, "runtime_top_k": 5},
    "sampled from the likely": {**SAMPLED, "runtime_top_p": 0.6},
    "sampled with min_p": {**SAMPLED, "min_p": 0.2},
    "top_p that decays": {
        **SAMPLED, "runtime_top_p": 0.95, "runtime_top_p_decay": 0.7, "runtime_top_p_min": 0.2,
        "runtime_top_p_reset_ids": 5,
    },
    "penalties": {"presence_penalty": 20.0, "frequency_penalty": 20.0, "repetition_penalty": 3.0},
    "penalties without the prompt": {"presence_penalty": -20.0, "prompt_ignore_length": 100},
    "no beams": {"beam_width": 0},
    "beams": {"beam_width": 3, "return_log_probs": True},
    "beams, longer ones first": {"beam_width": 2, "len_penalty": 2.0, "early_stopping": False},
    "a draft": {"draft_input_ids": "{draft}", "return_perf_metrics": True},
    "a regex": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]{3}x"},
    "an embedding": {"pooling": "last", "request_output_len": 1},
    "refused: no prompt": {"input_ids": []},
    "refused: another length": {"input_lengths": 9},
    "refused: no output": {"request_output_len": 0},
    "refused: a long prompt": {"input_ids": [5] * 3000},
    "refused: an unknown token": {"input_ids": [5, 99999]},
    "refused: a negative token": {"input_ids": [5, -1]},
    "refused: a temperature below 0": {"temperature": -1.0},
    "refused: a top_p above 1": {"runtime_top_p": 1.5},
    "refused: a top_k below 0": {"runtime_top_k": -1},
    "refused: many beams": {"beam_width": 99},
    "refused: beams in a stream": {"beam_width": 2, "streaming": True},
    "refused: no samples": {"num_return_sequences": 0},
    "refused: a repetition penalty of 0": {"repetition_penalty": 0.0},
    "refused: a regex": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
    "refused: an unknown guide": {"guided_decoding_guide_type": "poem", "guided_decoding_guide": "x"},
    "refused: half a guide": {"guided_decoding_guide_type": "regex"},
    "refused: an id that is not cached": {"lora_task_id": 987654321},
    "refused: weights alone": {"lora_task_id": 4321, "lora_weights": [[0.0] * 8]},
    "refused: weights of another size": {
        "lora_task_id": 4322, "lora_weights": [[0.0] * 8], "lora_config": [[1, 0, 4]],
    },
    "refused: an unknown module": {
        "lora_task_id": 4323, "lora_weights": [[0.0] * 8], "lora_config": [[77, 0, 4]],
    },
    "refused: an unknown name": {"lora_name": "nobody"},
    "refused: a name outside": {"lora_name": "../secret"},
    "refused: a name and an id": {"lora_name": "{name}", "lora_task_id": 1},
    "refused: scales alone": {"lora_mix_scales": 0.5},
    "refused: a mix of nine": {"lora_mix_task_ids": [1] * 9},
    "refused: an unknown pooling": {"pooling": "sum"},
    "refused: lookahead": {"lookahead_window_size": 3},
    "refused: cross attention": {"skip_cross_attn_blocks": True},
    "refused: stop words of another form": {"stop_words_list": [[1, 2, 3]]},
}  # fmt: skip
Tensors = Callable[[int], tuple[np.ndarray, np.ndarray]]
Answer = dict[str, np.ndarray]


class World:
    """What scenarios mean on a server. tensors: weights and config of an adapter by its id. name: of one in
    the catalog. greedy: tokens after PROMPT.
    """

    def __init__(self, tensors: Tensors, name: str, greedy: Sequence[int], new: int = 6) -> None:
        self._tensors, self._new = tensors, new
        third = greedy[2]
        self._meaning: dict[str, Any] = {
            "{name}": name,
            "{third}": third,
            "{stop}": [[greedy[1], third], [2, -1]],
            "{draft}": [*greedy[:2], (third + 1) % 200],
        }

    def arrays(self, given: dict[str, Any]) -> dict[str, np.ndarray]:
        """The inputs with their batch dimension: [1], or [1, …]."""
        values = {"input_ids": PROMPT, "request_output_len": self._new, **given}
        values.setdefault("input_lengths", len(values["input_ids"]))
        task_id = values.pop("lora", None)
        meant = {
            name: self._meaning.get(value, value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        found = {name: array(name, value) for name, value in meant.items()}
        if task_id is not None:
            weights, config = self._tensors(task_id)
            found |= {"lora_task_id": np.array([task_id], np.uint64), "lora_weights": weights}
            found["lora_config"] = config
        return found


def array(name: str, value: Any) -> np.ndarray:
    one = value[0] if isinstance(value, list) and value else value
    one = one[0] if isinstance(one, list) and one else one
    dtype: Any = np.uint64 if name in UINT64 else np.int32
    if isinstance(one, str | bool | float):
        dtype = {str: np.object_, bool: np.bool_, float: np.float32}[type(one)]
        value = value.encode() if isinstance(value, str) else value
    wide = [value] if isinstance(value, list) else [[value]] if name in WIDE else [value]
    return np.array(wide, dtype)


def settled(responses: Sequence[Answer], streaming: bool) -> Any:
    """Responses without what changes; the pieces of a stream together, as their number may differ."""
    found = [
        {
            name: value
            for name, value in one.items()
            if not name.startswith(CHANGING) and not name.endswith("_time_ns")
        }
        for one in responses
    ]
    if not streaming:
        return sorted(found, key=lambda one: one["sequence_index"].item() if "sequence_index" in one else 0)
    ids = [int(token) for one in found for token in one["output_ids"].ravel() if token >= 0]
    last = {name: value for name, value in found[-1].items() if name not in ("output_ids", "sequence_length")}
    return {"output_ids": ids, "last": last}

"""Parts of `tensorrt_llm_bls`: mapping of tensors between models, checks, batches, stop words matched on
text, and speculative decoding with two models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from manylora.errors import RequestError
from manylora.generation.continuation import StopTexts
from manylora.generation.sampling import parameters_of
from manylora.wire.server_types import Arrays, ServerTensor
from manylora.wire.shape_guard import read_inputs
from manylora.wire.tensor_table import ENSEMBLE_OUTPUTS

TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "lora_task_id": "LORA_TASK_ID",
    "lora_name": "LORA_NAME",
}
SAME = (
    "return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics",
    "return_kv_cache_reuse_stats", "beam_width", "num_return_sequences", "exclude_input_in_output",
    "prompt_embedding_table", "prompt_vocab_size", "lora_task_id", "lora_config", "lora_invocation_tokens",
    "lora_name", "lora_ckpt_source", "lora_mix_task_ids", "lora_mix_names", "lora_mix_scales", "lora_version",
    "guided_decoding_guide_type", "guided_decoding_guide",
)  # fmt: skip
TWO_NAMES = {one.name: one.text for one in parameters_of("bls") if one.name in ("seed", "min_tokens")}
"""Names of inputs in later releases, and their earlier names."""
TO_ENGINE = {
    **{one.text: one.tensor for one in parameters_of("bls")},
    **TWO_NAMES,
    **{name: name for name in SAME},
    "stream": "streaming",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    "OUT_SAMPLING_DEFAULTS": "sampling_defaults",
}
TO_POSTPROCESSING = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "previous_ids": "PREVIOUS_IDS",
    "finish_reason": "FINISH_REASON",
    "lora_text": "LORA_TEXT",
}
PASSED_ON = [tensor.name for tensor in ENSEMBLE_OUTPUTS if tensor.name != "text_output"]
"""Outputs of the engine's model that are passed to the client unchanged."""
REFUSED = ("image_input", "image_bytes_input", "image_url_input", "video_bytes_input")


def check_inputs(values: Arrays, accumulate: bool, has_draft_model: bool) -> None:
    """Raises RequestError, with TensorRT-LLM's texts where there is one."""
    for name in REFUSED:
        if name in values and values[name].size:
            raise RequestError(f"input {name} is not supported by this server: leave it out")
    if "text_input" not in values:
        raise RequestError("text_input is required")
    for name, other in TWO_NAMES.items():
        if name in values and other in values and (values[name] != values[other]).any():
            raise RequestError(f"{name} and {other} are one setting, and differ: send one of them")
    if "max_tokens" not in values or (values["max_tokens"] < 1).any():
        raise RequestError("max_tokens must be a single value > 0")

    def any_of(name: str, limit: float = 0) -> bool:
        return name in values and bool((values[name].astype(np.float64) > limit).any())

    if any_of("stream") and accumulate and any_of("beam_width", 1):
        raise RequestError("Accumulation of tokens is only implemented for beam width = 1")
    if "num_draft_tokens" in values and (values["num_draft_tokens"] < 0).any():
        raise RequestError(f"num_draft_tokens must be >= 0, got {values['num_draft_tokens'].min()}")
    if any_of("num_draft_tokens"):
        if not has_draft_model:
            raise RequestError("cannot perform speculative decoding without draft model")
        for name, text in (("stream", "streaming is"), ("return_context_logits", "context logits are")):
            if any_of(name):
                raise RequestError(f"{text} not supported with speculative decoding")
        if any_of("use_draft_logits"):
            raise RequestError("use_draft_logits is not supported by this server: send false")
        for name in ("beam_width", "num_return_sequences"):
            if any_of(name, 1):
                raise RequestError(f"{name} must be 1 with speculative decoding")


def items(values: Arrays) -> list[dict[str, np.ndarray]]:
    """Each item of the batch with a batch dimension of one. Scalars as [1, 1]."""
    count = len(values["text_input"])
    for name, array in values.items():
        if len(array) != count:
            raise RequestError(
                f"Expected batch size doesn't match batch size for tensor {name}. "
                f"Expected {count} got {len(array)}"
            )
    return [{name: _slice(array, index) for name, array in values.items()} for index in range(count)]


def lora_weights_of_items(tensor: ServerTensor | None, count: int) -> list[np.ndarray | ServerTensor | None]:
    """One per item of a batch. For a single item it is passed through, because NumPy has no bfloat16."""
    if tensor is None or count == 1:
        return [tensor] * count
    try:
        rows = read_inputs([tensor])["lora_weights"]
    except RequestError:
        raise
    except Exception:
        raise RequestError(
            "lora_weights as BF16 can be sent with a batch of one only: send it once before the batch"
        ) from None
    return [rows[index : index + 1] for index in range(count)]


class StopWords:
    """Stop words for all sequences of a request. They are matched on text, so it does not matter how a word
    is tokenised.

    skip: as in TextStop. repeated: every text starts from the beginning again, as with accumulated tokens.
    """

    def __init__(self, words: Sequence[str], skip: int = 0, repeated: bool = False) -> None:
        self._words, self._skip, self._repeated = words, skip, repeated
        self._sequences: dict[tuple[int, int], TextStop] = {}

    @property
    def all_stopped(self) -> bool:
        """Whether every sequence with text has reached a stop word."""
        return bool(self._sequences) and all(stop.stopped for stop in self._sequences.values())

    def cut(self, sequence: int, texts: Sequence[str]) -> list[str]:
        """The next text of each beam of a sequence, cut after a stop word."""
        if not self._words:
            return list(texts)
        cut = []
        for beam, text in enumerate(texts):
            place = (sequence, beam)
            if self._repeated or place not in self._sequences:
                self._sequences[place] = TextStop(self._words, self._skip)
            cut.append(self._sequences[place].feed(text))
        return cut


class TextStop:
    """Stop words for one sequence. The stop word itself stays in the output, as for words matched on tokens.

    skip: characters at the start in which no word counts (the prompt, if it is echoed).
    """

    def __init__(self, words: Sequence[str], skip: int = 0) -> None:
        self._words = StopTexts(words)
        self._skip = skip
        self._tail = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The part of the next text that is output: up to the end of the first stop word, and nothing after
        it.
        """
        if self.stopped or not self._words:
            return "" if self.stopped else text
        passed = min(self._skip, len(text))
        self._skip -= passed
        seen = self._tail + text[passed:]
        ends = [at + len(word) for at, word in self._words.find(seen)]
        if ends:
            self.stopped = True
            return text[: passed + min(ends) - len(self._tail)]
        longest = self._words.longest
        self._tail = seen[-(longest - 1) :] if longest > 1 else ""
        return text


def speculate(
    prompt: list[int],
    max_tokens: int,
    draft_tokens: int,
    guess: Callable[[list[int], int], list[int]],
    confirm: Callable[[list[int], list[int]], tuple[list[int], bool]],
) -> list[int]:
    """The new tokens of speculative decoding: one model drafts, the other verifies.

    guess: (all tokens so far, count) -> at most `count` tokens of the draft model. confirm: (all tokens so
    far, drafted tokens) -> the tokens that the target model accepts with one of its own, and whether the
    sequence has ended.
    """
    output: list[int] = []
    ended = False
    while len(output) < max_tokens and not ended:
        tokens = [*prompt, *output]
        count = min(draft_tokens, max_tokens - len(output) - 1)
        new, ended = confirm(tokens, guess(tokens, count) if count > 0 else [])
        output += new
    return output


def _slice(array: np.ndarray, index: int) -> np.ndarray:
    one = array[index : index + 1]
    return one.reshape(1, 1) if one.ndim == 1 else one

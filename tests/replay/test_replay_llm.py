"""Protects what `LLM` answers, scenario by scenario: on the demo's model and adapters, whose files are the
same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Replay, without

from manylora import (
    LLM,
    GuidedDecodingParams,
    KvCacheConfig,
    LoraConfig,
    LoRARequest,
    PeftCacheConfig,
    SamplingParams,
)
from manylora.doors.python import PoolingParams
from manylora.errors import ManyloraError

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
FOLDERS = {"demo": DEMO}
FRANCE = "What is the capital of France?\nAnswer:"
USA = "美国的首都在哪里? \\n答案:"
ABOUT = "日本について教えてください。 \\n答え:"
IDS = [1, 331, 434, 297, 318, 316, 310, 1150, 36, 204, 289, 31]  # FRANCE
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
QKV = ["attn_q", "attn_k", "attn_v"]
NAMES = ("chinese", "japanese")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "at": {"enum": [1, 2]}},
    "required": ["city", "at"],
    "additionalProperties": False,
}
LOGITS = {"return_generation_logits": True}
SAMPLED = {"temperature": 3.0, "top_k": 0, "seed": 5, "max_tokens": 12}

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": FRANCE, "logprobs": 1},
    "greedy, a long answer": {"prompt": ABOUT, "max_tokens": 100, "lora": "japanese"},
    "an adapter": {"prompt": FRANCE, "lora": "chinese", "logprobs": 0},
    "another adapter": {"prompt": USA, "lora": "japanese", "logprobs": 0},
    "an adapter with a scale": {"prompt": FRANCE, "lora": [("chinese", 0.5)], **LOGITS},
    "an adapter with scale 0": {"prompt": FRANCE, "lora": [("chinese", 0.0)]},
    "a mix": {"prompt": FRANCE, "lora": [("chinese", 0.7), ("japanese", 0.4)], **LOGITS},
    "a mix with a negative scale": {"prompt": USA, "lora": [("chinese", 1.2), ("japanese", -0.3)]},
    "an adapter that follows": {"prompt": FRANCE, "lora": "chinese", "follow": True},
    "token ids": {"prompt": IDS},
    "a dict of token ids": {"prompt": {"prompt_token_ids": IDS}},
    "a cut prompt": {"prompt": FRANCE, "truncate_prompt_tokens": 4, "max_tokens": 6},
    "no special tokens before the prompt": {"prompt": FRANCE, "add_special_tokens": False},
    "one token": {"prompt": FRANCE, "max_tokens": 1},
    "at least nine tokens": {"prompt": FRANCE, "min_tokens": 9, "max_tokens": 12},
    "past the end": {"prompt": FRANCE, "ignore_eos": True, "max_tokens": 12},
    "no end token": {"prompt": FRANCE, "end_id": -1, "max_tokens": 12},
    "another end token": {"prompt": FRANCE, "end_id": 78},
    "a stop text": {"prompt": ABOUT, "lora": "japanese", "max_tokens": 64, "stop": "国"},
    "a stop text across tokens": {"prompt": FRANCE, "stop": ["none", "ri"]},
    "a stop text that is kept": {"prompt": FRANCE, "stop": "ar", "include_stop_str_in_output": True},
    "a stop token": {"prompt": FRANCE, "stop_token_ids": [78]},
    "a stop token that is kept": {
        "prompt": FRANCE, "stop_token_ids": [78], "include_stop_str_in_output": True,
    },
    "special tokens in the text": {
        "prompt": FRANCE, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 8,
    },
    "a stop text of a special token": {
        "prompt": FRANCE, "ignore_eos": True, "skip_special_tokens": False, "stop": "</s>",
    },
    "no text": {"prompt": FRANCE, "detokenize": False},
    "a bad text": {"prompt": FRANCE, "bad": " Paris", "max_tokens": 8},
    "a bad token": {"prompt": FRANCE, "bad_token_ids": [415], "max_tokens": 8},
    "a repetition penalty": {
        "prompt": ABOUT, "lora": "japanese", "repetition_penalty": 4.0, "max_tokens": 24, "logprobs": 0,
    },
    "a presence penalty": {"prompt": ABOUT, "lora": "japanese", "presence_penalty": 30.0, "max_tokens": 24},
    "a frequency penalty": {"prompt": ABOUT, "lora": "japanese", "frequency_penalty": 30.0, "max_tokens": 24},
    "penalties without the prompt": {
        "prompt": FRANCE, "presence_penalty": -9.0, "prompt_ignore_length": 100, "max_tokens": 12,
        "ignore_eos": True,
    },
    "penalties with the prompt": {
        "prompt": FRANCE, "presence_penalty": -9.0, "max_tokens": 12, "ignore_eos": True,
    },
    "a bias": {"prompt": FRANCE, "bias": {100: 50.0}, "max_tokens": 4},
    "sampled": {"prompt": FRANCE, **SAMPLED, "logprobs": 0},
    "sampled with an adapter": {"prompt": FRANCE, **SAMPLED, "lora": "chinese"},
    "sampled with another seed": {"prompt": FRANCE, **SAMPLED, "seed": 6},
    "top_k": {"prompt": FRANCE, **SAMPLED, "top_k": 4},
    "top_p": {"prompt": FRANCE, **SAMPLED, "top_p": 0.5},
    "top_p that decays": {
        "prompt": FRANCE, **SAMPLED, "top_p": 0.99, "top_p_decay": 0.6, "top_p_min": 0.2,
        "top_p_reset_ids": 36,
    },
    "min_p": {"prompt": FRANCE, **SAMPLED, "min_p": 0.3},
    "three samples": {"prompt": FRANCE, **SAMPLED, "n": 3},
    "the best two of four": {"prompt": FRANCE, **SAMPLED, "n": 2, "best_of": 4, "logprobs": 0},
    "logits of the prompt": {"prompt": IDS[:4], "return_context_logits": True, "max_tokens": 1},
    "logits of the output": {"prompt": FRANCE, **LOGITS},
    "beams": {"prompt": FRANCE, "use_beam_search": True, "n": 3, "best_of": 4, "logprobs": 0},
    "beams of an adapter": {"prompt": USA, "lora": "japanese", "use_beam_search": True, "n": 2},
    "beams, longer ones first": {
        "prompt": FRANCE, "use_beam_search": True, "n": 3, "length_penalty": 3.0, "early_stopping": 0,
    },
    "beams that differ": {
        "prompt": FRANCE, "use_beam_search": True, "n": 3, "beam_search_diversity_rate": 2.0,
    },
    "a regex": {"prompt": FRANCE, "guide": {"regex": "[a-c]{4}x"}},
    "a schema": {"prompt": FRANCE, "guide": {"json": SCHEMA}, "max_tokens": 40},
    "a grammar": {"prompt": FRANCE, "guide": {"grammar": 'root ::= "yes" | "no"'}, "lora": "chinese"},
    "any JSON": {"prompt": FRANCE, "guide": {"json_object": True}, "max_tokens": 6},
}  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "chat": {"messages": CHAT},
    "chat with an adapter": {"messages": CHAT, "lora": "japanese"},
    "chat that is continued": {
        "messages": [*CHAT, {"role": "assistant", "content": "Pa"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "chat without the assistant's turn": {"messages": CHAT, "add_generation_prompt": False},
    "chat with a template": {"messages": CHAT, "chat_template": "{{ messages[0].content }}\nAnswer:"},
    "chat in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": USA}]}]},
}
REFUSED_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature below 0": {"temperature": -1.0},
    "temperature that is no number": {"temperature": "hot"},
    "top_p above 1": {"top_p": 1.5},
    "top_k below 0": {"top_k": -3},
    "min_p above 1": {"min_p": 2.0},
    "no tokens": {"max_tokens": 0},
    "no samples": {"n": 0},
    "best_of below n": {"n": 3, "best_of": 2},
    "more beams than the model's": {"use_beam_search": True, "n": 5},
    "a length penalty without bound": {"use_beam_search": True, "best_of": 2, "length_penalty": 1e4},
    "many log probabilities": {"logprobs": 5},
    "n-grams": {"no_repeat_ngram_size": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "a logits processor": {"logits_processor": print},
    "a stop text that is no text": {"stop": 5},
    "an unknown field": {"temprature": 1.0},
    "a bad regex": {"guide": {"regex": "("}},
    "two guides": {"guide": {"regex": "a", "json_object": True}},
    "a long bias": {"embedding_bias": [0.0] * 5000},
    "a seed below 0": {"seed": -1},
    "a repetition penalty of 0": {"repetition_penalty": 0.0},
}
REFUSED_PROMPTS: dict[str, dict[str, Any]] = {
    "an empty prompt": {"prompt": {"prompt_token_ids": []}},
    "a prompt that is too long": {"prompt": [5] * 3000},
    "a prompt of unknown tokens": {"prompt": [5, 99999]},
    "an unknown key of a prompt": {"prompt": {"text": FRANCE}},
    "an image": {"prompt": {"prompt": FRANCE, "multi_modal_data": {"image": 1}}},
    "an unknown name": {"prompt": FRANCE, "lora": "klingon"},
    "a mix of nine": {"prompt": FRANCE, "lora": [("chinese", 1.0)] * 9},
    "a scale that is no number": {"prompt": FRANCE, "lora": [("chinese", float("nan"))]},
}
REFUSED_MODELS: dict[str, dict[str, Any]] = {
    "an unknown argument": {"max_model_length": 5},
    "vLLM's argument": {"gpu_memory_utilisation": 0.5},
    "lora_root without adapters": {"lora_root": DEMO / "adapters"},
    "a cache without adapters": {"peft_cache_config": PeftCacheConfig()},
    "an unknown dtype": {"dtype": "float8"},
    "an unknown device": {"device": "tpu"},
    "no sequences": {"max_batch_size": 0},
    "a longer context than the model's": {"max_seq_len": 5000},
    "an unknown guide backend": {"guided_decoding_backend": "outlines"},
    "an unknown policy": {"batch_scheduler_policy": "random"},
    "a cache that holds no adapter": {
        "lora_config": LoraConfig(max_lora_rank=64),
        "peft_cache_config": PeftCacheConfig(host_cache_size=1000),
    },
    "a KV cache of no tokens": {"kv_cache_config": KvCacheConfig(max_tokens=0)},
}
MADE: dict[str, Callable[[], Any]] = {
    "an id below 0": lambda: LoRARequest("a", -1, str(DEMO)),
    "a path that is not there": lambda: LoRARequest("a", 1, "/no/such/folder"),
    "a source that is unknown": lambda: LoRARequest("a", 1, str(DEMO), "gguf"),
    "a version that is unknown": lambda: LoRARequest("a", 1, str(DEMO), lora_version="newest"),
    "a module that is unknown": lambda: LoraConfig(lora_target_modules=["attn_x"]),
    "modules that are no list": lambda: LoraConfig(lora_target_modules="attn_q"),  # type: ignore[arg-type]
    "a rank of 0": lambda: LoraConfig(max_lora_rank=0),
    "a share above 1": lambda: PeftCacheConfig(device_cache_percent=1.5),
    "a prefetch folder": lambda: PeftCacheConfig(lora_prefetch_dir="a"),
    "a fraction above 1": lambda: KvCacheConfig(free_gpu_memory_fraction=1.5),
    "attention windows": lambda: KvCacheConfig(max_attention_window=[5]),
    "a structural tag": lambda: GuidedDecodingParams(structural_tag=5),  # type: ignore[arg-type]
    "no guide": GuidedDecodingParams,
}
CALLS: dict[str, Callable[[LLM], Any]] = {
    "names of adapters": lambda llm: llm.lora_names(),
    "default parameters": lambda llm: llm.get_default_sampling_params(),
    "the configuration": lambda llm: configuration(llm),
    "a batch of prompts": lambda llm: [
        output(one) for one in llm.generate(
            [FRANCE, IDS, USA, ABOUT], [sampling({"max_tokens": n}) for n in (8, 2, 9, 5)],
            ["chinese", None, request("japanese"), [(request("chinese"), 0.5)]], False,
        )
    ],
    "no prompts": lambda llm: llm.generate([]),
    "a stream": lambda llm: stream(llm, max_tokens=40),
    "a stream with a stop text": lambda llm: stream(llm, max_tokens=40, stop="国"),
    "an adapter that comes as tensors": lambda llm: loaded(llm),
    "pins": lambda llm: pinned(llm),
    "embeddings": lambda llm: [np.array(one.outputs.embedding) for one in llm.embed([FRANCE, USA])],
    "embeddings of an adapter": lambda llm: [
        np.array(one.outputs.embedding) for one in llm.embed(FRANCE, lora_request="chinese")
    ],
    "embeddings that are not normalised": lambda llm: [
        np.array(one.outputs.embedding)
        for one in llm.embed(FRANCE, pooling_params=PoolingParams(use_activation=False))
    ],
    "a similarity": lambda llm: [one.outputs.score for one in llm.score(FRANCE, [USA, ABOUT])],
    "labels without a head": lambda llm: refusal(lambda: llm.classify(FRANCE)),
    "embeddings that are cut": lambda llm: refusal(
        lambda: llm.embed(FRANCE, pooling_params=PoolingParams(dimensions=8))
    ),
    "parameters of another number than prompts": lambda llm: refusal(
        lambda: llm.generate([FRANCE, USA], [SamplingParams()] * 3)
    ),
    "a stream of beams": lambda llm: refusal(
        lambda: llm.generate_async(FRANCE, SamplingParams(use_beam_search=True, n=2), streaming=True)
    ),
    "an id without a path": lambda llm: refusal(
        lambda: llm.generate(FRANCE, None, LoRARequest("nobody", 555, None), False)
    ),
    "an id with another path": lambda llm: refusal(
        lambda: [
            llm.generate(FRANCE, None, LoRARequest("x", 77, str(DEMO / "adapters" / name)), False)
            for name in NAMES
        ]
    ),
    "a folder that is no adapter": lambda llm: refusal(
        lambda: llm.generate(FRANCE, None, LoRARequest("base", 78, str(DEMO / "base")), False)
    ),
    "a chat without a role": lambda llm: refusal(lambda: llm.chat([{"content": "x"}])),
    "a chat that is a text": lambda llm: refusal(lambda: llm.chat("x")),  # type: ignore[arg-type]
}  # fmt: skip
SCENARIOS = [
    *GENERATE,
    *CHATS,
    *CALLS,
    *(f"refused: {name}" for name in (*REFUSED_SAMPLING, *REFUSED_PROMPTS, *MADE)),
    *(f"model refused: {name}" for name in REFUSED_MODELS),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = LoraConfig(lora_target_modules=QKV, max_lora_rank=16, max_loras=2, max_cpu_loras=4)
    with LLM(
        DEMO / "base", lora_config=config, lora_root=DEMO / "adapters", device="cpu", dtype="float32",
        guided_decoding_backend="xgrammar", max_seq_len=512, max_beam_width=4,
        kv_cache_config=KvCacheConfig(max_tokens=4096),
    ) as made:  # fmt: skip
        yield made


def request(name: str, follow: bool = False) -> LoRARequest:
    path = str(DEMO / "adapters" / name)
    return LoRARequest(name, 1 + NAMES.index(name), path, lora_version="follow" if follow else "keep")


def lora(given: dict[str, Any]) -> Any:
    chosen, follow = given.pop("lora", None), given.pop("follow", False)
    if isinstance(chosen, list):
        return [(request(name), scale) for name, scale in chosen]
    return request(chosen, follow) if chosen in NAMES else chosen


def sampling(given: dict[str, Any]) -> SamplingParams:
    bias, guide = given.pop("bias", None), given.pop("guide", None)
    if bias is not None:
        given["embedding_bias"] = np.zeros(1536, np.float32)
        given["embedding_bias"][list(bias)] = list(bias.values())
    if guide is not None:
        given["guided_decoding"] = GuidedDecodingParams(**guide)
    return SamplingParams(**given)


def output(made: Any) -> Any:
    """Without ids, times, and what depends on the requests before."""
    found = [
        {
            "text": one.text,
            "tokens": one.token_ids,
            "finish": one.finish_reason,
            "stop": one.stop_reason,
            "logprob": one.cumulative_logprob,
            "logprobs": one.logprobs
            and [[[i, p.logprob, p.rank] for i, p in entry.items()] for entry in one.logprobs],
            "logits": one.generation_logits,
            "versions": [[each.name, each.digest, each.start, each.end] for each in one.lora_versions],
        }
        for one in made.outputs
    ]
    answers = [
        {key: value for key, value in one.items() if isinstance(value, np.ndarray) or value not in (None, [])}
        for one in found
    ]
    logits = {} if made.context_logits is None else {"logits": made.context_logits}
    return {"prompt": made.prompt_token_ids, "outputs": answers, **logits}


def refusal(call: Callable[[], Any]) -> str:
    """The error's type and text."""
    try:
        call()
    except (ManyloraError, ValueError, TypeError) as error:
        return without(f"{type(error).__name__}: {error}", **FOLDERS)
    raise AssertionError("it is not refused")


def configuration(llm: LLM) -> dict[str, Any]:
    cache, stats = llm.config.lora, llm.stats()
    return {
        "max_seq_len": llm.config.max_seq_len,
        "targets": list(cache.target_modules),
        "rank": cache.max_lora_rank,
        "kv_blocks": stats.kv_blocks,
        "kv_bytes": stats.kv_bytes,
        "host_pages": stats.adapters.host_pages,
        "device_pages": stats.adapters.device_pages,
        "page_bytes": stats.adapters.page_bytes,
        "adapters": stats.adapters.max_device_adapters,
    }


def stream(llm: LLM, **options: Any) -> Any:
    """The pieces together: how many there are depends on who is quicker."""
    pieces = list(llm.generate_async(ABOUT, SamplingParams(**options), request("japanese"), streaming=True))
    return {
        "text": "".join(piece.outputs[0].text_diff for piece in pieces),
        "tokens": [token for piece in pieces for token in piece.outputs[0].token_ids_diff],
        "last": output(pieces[-1]),
    }


def loaded(llm: LLM) -> Any:
    """Rank 1 on one module, with values that are exact."""
    key = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(4):
        tensors[key.format(layer, "A")] = (torch.arange(192.0) % 7 - 3).reshape(1, 192) / 8
        tensors[key.format(layer, "B")] = (torch.arange(192.0) % 5 - 2).reshape(192, 1) / 8
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    asked = LoRARequest("tensors", 901, None)
    version = llm.load_adapter(asked, tensors, settings)
    made = llm.generate(FRANCE, SamplingParams(max_tokens=8), asked, False)
    return {"name": version.name, "digest": version.digest, **output(made)}


def pinned(llm: LLM) -> list[int]:
    counts = []
    for call in (llm.pin_lora, llm.unpin_lora):
        call(request("chinese"))
        llm.generate(FRANCE, SamplingParams(max_tokens=1), None, False)
        stats = llm.stats().adapters
        counts += [stats.host_pinned, stats.device_pinned]
    return counts


def answer(llm: LLM, given: dict[str, Any]) -> Any:
    chosen, prompt = lora(given), given.pop("prompt")
    return output(llm.generate(prompt, sampling(given), chosen, False))


def play(llm: LLM, name: str) -> Any:
    if name in GENERATE:
        return answer(llm, dict(GENERATE[name]))
    if name in CHATS:
        given = dict(CHATS[name])
        return output(llm.chat(given.pop("messages"), SamplingParams(), lora(given), False, **given))
    if name in CALLS:
        return CALLS[name](llm)
    kind, _, case = name.partition(": ")
    if kind == "model refused":
        return refusal(lambda: LLM(DEMO / "base", **{"device": "cpu", **REFUSED_MODELS[case]}).shutdown())
    if case in MADE:
        return refusal(MADE[case])
    given = {"prompt": FRANCE, **(REFUSED_SAMPLING.get(case) or REFUSED_PROMPTS[case])}
    return refusal(lambda: answer(llm, given))


@pytest.mark.parametrize("name", SCENARIOS)
def test_llm(name: str, llm: LLM, replay: Replay) -> None:
    replay(name, play(llm, name))


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names(SCENARIOS)

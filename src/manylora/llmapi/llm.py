"""LLM: one base model with many adapters, in this process."""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manylora.config.build_record import read_build_config
from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.errors import ConfigError, RequestError
from manylora.llmapi.adapters import PathReader
from manylora.llmapi.decoding import decoding_of
from manylora.llmapi.generation import Generation, Prompt
from manylora.llmapi.llm_args import KvCacheConfig, PeftCacheConfig
from manylora.llmapi.lora import LoraConfig, LoRARequest
from manylora.llmapi.outputs import RequestOutput
from manylora.llmapi.result import GenerationResult
from manylora.llmapi.sampling import SamplingParams
from manylora.llmapi.service import Service
from manylora.llmapi.sizing import (
    built_lora_config,
    lora_cache_config,
    modules_to_read,
    no_lora_cache_config,
    parameter_names,
)
from manylora.lora.expert_rules import check_moe_backend
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config
from manylora.quant.config import QuantConfig
from manylora.stats import EngineStats
from manylora.text.tokenizer import Tokenizer

__all__ = ["LLM"]

logger = logging.getLogger("manylora")

Input = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and of an encoder-decoder model maybe
`decoder_input_token_ids`, which its decoder goes on from; the prompt is its encoder's."""

CARRIED_BYTES = 2**30
"""Tensors of adapters that may be on their way to the cache, where the host level is smaller than this."""

DECODER_IDS = "decoder_input_token_ids"
GUIDE_BACKENDS = ("llguidance", "xgrammar")

# Arguments of TensorRT-LLM that mean nothing here, and the values that ask for nothing. None always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "trust_remote_code": (True, False),
}


class LLM:
    """One base model and any number of its adapters, in this process. A context manager; thread-safe.

    model:     a Hugging Face directory.
    tokenizer: a directory, or a `manylora.text.tokenizer.Tokenizer`; None: the model's own.
    skip_tokenizer_init: prompts and outputs are token ids.
    lora_config: without it requests with an adapter are refused. peft_cache_config: the adapter cache's size.
    dtype:     auto, float32, float16, bfloat16. device: auto, cpu, cuda, cuda:N.
    max_batch_size: sequences in one step; None: 64. max_num_tokens: token rows in one step; None: 2048, at
               least max_batch_size. max_seq_len: prompt and output, in tokens; None: what the model allows.
               In a directory that `manylora build` wrote, its limits are the defaults and upper bounds.
    enable_chunked_prefill: long prompts in pieces, beside decoding.
    batch_scheduler_policy: guaranteed_no_evict or max_utilization.
    max_beam_width: beams of one request; None: max_batch_size.
    guided_decoding_backend: llguidance, or xgrammar, which means the same here; None: no guided decoding.
    quant_config: weights in fewer bits; None: as the directory has them.
    disable_overlap_scheduler: on a GPU, see the tokens of a step before the next is launched.
    moe_backend: CUTLASS, the name of the only implementation of experts there is here, or None.

    Raises ConfigError when it cannot be served so, also for an unknown argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        lora_config: LoraConfig | None = None,
        peft_cache_config: PeftCacheConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        enable_chunked_prefill: bool = True,
        batch_scheduler_policy: str = "guaranteed_no_evict",
        max_beam_width: int | None = None,
        guided_decoding_backend: str | None = None,
        quant_config: QuantConfig | None = None,
        enable_lora: bool | None = None,
        moe_backend: str | None = None,
        disable_overlap_scheduler: bool = False,
        **others: Any,
    ) -> None:
        _check_others(others)
        if quant_config is not None and not isinstance(quant_config, QuantConfig):
            raise ConfigError(f"LLM: quant_config must be a QuantConfig, got {quant_config!r:.80}")
        if enable_lora and lora_config is None:
            lora_config = LoraConfig()
        elif enable_lora:
            logger.warning("enable_lora is ignored when lora_config is provided for pytorch backend.")
        folder, kv = Path(model), kv_cache_config or KvCacheConfig()
        try:
            built = read_build_config(folder)
            lora_config = built_lora_config(lora_config, built)
            max_batch_size = built.settle("max_batch_size", max_batch_size)
            if max_batch_size is None:
                max_batch_size = EngineConfig.max_batch_size
            max_num_tokens = built.settle("max_num_tokens", max_num_tokens) or max(2048, max_batch_size)
            max_seq_len = built.settle("max_seq_len", max_seq_len)
            quant_config = built.settle_quant(quant_config)
            if kv.dtype == "fp8":
                quant_config = replace(quant_config or QuantConfig(), kv_cache_quant_algo="FP8")
            self._model = read_model_config(folder)
            self._tokenizer = None if skip_tokenizer_init else _open_tokenizer(tokenizer or folder)
            base = BaseWeights(folder)
            if peft_cache_config is not None and lora_config is None:
                raise ConfigError(
                    "LLM: peft_cache_config needs a lora_config: without one no adapter is served"
                )
            lora = no_lora_cache_config(self._model)
            if lora_config is not None:
                cache = peft_cache_config or PeftCacheConfig()
                lora = lora_cache_config(lora_config, cache, self._model, base)
                built.settle_targets(lora.target_modules)
            check_moe_backend(moe_backend, lora.target_modules, self._model)
            config = EngineConfig(
                folder,
                device=device,
                dtype=dtype,
                max_batch_size=max_batch_size,
                max_beam_width=max_beam_width or max_batch_size,
                tokenizer_dir=_guide_tokenizer(guided_decoding_backend, self._tokenizer),
                max_num_tokens=max_num_tokens,
                max_seq_len=max_seq_len,
                tokens_per_block=kv.tokens_per_block,
                kv_cache_free_gpu_mem_fraction=kv.free_gpu_memory_fraction or 0.9,
                max_tokens_in_paged_kv_cache=kv.max_tokens,
                enable_kv_cache_reuse=kv.enable_block_reuse,
                enable_chunked_context=enable_chunked_prefill,
                batch_scheduler_policy=batch_scheduler_policy,
                enable_overlap=False if disable_overlap_scheduler else None,
                quant=quant_config,
                lora=lora,
            )
            engine = Engine(config)
        except ConfigError as error:
            raise ConfigError(parameter_names(str(error))) from error
        self._serves_lora = lora_config is not None
        self._guided = config.tokenizer_dir is not None
        self._max_seq_len = engine.max_seq_len
        self._max_samples, self._max_beams = config.max_batch_size, config.max_beam_width
        adapters = engine.adapters.stats()
        self._loop = EngineLoop(engine)
        room = max(CARRIED_BYTES, adapters.host_pages * adapters.page_bytes)
        modules = modules_to_read(lora_modules(self._model, lora.target_modules), lora_config)
        reader = PathReader(engine.adapters.parts.reader(modules))
        self._service = Service(self._loop, reader, engine.adapters.resident, room)
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, _dispose, self._service)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def generate(
        self,
        inputs: Input | Sequence[Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several at once, and wait. A list for several.

        sampling_params, lora_request: one for all prompts, or a list with one for each; None in the list is
        the base model. Prompts of a batch may mix adapters freely. use_tqdm: a progress bar on a terminal,
        where tqdm is installed.

        Raises RequestError or ValueError for the first prompt that cannot be served; the others are ended.
        """
        single = _is_single(inputs)
        prompts: list[Any] = [inputs] if single else list(inputs)
        params = _for_each(prompts, "sampling_params", sampling_params)
        adapters = _for_each(prompts, "lora_request", lora_request)
        made: list[Generation] = []
        try:
            for prompt, one_params, one_adapter in zip(prompts, params, adapters, strict=True):
                made.append(self._make(prompt, one_params, one_adapter, streaming=False))
        except BaseException:
            for generation in made:
                self._service.discard(generation)
            raise
        results = [self._submit(generation) for generation in made]
        try:
            outputs = [result.result() for result in _with_progress(results, use_tqdm)]
        except BaseException:
            for result in results:
                result.abort()
            raise
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: Input,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
    ) -> GenerationResult:
        """Begin to continue one prompt. Returns at once.

        Raises RequestError or ValueError for a request that cannot be served; what only the engine can know
        is raised by the result.
        """
        return self._submit(self._make(inputs, sampling_params, lora_request, streaming))

    def stats(self) -> EngineStats:
        """The engine as of its last step."""
        return self._loop.stats()

    def shutdown(self) -> None:
        """Cancel what is open, and free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _make(
        self,
        inputs: Input,
        sampling_params: SamplingParams | None,
        lora_request: LoRARequest | None,
        streaming: bool,
    ) -> Generation:
        params = replace(sampling_params) if sampling_params else SamplingParams()
        decoding = decoding_of(params, self._tokenizer, self._model.eos_token_ids)
        if streaming and decoding.n < params.num_samples:
            raise ValueError(f"best_of ({params.best_of}) must equal n ({params.n}) when streaming")
        if streaming and decoding.params.beam_width > 1:
            raise ValueError("use_beam_search cannot stream: beams may still change their beginning")
        if params.guided_decoding and not self._guided:
            raise ValueError("guided_decoding needs LLM(guided_decoding_backend='llguidance')")
        # Before anything is made for each of them.
        name, most = "max_batch_size", self._max_samples
        if params.use_beam_search:
            name, most = "max_beam_width", self._max_beams
        if decoding.num_results > most:
            raise ValueError(f"n and best_of must be at most {name} ({most}), got {decoding.num_results}")
        prompt = self._encode(inputs, params)
        decoding = decoding.within(self._max_seq_len - prompt.length)
        path = None
        if lora_request is not None:
            if not self._serves_lora:
                raise RequestError(
                    "lora_request needs an LLM with a lora_config: this one serves no adapters"
                )
            path = self._service.registry.claim(lora_request)
        return Generation(
            next(self._ids), prompt, decoding, lora_request, path, streaming, self._tokenizer, self._abort
        )

    def _submit(self, generation: Generation) -> GenerationResult:
        self._service.submit(generation)
        return generation.result

    def _abort(self, generation: Generation) -> None:
        self._service.abort(generation)

    def _encode(self, inputs: Input, params: SamplingParams) -> Prompt:
        if isinstance(inputs, Mapping):
            known = [name for name in ("prompt", "prompt_token_ids") if inputs.get(name) is not None]
            if len(known) != 1 or inputs.keys() - {"prompt", "prompt_token_ids", DECODER_IDS}:
                raise ValueError(
                    "a prompt must be a text, token ids, or a dict with one of these as "
                    "'prompt' or 'prompt_token_ids'"
                )
            prompt = self._encode(inputs[known[0]], params)
            decoder_ids = inputs.get(DECODER_IDS)
            return prompt if decoder_ids is None else self._continue(prompt, decoder_ids)
        text = inputs if isinstance(inputs, str) else None
        if text is None:
            ids = [token for token in inputs if isinstance(token, int)]
            if len(ids) < len(inputs):
                raise ValueError(f"a prompt must be a text or a list of token ids, got {inputs!r:.80}")
        elif self._tokenizer is None:
            raise ValueError("this LLM has no tokenizer (skip_tokenizer_init): prompts must be token ids")
        else:
            context = None if params.truncate_prompt_tokens else self._max_seq_len
            ids = self._tokenizer.encode(text, params.add_special_tokens, context)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        encoder = self._model.encoder
        return Prompt(text, tuple(ids), (encoder.decoder_start_id,) if encoder else None)

    def _continue(self, prompt: Prompt, decoder_ids: Any) -> Prompt:
        if self._model.encoder is None:
            raise ValueError(f"{DECODER_IDS} is for encoder-decoder models: leave it out")
        ids = [token for token in decoder_ids if isinstance(token, int)]
        if not ids or len(ids) < len(decoder_ids):
            raise ValueError(f"{DECODER_IDS} must be a list of token ids, got {decoder_ids!r:.80}")
        return replace(prompt, decoder_ids=tuple(ids))


def _dispose(service: Service) -> None:
    """Close, but not on a thread that would wait for its own end: the garbage collector runs anywhere."""
    if threading.current_thread().name.startswith("manylora-"):
        threading.Thread(target=service.close, daemon=True).start()
    else:
        service.close()


def _open_tokenizer(tokenizer: str | Path | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(Path(tokenizer))


def _guide_tokenizer(backend: str | None, tokenizer: Tokenizer | None) -> Path | None:
    """Where the tokenizer of guided decoding is read from; None: there is no guided decoding."""
    if backend is None:
        return None
    if backend not in GUIDE_BACKENDS:
        raise ConfigError(f"guided_decoding_backend must be one of {GUIDE_BACKENDS}, got {backend!r}")
    if tokenizer is None:
        raise ConfigError("guided_decoding_backend needs a tokenizer: leave skip_tokenizer_init out")
    return tokenizer.directory


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and value not in NEUTRAL.get(name, ()):
            raise ConfigError(f"LLM: {name} is not supported, got {value!r}; leave it out")


def _is_single(inputs: Any) -> bool:
    if isinstance(inputs, str | Mapping):
        return True
    return bool(inputs) and isinstance(inputs[0], int)


def _for_each(prompts: Sequence[Any], name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(f"{name} must be one, or one for each prompt: got {len(value)} for {len(prompts)}")
    return list(value)


def _with_progress(results: list[GenerationResult], use_tqdm: bool) -> Iterable[GenerationResult]:
    if not use_tqdm:
        return results
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return results
    return tqdm(results, desc="Processed requests", dynamic_ncols=True, disable=None)

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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from manylora.config.build_record import read_build_record
from manylora.config.engine import EngineConfig
from manylora.config.hub import local_model
from manylora.config.pooling import read_pooling_settings
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.errors import AdapterNotCachedError, ConfigError, RequestError
from manylora.llmapi.adapters import AdapterRegistry
from manylora.llmapi.chat import ChatRequests
from manylora.llmapi.decoding import Decoding, decoding_of, with_defaults
from manylora.llmapi.engine_config import NO_ADAPTERS, engine_config, modules_to_read, parameter_names
from manylora.llmapi.generation import Generation
from manylora.llmapi.lora import LoRAChoice, LoraConfig, LoRARequest, is_choice, members_of
from manylora.llmapi.named_adapters import NamedAdapters, with_requests
from manylora.llmapi.options import LlmArguments, check_known
from manylora.llmapi.outputs import RequestOutput
from manylora.llmapi.pooled import PooledRequests, hidden_state
from manylora.llmapi.prompts import ChatText, Input, Prompt, PromptReader
from manylora.llmapi.result import GenerationResult
from manylora.llmapi.sampling import SamplingParams
from manylora.llmapi.service import Service
from manylora.lora.modules import lora_modules
from manylora.lora.text.adapter_text import TOKENIZER_BYTES
from manylora.lora.text.current import OwnText, trusted_texts
from manylora.model.checkpoint import read_model_config
from manylora.request import AdapterVersion, LoraInput
from manylora.stats import EngineStats
from manylora.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("manylora")

PIN_ATTEMPTS = 3
Known = dict[int, tuple[SamplingParams, Decoding]]
"""By the id of the parameters, of one call."""
NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class LLM(ChatRequests, PooledRequests):
    """One base model and any number of its adapters, in this process. A context manager; thread-safe.

    model:     a Hugging Face directory, or an id of the hub, org/name or org/name@revision: it is downloaded.
    tokenizer: likewise, or a `manylora.text.tokenizer.Tokenizer`; None: the model's own.
    revision, tokenizer_revision: branch, tag or commit of an id.
    skip_tokenizer_init: prompts and outputs are token ids.
    lora_config: without it requests with an adapter are refused. peft_cache_config: the adapter cache's size.
    lora_root: folder or folders whose adapters have names: their paths below it. lora_alias: more names.
    lora_trust: FOLDER, or FOLDER=PART,PART, or several: adapters in it are used with their own parts
               chat_template, generation_config and tokenizer, where they have them.
    lora_tokenizer_bytes: of their tokenizers in memory, each counted as eight times its file.
    quant_config: weights in fewer bits; None: as the directory has them.
    guided_decoding_backend: llguidance, or xgrammar, which means the same here; None: no guided decoding.
    moe_backend: CUTLASS, the name of the only implementation of experts there is here, or None.

    Settings of the engine; None: the default. In a directory that `manylora build` wrote, its limits are the
    defaults and upper bounds.
    dtype:     auto, float32, float16, bfloat16. device: auto, cpu, cuda, cuda:N.
    max_batch_size: sequences in one step. max_num_tokens: token rows in one step; None: 2048, at least
               max_batch_size. max_seq_len: prompt and output, in tokens; None: what the model allows.
    max_beam_width: beams of one request; None: max_batch_size. max_queue_size: waiting requests; 0: no limit.
    gpu_memory_utilization: of the device's memory, for weights, KV cache and adapters; None: no limit.
    enable_chunked_prefill: long prompts in pieces, beside decoding.
    batch_scheduler_policy: guaranteed_no_evict or max_utilization.
    disable_overlap_scheduler: on a GPU, see the tokens of a step before the next is launched.
    enable_cuda_graph, cuda_graph_cache_size: record decode steps; None: where the device can. 0: 128 graphs.
    tensor_parallel_size, pipeline_parallel_size: ranks that share each layer, and stages of such ranks that
               share the layers; each rank is a process, and has a GPU of its own. moe_expert_parallel_size:
               of the ranks that share a layer, how many divide experts by number.
    stream_interval: new tokens of a stream in one output; the first one comes at once. None: 1.
    wrap_input_ids: take ids beyond the vocabulary modulo its size instead of refusing them.

    Raises ConfigError when it cannot be served so, also for an unknown argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        lora_root: str | Path | Sequence[str | Path] = (),
        lora_trust: str | Sequence[str] = (),
        lora_alias: Mapping[str, str] = NO_ALIASES,
        lora_tokenizer_bytes: int = TOKENIZER_BYTES,
        **arguments: Unpack[LlmArguments],
    ) -> None:
        check_known(arguments)
        folder, lora_config = local_model(model, revision), arguments.get("lora_config")
        if lora_config is None and arguments.get("enable_lora"):
            lora_config = arguments["lora_config"] = LoraConfig()
        elif arguments.get("enable_lora"):
            logger.warning("enable_lora is ignored when lora_config is provided for pytorch backend.")
        try:
            self._serves_lora = lora_config is not None or bool(read_build_record(folder).lora)
            if arguments.get("peft_cache_config") is not None and not self._serves_lora:
                raise ConfigError(
                    "LLM: peft_cache_config needs a lora_config: without one no adapter is served"
                )
            settings = {} if self._serves_lora else dict(NO_ADAPTERS)
            self._model = read_model_config(folder)
            self._pooling = read_pooling_settings(folder)
            chosen = folder if tokenizer is None else tokenizer
            self._tokenizer = None if skip_tokenizer_init else _open_tokenizer(chosen, tokenizer_revision)
            if arguments.get("guided_decoding_backend") is not None:
                if self._tokenizer is None:
                    raise ConfigError(
                        "guided_decoding_backend needs a tokenizer: leave skip_tokenizer_init out"
                    )
                settings["tokenizer_dir"] = self._tokenizer.directory
            roots = [Path(one) for one in _listed(lora_root)]
            if roots and not self._serves_lora:
                raise ConfigError("lora_root needs a lora_config: without one no adapter is served")
            self._adapters = NamedAdapters(roots, lora_alias)
            trusted, known = _listed(lora_trust), (self._tokenizer, self._model.vocab_size)
            self._texts = trusted_texts(trusted, roots, *known, lora_tokenizer_bytes)
            config = engine_config(folder, arguments, **settings)
            engine = Engine(config)
        except ConfigError as error:
            raise ConfigError(parameter_names(str(error))) from error
        self._config = config
        self._max_seq_len = engine.max_seq_len
        self._prompts = PromptReader(self._model, engine.max_seq_len)
        adapters = engine.adapters
        self._loop = EngineLoop(engine)
        modules = modules_to_read(lora_modules(self._model, config.lora.target_modules), lora_config)
        registry = AdapterRegistry(adapters.library, adapters.parts.reader(modules))
        self._service = Service(self._loop, registry, adapters.resident)
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, _dispose, self._service)

    @property
    def config(self) -> EngineConfig:
        """What the engine was configured with."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def lora_names(self) -> list[str]:
        """The names that adapters have now, by `lora_root` and `lora_alias`."""
        return self._adapters.names()

    def generate(
        self,
        inputs: Input | Sequence[Input] | Sequence[ChatText],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: str | LoRAChoice | Sequence[str | LoRAChoice | None] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several at once, and wait. A list for several.

        sampling_params, lora_request: one for all prompts, or a list with one for each; None in the list is
        the base model. Prompts of a batch may mix adapters freely. (LoRARequest, scale) is an adapter with a
        scale, and a list of these pairs, up to 8, are adapters that act together. A name below `lora_root`
        may stand for a LoRARequest. use_tqdm: a progress bar on a terminal, where tqdm is installed.

        Raises RequestError or ValueError for the first prompt that cannot be served; the others are ended.
        """
        single = isinstance(inputs, str | Mapping) or (bool(inputs) and isinstance(inputs[0], int))
        prompts: list[Any] = [inputs] if single else list(inputs)
        params = _for_each(prompts, "sampling_params", sampling_params)
        lora_request = self._named(lora_request)
        adapters = _for_each(prompts, "lora_request", lora_request, is_choice(lora_request))
        made: list[Generation] = []
        known: Known = {}
        try:
            for prompt, one_params, one_adapter in zip(prompts, params, adapters, strict=True):
                made.append(self._make(prompt, one_params, one_adapter, False, known))
        except BaseException:
            for generation in made:
                self._service.discard(generation)
            raise
        results = [self._service.submit(generation) for generation in made]
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
        lora_request: str | LoRAChoice | None = None,
        streaming: bool = False,
    ) -> GenerationResult:
        """Begin to continue one prompt. Returns at once.

        Raises RequestError or ValueError for a request that cannot be served; what only the engine can know
        is raised by the result.
        """
        made = self._make(inputs, sampling_params, self._named(lora_request), streaming, {})
        return self._service.submit(made)

    def pin_lora(self, lora_request: LoRARequest | str) -> None:
        """Keep an adapter on both levels of the cache until `unpin_lora`. Reads it, if need be.

        Raises RequestError, also when too little would be left for other adapters.
        """
        problem: RequestError | None = None
        request: LoRARequest = self._named(lora_request)
        for _ in range(PIN_ATTEMPTS):
            if self._model.encoder is None:
                hidden_state(self, 0, request)  # an adapter with a classification head makes no text
            else:
                self.generate([0], SamplingParams(max_tokens=1), request, use_tqdm=False)
            problem = self._service.pin(request.lora_int_id)
            if not isinstance(problem, AdapterNotCachedError):  # else it was evicted in between
                break
        if problem is not None:
            raise problem

    def unpin_lora(self, lora_request: LoRARequest | str) -> None:
        """It may be evicted again. No effect for one that is not pinned."""
        self._loop.unpin(self._named(lora_request).lora_int_id)

    def load_adapter(
        self, lora_request: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> AdapterVersion:
        """Put tensors of a trainer under an adapter's id, new or in place of what it means now. Returns when
        requests that come later get them; those under way keep their version, or follow.

        tensors: named as PEFT saves them (`get_peft_model_state_dict`), on any device; they are copied.
        config: what PEFT's adapter_config.json says, as of `LoraConfig.to_dict()`. They stay in memory, so
        that an eviction from the cache loses nothing.

        Raises RequestError.
        """
        if not self._serves_lora:
            raise RequestError("load_adapter needs an LLM with a lora_config: this one serves no adapters")
        adapter = self._service.registry.put(lora_request, tensors, config)
        version = self._service.publish(LoraInput(lora_request.lora_int_id, checked=adapter))
        return replace(version, name=lora_request.lora_name)

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
        lora_request: LoRAChoice | None,
        streaming: bool,
        known: Known,
    ) -> Generation:
        """known: what was made of parameters before, without an adapter's own text."""
        tokenizer, own = self._tokenizer, self._text_of(lora_request)
        if own is None and id(sampling_params) in known:
            params, decoding = known[id(sampling_params)]
        else:
            params, end_ids = replace(sampling_params) if sampling_params else SamplingParams(), None
            if own is not None:
                params = with_defaults(params, own.defaults, own_length=sampling_params is not None)
                tokenizer, end_ids = own.tokenizer, own.defaults.end_ids
            end_ids = self._model.eos_token_ids if end_ids is None else end_ids
            decoding = decoding_of(params, tokenizer, end_ids)
            if own is None:
                known[id(sampling_params)] = params, decoding
        if streaming and decoding.n < params.num_samples:
            raise ValueError(f"best_of ({params.best_of}) must equal n ({params.n}) when streaming")
        if streaming and decoding.params.beam_width > 1:
            raise ValueError("use_beam_search cannot stream: beams may still change their beginning")
        if params.guided_decoding and self._config.tokenizer_dir is None:
            raise ValueError("guided_decoding needs LLM(guided_decoding_backend='llguidance')")
        # Before anything is made for each of them.
        name, most = "max_batch_size", self._config.max_batch_size
        if params.use_beam_search:
            name, most = "max_beam_width", self._config.max_beam_width
        if decoding.num_results > most:
            raise ValueError(f"n and best_of must be at most {name} ({most}), got {decoding.num_results}")
        prompt = self._prompts.read(inputs, params, tokenizer)
        decoding = decoding.within(self._max_seq_len - prompt.length)
        made = Generation(next(self._ids), prompt, decoding, lora_request, streaming, tokenizer, self._abort)
        made.request()  # so that what is wrong with it is said here
        self._claim(lora_request)
        return made

    def _claim(self, lora_request: LoRAChoice | None) -> None:
        if lora_request is not None and not self._serves_lora:
            raise RequestError("lora_request needs an LLM with a lora_config: this one serves no adapters")
        self._service.registry.claim_all([one for one, _ in members_of(lora_request)])

    def _named(self, lora_request: Any) -> Any:
        """The same with requests in place of names."""
        return with_requests(lora_request, lambda name: self._adapters.find(name, self._replace))

    def _text_of(self, lora_request: LoRAChoice | None) -> OwnText | None:
        """Of the one adapter that acts; None: the model's own is used. Raises AdapterInvalidError."""
        acting = {one: scale for one, scale in members_of(lora_request) if scale}
        if self._texts is None or len(acting) != 1:
            return None
        [request] = acting
        path = self._service.registry.path_of(request)
        return None if path is None else self._texts.find(request.lora_name, path)

    def _replace(self, lora_request: LoRARequest) -> None:
        """Serve what the files of an adapter hold by now. Raises AdapterError."""
        adapter = self._service.registry.replace(lora_request)
        if adapter is not None:
            self._service.publish(LoraInput(lora_request.lora_int_id, checked=adapter))

    def _encode(self, inputs: Input, params: SamplingParams, lora_request: LoRAChoice | None) -> Prompt:
        own = self._text_of(lora_request)
        return self._prompts.read(inputs, params, self._tokenizer if own is None else own.tokenizer)

    @property
    def _is_cross_encoder(self) -> bool:
        return self._model.num_labels == 1

    def _abort(self, generation: Generation) -> None:
        self._service.abort(generation)


def _dispose(service: Service) -> None:
    """Close, but not on a thread that would wait for its own end: the garbage collector runs anywhere."""
    if threading.current_thread().name.startswith("manylora-"):
        threading.Thread(target=service.close, daemon=True).start()
    else:
        service.close()


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str | Path) else list(given)


def _open_tokenizer(tokenizer: str | Path | Tokenizer, revision: str | None) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(local_model(tokenizer, revision))


def _for_each(prompts: Sequence[Any], name: str, value: Any, is_one: bool = False) -> list[Any]:
    if is_one or not isinstance(value, list | tuple):
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

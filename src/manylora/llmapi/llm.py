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
from manylora.engine.engine import open_engine
from manylora.engine.loop import EngineLoop
from manylora.errors import AdapterNotCachedError, ConfigError, RequestError
from manylora.generation.decoding import Decoding, decoding_of, with_defaults
from manylora.generation.defaults import OwnText
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.adapters import AdapterRegistry, NamedAdapters, with_requests
from manylora.llmapi.chat import ChatRequests
from manylora.llmapi.engine_config import NO_ADAPTERS, engine_config, modules_to_read, parameter_names
from manylora.llmapi.lora import LoRAChoice, LoraConfig, LoRARequest, is_choice, members_of
from manylora.llmapi.model_defaults import NONE, model_defaults
from manylora.llmapi.options import LlmArguments, check_known
from manylora.llmapi.outputs import GenerationResult, RequestOutput
from manylora.llmapi.pooled import PooledRequests, hidden_state
from manylora.llmapi.prompts import ChatText, Input, Prompt, PromptReader, as_prompts, for_each
from manylora.llmapi.service import LlmGeneration, Service
from manylora.lora.catalog.texts import trusted_texts
from manylora.lora.modules import lora_modules
from manylora.lora.text.adapter_text import TOKENIZER_BYTES
from manylora.model.checkpoint import read_model_config
from manylora.request import AdapterVersion, LoraInput
from manylora.stats import EngineStats

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("manylora")

PIN_ATTEMPTS = 3
Known = dict[int, tuple[SamplingParams, Decoding]]
"""By the id() of the parameters, within one call."""
NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class LLM(ChatRequests, PooledRequests):
    """One base model and any number of its adapters, in this process. A context manager; thread-safe.

    model:     a Hugging Face directory or a hub id, org/name or org/name@revision, which is downloaded.
    tokenizer: the same, or a `manylora.generation.tokenizer.Tokenizer`; None: the model's own.
    revision, tokenizer_revision: branch, tag or commit of a hub id.
    skip_tokenizer_init: prompts and outputs are token ids.
    lora_config: required for requests with adapters. peft_cache_config: size of the adapter cache.
    lora_root: folder or folders with named adapters; a name is the path below it. lora_alias: more names.
    lora_trust: FOLDER, or FOLDER=PART,PART, or several: adapters in it are used with their own
               chat_template, generation_config and tokenizer (the PARTs), where they have them.
    lora_tokenizer_bytes: memory for these tokenizers; each counts as eight times its file.
    generation_config: where values come from for fields that SamplingParams leave None: vllm (nowhere: greedy
               decoding), auto (the model's generation_config.json), or a folder that has such a file.
    override_generation_config: such values, instead of those: {"temperature": 0.6}.
    quant_config: quantise the weights; None: leave them as stored.
    guided_decoding_backend: llguidance or xgrammar, which are equivalent here; None: no guided decoding.
    moe_backend: CUTLASS or None; there is only one implementation of experts.

    Engine settings; None: the default. For a directory that `manylora build` wrote, its limits are the
    defaults and upper bounds.
    dtype:     auto, float32, float16, bfloat16. device: auto, cpu, cuda, cuda:N.
    max_batch_size: sequences in one step. max_num_tokens: tokens in one step; None: 2048, at least
               max_batch_size. max_seq_len: tokens of prompt and output; None: what the model allows.
    max_beam_width: beams of one request; None: max_batch_size. max_queue_size: waiting requests; 0: no limit.
    gpu_memory_utilization: share of the device's memory for weights, KV cache and adapters; None: no limit.
    enable_chunked_prefill: process long prompts in chunks, alongside decoding.
    batch_scheduler_policy: guaranteed_no_evict or max_utilization.
    disable_overlap_scheduler: on a GPU, wait for a step's tokens before launching the next step.
    enable_cuda_graph, cuda_graph_cache_size: capture decode steps; None: if supported; 0: 128 graphs.
    tensor_parallel_size: ranks that share each layer. pipeline_parallel_size: stages of such ranks, each with
               a part of the layers. Each rank is a process with its own GPU. moe_expert_parallel_size: how
               many of the ranks that share a layer divide whole experts among them.
    stream_interval: new tokens per streamed output; the first is sent at once. None: 1.
    wrap_input_ids: wrap token ids beyond the vocabulary (modulo its size) instead of refusing them.

    Raises ConfigError for a configuration that cannot be served, and for an unknown argument.
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
        generation_config: str | Path = NONE,
        override_generation_config: Mapping[str, Any] | None = None,
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
            asked = str(generation_config), override_generation_config
            self._defaults = model_defaults(folder, self._model.vocab_size, *asked)
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
            if lora_config is not None and not (arguments.get("enable_lora") or config.lora.target_modules):
                logger.warning(
                    "Both lora_dir and lora_target_modules are empty, so all LoRA modules will be expected: "
                    "the cache is sized for each of them"
                )
            engine = open_engine(config)
        except ConfigError as error:
            raise ConfigError(parameter_names(str(error))) from error
        self._config = config
        self._max_seq_len = engine.max_seq_len
        self._prompts = PromptReader(self._model, engine.max_seq_len)
        self._loop = EngineLoop(engine)
        modules = modules_to_read(lora_modules(self._model, config.lora.target_modules), lora_config)
        registry = AdapterRegistry(engine.library, engine.adapter_reader(modules))
        self._service = Service(self._loop, registry, engine.is_resident)
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, _dispose, self._service)

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with the values of `generation_config` and `override_generation_config`."""
        return with_defaults(SamplingParams(), self._defaults, own_length=False)

    def lora_names(self) -> list[str]:
        """Current names of adapters, from `lora_root` and `lora_alias`."""
        return self._adapters.names()

    def generate(
        self,
        inputs: Input | Sequence[Input] | Sequence[ChatText],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: str | LoRAChoice | Sequence[str | LoRAChoice | None] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several at once, and wait. Returns a list for several.

        sampling_params, lora_request: one for all prompts, or a list with one per prompt; None in the list is
        the base model. Prompts of a batch may use different adapters. (LoRARequest, scale) is an adapter with
        a scale. A list of up to 8 such pairs is a mix of adapters that act together. A name in `lora_root`
        may replace a LoRARequest. use_tqdm: show a progress bar on a terminal if tqdm is installed.

        Raises RequestError or ValueError for the first prompt that cannot be served; the others are
        cancelled.
        """
        prompts, single = as_prompts(inputs)
        params = for_each(prompts, "sampling_params", sampling_params)
        lora_request = self._named(lora_request)
        adapters = for_each(prompts, "lora_request", lora_request, is_choice(lora_request))
        made: list[LlmGeneration] = []
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
        inputs: Input | ChatText,
        sampling_params: SamplingParams | None = None,
        lora_request: str | LoRAChoice | None = None,
        streaming: bool = False,
    ) -> GenerationResult:
        """Start to continue one prompt, and return at once.

        Raises RequestError or ValueError for a request that cannot be served. Errors that only the engine can
        detect are raised by the result.
        """
        made = self._make(inputs, sampling_params, self._named(lora_request), streaming, {})
        return self._service.submit(made)

    def pin_lora(self, lora_request: LoRARequest | str) -> None:
        """Keep an adapter on both levels of the cache until `unpin_lora`. Reads it if necessary.

        Raises RequestError, also if too little space would be left for other adapters.
        """
        problem: RequestError | None = None
        request: LoRARequest = self._named(lora_request)
        for _ in range(PIN_ATTEMPTS):
            if self._model.encoder is None:
                hidden_state(self, 0, request)  # an adapter with a classification head generates no text
            else:
                self.generate([0], SamplingParams(max_tokens=1), request, use_tqdm=False)
            problem = self._service.pin(request.lora_int_id)
            if not isinstance(problem, AdapterNotCachedError):  # otherwise it was evicted in between
                break
        if problem is not None:
            raise problem

    def unpin_lora(self, lora_request: LoRARequest | str) -> None:
        """Allow its eviction again. No effect for an adapter that is not pinned."""
        self._loop.unpin(self._named(lora_request).lora_int_id)

    def load_adapter(
        self, lora_request: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> AdapterVersion:
        """Load a trainer's tensors under an adapter's id, which may be new or in use.

        Returns once later requests will use them. Running requests keep their version, or follow.

        tensors: named as PEFT saves them (`get_peft_model_state_dict`), on any device; they are copied and
            stay in memory, so that an eviction loses nothing.
        config: the content of PEFT's adapter_config.json, as from `LoraConfig.to_dict()`.

        Raises RequestError.
        """
        if not self._serves_lora:
            raise RequestError("load_adapter needs an LLM with a lora_config: this one serves no adapters")
        adapter = self._service.registry.put(lora_request, tensors, config)
        version = self._service.publish(LoraInput(lora_request.lora_int_id, checked=adapter))
        return replace(version, name=lora_request.lora_name)

    def stats(self) -> EngineStats:
        """Statistics of the engine after its last step."""
        return self._loop.stats()

    def shutdown(self) -> None:
        """Cancel open requests and free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _make(
        self,
        inputs: Input | ChatText,
        sampling_params: SamplingParams | None,
        lora_request: LoRAChoice | None,
        streaming: bool,
        known: Known,
    ) -> LlmGeneration:
        """known: conversions of parameters in this call, without an adapter's text settings."""
        tokenizer, own = self._tokenizer, self._text_of(lora_request)
        if own is None and id(sampling_params) in known:
            params, decoding = known[id(sampling_params)]
        else:
            if not isinstance(sampling_params, SamplingParams | None):
                raise ValueError(
                    f"sampling_params must be a SamplingParams, got {sampling_params!r:.80}: give, for "
                    "example, SamplingParams(max_tokens=64)"
                )
            params, defaults = (
                replace(sampling_params) if sampling_params else SamplingParams(),
                self._defaults,
            )
            if own is not None:
                tokenizer, defaults = own.tokenizer, own.defaults.over(defaults)
            params = with_defaults(params, defaults, own_length=sampling_params is not None)
            end_ids = self._model.eos_token_ids if defaults.end_ids is None else defaults.end_ids
            decoding = decoding_of(params, tokenizer, end_ids)
            if own is None:
                known[id(sampling_params)] = params, decoding
        if streaming and decoding.n < params.num_samples:
            raise ValueError(f"best_of ({params.best_of}) must equal n ({params.n}) when streaming")
        if streaming and decoding.params.beam_width > 1:
            raise ValueError("use_beam_search cannot stream: beams may still change their beginning")
        if params.guided_decoding and self._config.tokenizer_dir is None:
            raise ValueError("guided_decoding needs LLM(guided_decoding_backend='llguidance')")
        # Checked before anything is created for each prompt.
        name, most = "max_batch_size", self._config.max_batch_size
        if params.use_beam_search:
            name, most = "max_beam_width", self._config.max_beam_width
        if decoding.num_results > most:
            raise ValueError(f"n and best_of must be at most {name} ({most}), got {decoding.num_results}")
        prompt = self._prompts.read(inputs, params, tokenizer)
        decoding = decoding.within(self._max_seq_len - prompt.length)
        made = LlmGeneration(
            next(self._ids), prompt, decoding, lora_request, streaming, tokenizer, self._abort
        )
        made.request(made.lora)  # so that its errors are raised here
        self._claim(lora_request)
        return made

    def _claim(self, lora_request: LoRAChoice | None) -> None:
        if lora_request is not None and not self._serves_lora:
            raise RequestError(
                "lora_request needs an LLM with a lora_config: this one serves no adapters; give "
                "LLM(…, lora_config=LoraConfig()) or enable_lora=True"
            )
        self._service.registry.claim_all([one for one, _ in members_of(lora_request)])

    def _named(self, lora_request: Any) -> Any:
        """`lora_request` with names replaced by requests."""
        return with_requests(lora_request, lambda name: self._adapters.find(name, self._replace))

    def _text_of(self, lora_request: LoRAChoice | None) -> OwnText | None:
        """Text settings of the only adapter that acts. None: the model's. Raises AdapterInvalidError."""
        acting = {one: scale for one, scale in members_of(lora_request) if scale}
        if self._texts is None or len(acting) != 1:
            return None
        [request] = acting
        path = self._service.registry.path_of(request)
        return None if path is None else self._texts.find(request.lora_name, path)

    def _replace(self, lora_request: LoRARequest) -> None:
        """Serve the current content of an adapter's files. Raises AdapterError."""
        adapter = self._service.registry.replace(lora_request)
        if adapter is not None:
            self._service.publish(LoraInput(lora_request.lora_int_id, checked=adapter))

    def _encode(self, inputs: Input, params: SamplingParams, lora_request: LoRAChoice | None) -> Prompt:
        own = self._text_of(lora_request)
        return self._prompts.read(inputs, params, self._tokenizer if own is None else own.tokenizer)

    @property
    def _is_cross_encoder(self) -> bool:
        return self._model.num_labels == 1

    def _abort(self, generation: LlmGeneration) -> None:
        self._service.abort(generation)


def _dispose(service: Service) -> None:
    """Close, but not on a thread that would wait for itself: the garbage collector runs on any thread."""
    if threading.current_thread().name.startswith("manylora-"):
        threading.Thread(target=service.close, daemon=True).start()
    else:
        service.close()


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str | Path) else list(given)


def _open_tokenizer(tokenizer: str | Path | Tokenizer, revision: str | None) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(local_model(tokenizer, revision))


def _with_progress(results: list[GenerationResult], use_tqdm: bool) -> Iterable[GenerationResult]:
    if not use_tqdm:
        return results
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return results
    return tqdm(results, desc="Processed requests", dynamic_ncols=True, disable=None)

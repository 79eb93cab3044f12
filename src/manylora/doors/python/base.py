"""BaseLLM: the model, adapters and engine that the methods of `LLM` use."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from manylora.adapters.catalog.texts import TOKENIZER_BYTES, trusted_texts
from manylora.adapters.modules import lora_modules
from manylora.config.engine import read_build_record
from manylora.config.model_folder import local_model
from manylora.config.pooling import read_pooling_settings
from manylora.doors.python import options
from manylora.doors.python.adapters import AdapterRegistry, NamedAdapters, with_requests
from manylora.doors.python.llm_args import LoRAChoice, LoraConfig, LoRARequest, members_of
from manylora.doors.python.service import ChatText, Input, Prompt, Service, read_prompt
from manylora.engine.build import LEVELS
from manylora.engine.engine import open_engine
from manylora.engine.loop import EngineLoop
from manylora.errors import ConfigError, RequestError
from manylora.generation.decoding import with_defaults
from manylora.generation.defaults import NONE, OwnText, model_defaults
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import AdapterVersion, LoraInput
from manylora.stats import EngineStats

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("manylora")

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class BaseLLM:
    """The arguments are described at `LLM`. config: the engine's configuration. tokenizer: None: no texts."""

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
        **arguments: Any,
    ) -> None:
        options.check_known(arguments)
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
            settings = {} if self._serves_lora else dict(options.NO_ADAPTERS)
            self._model = read_model_config(folder)
            self._pooling = read_pooling_settings(folder)
            asked = str(generation_config), override_generation_config
            self._defaults = model_defaults(folder, self._model.vocab_size, *asked)
            self.tokenizer: Tokenizer | None = None
            if isinstance(tokenizer, Tokenizer):
                self.tokenizer = None if skip_tokenizer_init else tokenizer
            elif not skip_tokenizer_init:
                chosen = folder if tokenizer is None else tokenizer
                self.tokenizer = Tokenizer(local_model(chosen, tokenizer_revision))
            if arguments.get("guided_decoding_backend") is not None:
                if self.tokenizer is None:
                    raise ConfigError(
                        "guided_decoding_backend needs a tokenizer: leave skip_tokenizer_init out"
                    )
                settings["tokenizer_dir"] = self.tokenizer.directory
            roots = [Path(one) for one in _listed(lora_root)]
            if roots and not self._serves_lora:
                raise ConfigError("lora_root needs a lora_config: without one no adapter is served")
            self._adapters = NamedAdapters(roots, lora_alias)
            trusted, known = _listed(lora_trust), (self.tokenizer, self._model.vocab_size)
            self._texts = trusted_texts(trusted, roots, *known, lora_tokenizer_bytes)
            config = options.engine_config(folder, arguments, **settings)
            if lora_config is not None and not (arguments.get("enable_lora") or config.lora.target_modules):
                logger.warning(
                    "Both lora_dir and lora_target_modules are empty, so all LoRA modules will be expected: "
                    "the cache is sized for each of them"
                )
            engine = open_engine(config)
        except ConfigError as error:
            raise ConfigError(options.parameter_names(str(error))) from error
        self.config = config
        self._max_seq_len = engine.max_seq_len
        self._loop = EngineLoop(engine)
        modules = options.modules_to_read(lora_modules(self._model, config.lora.target_modules), lora_config)
        registry = AdapterRegistry(engine.library, engine.adapters.reader(modules))
        self._service = Service(self._loop, registry, engine.adapters.resident)
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, _dispose, self._service)

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with the values of `generation_config` and `override_generation_config`."""
        return with_defaults(SamplingParams(), self._defaults, own_length=False)

    def lora_names(self) -> list[str]:
        """Current names of adapters, from `lora_root` and `lora_alias`."""
        return self._adapters.names()

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

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`; requests raise SleepingError. Waits until open requests have ended.

        level 1: the KV cache; on a GPU weights and adapters move to the host. 2: the weights too, which are
        read from their files again. Adapters, pins and versions stay. Raises RequestError.
        """
        if level not in LEVELS:
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        self._loop.sleep(level).result()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """tags: "weights", "kv_cache"; None: both. Raises RequestError, ConfigError."""
        self._loop.wake_up(tags).result()

    def shutdown(self) -> None:
        """Cancel open requests and free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

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

    def _tokenizer_for(self, lora_request: LoRAChoice | None) -> Tokenizer | None:
        own = self._text_of(lora_request)
        return self.tokenizer if own is None else own.tokenizer

    def _read(self, inputs: Input | ChatText, params: SamplingParams, tokenizer: Tokenizer | None) -> Prompt:
        return read_prompt(inputs, params, tokenizer, self._model.encoder, self._max_seq_len)


def _dispose(service: Service) -> None:
    """Close, but not on a thread that would wait for itself: the garbage collector runs on any thread."""
    if threading.current_thread().name.startswith("manylora-"):
        threading.Thread(target=service.close, daemon=True).start()
    else:
        service.close()


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str | Path) else list(given)

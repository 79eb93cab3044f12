"""Builds the server from its options and runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from manylora.adapters.bounds import Bounds
from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.files import folders_of
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.names import Versions, is_name
from manylora.adapters.catalog.pinning import Pinning
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.catalog.shared import SharedAdapters
from manylora.adapters.catalog.texts import AdapterTexts
from manylora.adapters.catalog.uploads import AdapterRecord, Uploads
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.rules import AdapterRules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.config.pooling import read_pooling_settings
from manylora.config.repository import quant_config
from manylora.doors.http.api.params import Limits
from manylora.doors.http.app import AppContext, cors, make_app
from manylora.doors.http.options import ENGINE_NAMES, ServeOptions
from manylora.doors.http.serving.backend import Backend, EngineClient, Wake
from manylora.doors.http.serving.connections import (
    AT_ONCE,
    Clients,
    check_certificate,
    listen,
    listen_uds,
    raise_open_files,
)
from manylora.doors.http.serving.fair_queue import FairQueue
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import HostCheck, Keyring
from manylora.doors.http.serving.metrics import Metrics
from manylora.doors.http.serving.protocol import BoundedHttp
from manylora.doors.http.serving.usage import UsageLog
from manylora.doors.python.options import modules_to_read, parameter_names
from manylora.errors import AdapterError, ConfigError
from manylora.generation.defaults import model_defaults
from manylora.generation.reply_formats import Parsers
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.system.tracing import open_tracer

if TYPE_CHECKING:
    from manylora.engine.engine import Engine

logger = logging.getLogger("manylora")

START_FAILED = 3  # exit status of uvicorn's own command
WATCH_S = 0.25
STALLED_S = 30.0  # time without progress after which the engine is not ready
SHOWN = 8  # names of adapters in the log
BATCHES_QUEUED = 2  # in the engine at a time: one runs, one is ready to follow


def open_app(options: ServeOptions, ended: Callable[[str], None] = lambda reason: None) -> Starlette:
    """Load everything, and return the application. options: may have hub ids. Raises ConfigError, ValueError.

    ended: called once, from any thread, with the reason why the engine will not answer any more.
    """
    options = options.located()
    for name in options.bases:
        if not is_name(name):
            raise ConfigError(f"served_model_name {name!r} has characters that a model's name may not have")
    keyring = Keyring(options.api_keys, open_admin=options.allow_runtime_lora_updating, plain=options.api_key)
    hosts = HostCheck(options.host, options.allowed_hosts, options.allowed_origins, keys=keyring.closed)
    tokenizer = Tokenizer(options.tokenizer_folder, options.chat_template)
    served = _in_process(options, ended) if options.triton_url is None else _through_triton(options)
    named = {(one.name, Path(one.path)): one.text for one in options.lora_modules}
    roots = [*options.lora_root, *options.lora_allowed_path, *(one.path for one in options.lora_trust)]
    roots += folders_of(Path(one.path) for one in options.lora_modules)
    vocab_size, max_samples = served.model.vocab_size, served.max_batch_size
    texts = AdapterTexts(
        tokenizer, vocab_size, named, options.lora_trust, roots, options.lora_tokenizer_bytes
    )
    for one in options.lora_modules:
        try:
            texts.read(one.name, Path(one.path))
            served.reader.read(Path(one.path))
        except AdapterError as error:
            given = (one.located and one.located.source) or one.path
            raise ConfigError(f"lora_modules: {one.name}={given}: {error}") from error
    created, pooling = int(time.time()), read_pooling_settings(options.folder)
    usage = None if options.usage_log is None else UsageLog(options.usage_log)
    tracer = open_tracer(options.otlp_traces_endpoint)
    asked = options.generation_config, options.override_generation_config
    defaults = model_defaults(options.folder, vocab_size, *asked)

    async def start() -> AppContext:
        folder = options.shared_dir
        record = None if folder is None else AdapterRecord(folder)
        uploads = Uploads(options.lora_upload_bytes, options.lora_upload_dir, record)
        catalog = await _open_catalog(options, served, texts, uploads)
        metrics = Metrics(options.bases[0])
        priorities = options.scheduling_policy == "priority"  # what waits in the engine is not overtaken
        batches = 1 if priorities else BATCHES_QUEUED
        queue = FairQueue(batches * max_samples, options.max_queue_size)
        backend = Backend(served.start(), catalog, queue, metrics.meter)
        if usage is not None:
            backend.on_finished.append(usage.add)
        if tracer is not None:
            backend.on_finished.append(lambda request: request.trace(tracer))
        limits = Limits(served.max_seq_len, vocab_size, max_samples=max_samples, priorities=priorities)
        fingerprint = f"fp_{options.bases[0]}"
        names, parsers = options.bases, Parsers(options.reasoning_parser, options.tool_call_parser)
        inference = Inference(
            backend, tokenizer, served.model, limits, names, fingerprint, options.paths, defaults, parsers,
            tells_cached=options.enable_prompt_tokens_details,
        )  # fmt: skip
        pinning = Pinning(backend.engine.pins, catalog, inference.load)
        pinning.following.start()
        shared = None
        if record is not None and folder is not None:
            shared = SharedAdapters(record, folder, catalog, pinning, options.lora_refresh_seconds)
        return AppContext(
            *(backend, inference, keyring, hosts, metrics, uploads, pinning, options, created, pooling),
            shared=shared,
            usage=usage,
            tracer=tracer,
        )

    return make_app(start, cors(options))


def run(options: ServeOptions) -> None:
    """Serve until a signal; running requests then have drain_seconds. Exits with status 1 if the engine dies.

    Raises ConfigError, ValueError, and KeyboardInterrupt after Ctrl-C.
    """
    reasons: list[str] = []

    def ended(reason: str) -> None:
        reasons.append(reason)
        server.should_exit = True

    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    limits = options.http_limits(raise_open_files(options.max_connections))
    clients = Clients(limits)
    uds = options.uds
    sockets = listen(options.host, options.port, clients) if uds is None else [listen_uds(uds, clients)]
    try:
        server = http_server(options, open_app(options, ended), clients)
        server.run(list(sockets))
    finally:
        for one in sockets:
            one.close()
    if not server.started:
        sys.exit(START_FAILED)
    if reasons:
        logger.critical("%s: this process ends", reasons[0])
        logging.shutdown()
        os._exit(1)  # sys.exit would wait for a thread that is stuck


def http_server(options: ServeOptions, app: Starlette, clients: Clients) -> uvicorn.Server:
    """A server for the sockets that `listen` created with the same clients."""
    config = uvicorn.Config(
        app,
        loop="asyncio",  # asyncio's servers call `Listener.accept`
        http=partial(BoundedHttp, clients),  # type: ignore[arg-type]
        ws="none",
        backlog=AT_ONCE,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=max(1, int(options.drain_seconds)),
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        server_header=False,
    )
    return _UvicornServer(config, options.bases[0])


class _UvicornServer(uvicorn.Server):
    """Logs the addresses it listens on, and what to ask there. uvicorn logs only sockets it opened itself."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self._model = model

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            scheme, name = "https" if self.config.is_ssl else "http", one.getsockname()
            if one.family == socket.AF_UNIX:
                logger.info("Uvicorn running on unix socket %s (Press CTRL+C to quit)", name)
                logger.info("OpenAI API: curl --unix-socket %s %s://localhost/v1/models", name, scheme)
                continue
            host, port = name[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{shown}:{port}"
            logger.info("Uvicorn running on %s (Press CTRL+C to quit)", url)
            text = 'OpenAI API: %s/v1, the base model is "model": "%s"; a page to try it: %s/'
            logger.info(text, url, self._model, url)


@dataclass(frozen=True)
class _ServedModel:
    """What the server needs to know about an engine. start: creates it, on the event loop."""

    start: Callable[[], EngineClient]
    model: ModelConfig
    max_seq_len: int
    max_batch_size: int
    reader: AdapterReader
    versions: Versions = field(default_factory=Versions)


def _in_process(options: ServeOptions, ended: Callable[[str], None]) -> _ServedModel:
    from manylora.engine.engine import open_engine

    try:
        engine = open_engine(options.engine_config())
    except ConfigError as error:
        raise ConfigError(parameter_names(str(error), ENGINE_NAMES)) from error
    modules = modules_to_read(engine.adapter_modules, options.sections.get("lora_config"))
    return _ServedModel(
        lambda: InProcessEngine(engine, options.hang_timeout, ended),
        engine.model,
        engine.max_seq_len,
        engine.config.max_batch_size,
        # Not narrowed: copies on disk are checked by their digest.
        engine.adapters.reader(modules, narrow=False),
        engine.library.versions,
    )


class InProcessEngine:
    """Starts the engine's thread, which `close` stops. ended: called once, from another thread, with the
    reason why it died or made no progress for hang_s (0: no limit). Open requests have failed by then.
    """

    follows = True

    def __init__(
        self, engine: Engine, hang_s: float = 0.0, ended: Callable[[str], None] = lambda reason: None
    ) -> None:
        from manylora.engine.loop import EngineLoop

        self._wake: Wake = lambda: None
        self.loop = loop = EngineLoop(engine, lambda: self._wake())
        self.resident = engine.adapters.resident
        self.submit, self.cancel, self.publish = loop.submit, loop.cancel, loop.publish
        self.stats, self.cache_map = loop.stats, loop.cache_map
        self.reset_prefix_cache = loop.reset_prefix_cache
        self.pins = loop
        self._hang_s, self._ended = hang_s, ended
        self._stalled_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="manylora-watch", daemon=True).start()

    def _watch(self) -> None:
        while self.loop.death is None:
            if self._closed.wait(WATCH_S):
                return
            # Time in which this thread was stopped too, as when the process is suspended, does not count.
            self._stalled_s = min(self.loop.stalled_s, self._stalled_s + 2 * WATCH_S)
            if self._hang_s and self._stalled_s >= self._hang_s:
                self.loop.fail(f"it has not moved for {self._stalled_s:.0f} s")
        self._ended(str(self.loop.death))

    def on_events(self, wake: Wake) -> None:
        self._wake = wake

    @property
    def alive(self) -> bool:
        return self.loop.alive and self._stalled_s < STALLED_S

    async def close(self) -> None:
        self._closed.set()
        await asyncio.get_running_loop().run_in_executor(None, self.loop.close, False)


def _through_triton(options: ServeOptions) -> _ServedModel:
    try:
        from manylora.doors.http.serving.triton import TritonEngine, TritonModel
    except ImportError as error:
        raise ConfigError(f"triton_url needs {error.name}: pip install 'manylora[server]'") from error
    url = str(options.triton_url)
    found = TritonModel.read(url, options.triton_model)
    model = read_model_config(options.folder)
    lora = LoraCacheConfig(
        max_adapter_size=found.number("lora_cache_max_adapter_size") or LoraCacheConfig.max_adapter_size,
        max_lora_rank=found.number("max_lora_rank"),
    )
    modules = lora_modules(model, lora.target_modules)
    lora_config = options.sections.get("lora_config")
    read = modules_to_read(modules, lora_config)
    rules = AdapterRules(
        modules, model.num_layers, lora.rank_limit, found.inputs.get("lora_weights") == "FP16"
    )
    text_only = options.lora_text_only or bool(lora_config and lora_config.lora_text_only)
    base, quant = BaseWeights(options.folder), quant_config(found.parameters)  # reads a DoRA's magnitudes
    if quant is not None:  # its parameters do not give the dtype
        from manylora.model.quant import EffectiveWeights

        base = BaseWeights(options.folder, EffectiveWeights(model, quant))
    bounds = Bounds.of(modules, model.num_layers, lora.rank_limit)
    return _ServedModel(
        lambda: TritonEngine(url, found),
        model,
        options.sections.get("max_seq_len") or found.number("max_seq_len") or model.max_seq_len,
        found.number("max_num_sequences")
        or options.sections.get("max_batch_size")
        or EngineConfig.max_batch_size,
        # Triton tensors cannot be 8-bit floats.
        AdapterReader(rules, ReadOptions(read, base, bounds, float8=False, text_only=text_only)),
    )


async def _open_catalog(
    options: ServeOptions, served: _ServedModel, texts: AdapterTexts, uploads: Uploads
) -> AdapterCatalog:
    folders = {Path(folder) for folder in getattr(options.sections.get("lora_config"), "lora_dir", ())}
    catalog = AdapterCatalog(
        served.reader,
        texts,
        options.lora_root,
        [*options.lora_allowed_path, *(folder.parent for folder in folders)],
        refresh_s=options.lora_refresh_seconds,
        keep_bytes=options.lora_keep_bytes,
        disk=DiskLevel(options.lora_disk_bytes, options.lora_disk_dir),
        bases=options.bases,
        paths=options.paths,
        named={one.name: Path(one.path) for one in options.lora_modules},
        pinned=[one.name for one in options.lora_modules if one.pinned],
        aliases=dict(options.lora_alias),
        versions=served.versions,
        uploads=uploads,
        sources=options.sources,
    )
    await catalog.start()
    for one in options.lora_modules:
        catalog.entry(one.name).located = one.located
    for alias, target in options.lora_alias:
        if "@" in target and (missing := catalog.missing(alias)) and options.shared_dir is None:
            raise ConfigError(f"lora_alias: {alias}={target}: there is no model {missing[0]!r}")
    names, roots = sorted(entry.name for entry in catalog.entries()), ", ".join(map(str, options.lora_root))
    if names:
        more, what = ", …" if len(names) > SHOWN else "", "adapter" if len(names) == 1 else "adapters"
        logger.info("%d %s: %s%s", len(names), what, ", ".join(names[:SHOWN]), more)
    elif options.lora_root:
        logger.warning("no adapter is below --lora-root %s: each is a folder with adapter_config.json", roots)
    else:
        logger.info("no adapters: --lora-root FOLDER serves a folder of them, --lora-modules NAME=PATH one")
    for folder in sorted(folders):
        await catalog.load(folder.name, str(folder.resolve()), replace=True)
    return catalog

"""From options to a running server."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from manylora.device import open_device
from manylora.engine.engine import Engine
from manylora.errors import ConfigError
from manylora.loop import EngineLoop
from manylora.model.weights import compute_dtype
from manylora.openai.app import Service, make_app
from manylora.openai.backend import Backend
from manylora.openai.catalog import AdapterCatalog
from manylora.openai.fairness import FairQueue
from manylora.openai.inference import Inference
from manylora.openai.keys import Keyring
from manylora.openai.metrics import Metrics
from manylora.openai.names import is_name
from manylora.openai.options import ServeOptions
from manylora.openai.params import Limits
from manylora.openai.reader import AdapterReader
from manylora.text import Tokenizer

__all__ = ["open_app", "run"]

logger = logging.getLogger("manylora")

AHEAD = 2  # batches with the engine: one runs, one is ready to follow


def open_app(options: ServeOptions) -> Starlette:
    """Load everything that can fail, and give the application. Raises ConfigError, ValueError."""
    for name in options.bases:
        if not is_name(name):
            raise ConfigError(f"served_model_name {name!r} has characters that a model's name may not have")
    keyring = Keyring(options.api_keys, open_admin=options.allow_runtime_lora_updating)
    tokenizer = Tokenizer(options.tokenizer or options.model)
    return make_app(_starter(options, Engine(options.engine_config()), tokenizer, keyring))


def run(options: ServeOptions) -> None:
    """Serve until a signal. Requests under way then have drain_seconds to end."""
    app = open_app(options)
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        ssl_certfile=_text(options.ssl_certfile),
        ssl_keyfile=_text(options.ssl_keyfile),
        timeout_graceful_shutdown=max(1, int(options.drain_seconds)),
        log_level=options.log_level,
        access_log=False,
        server_header=False,
    )


def _starter(
    options: ServeOptions, engine: Engine, tokenizer: Tokenizer, keyring: Keyring
) -> Callable[[], Awaitable[Service]]:
    config = engine.config
    half = _computes_in_half(engine)
    reader = AdapterReader(options.model, engine.model, config.lora, half)
    folders = {Path(folder) for folder in getattr(options.sections.get("lora_config"), "lora_dir", ())}
    created = int(time.time())

    async def start() -> Service:
        catalog = AdapterCatalog(
            reader,
            options.lora_root,
            [*options.lora_allowed_path, *(folder.parent for folder in folders)],
            refresh_s=options.lora_refresh_seconds,
            keep_bytes=options.lora_keep_bytes,
            reserved=options.bases,
        )
        await catalog.start()
        for folder in sorted(folders):
            await catalog.load(folder.name, str(folder.resolve()), replace=True)
        metrics = Metrics(options.bases[0])
        queue = FairQueue(AHEAD * config.max_batch_size, options.max_queue_size)
        loop = EngineLoop(engine)
        backend = Backend(loop, engine.adapters.resident, catalog, queue, metrics.meter)
        limits = Limits(engine.max_seq_len, engine.model.vocab_size)
        base = options.bases[0]
        inference = Inference(backend, tokenizer, engine.model, limits, options.bases, f"fp_{base}")
        return Service(
            backend,
            inference,
            keyring,
            metrics,
            max_body_bytes=options.max_request_bytes,
            drain_s=options.drain_seconds,
            open_metrics=options.open_metrics,
            created=created,
        )

    return start


def _computes_in_half(engine: Engine) -> bool:
    dtype = compute_dtype(engine.config.dtype, engine.model, open_device(engine.config.device))
    return str(dtype) == "torch.float16"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)

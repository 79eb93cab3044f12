"""ServeOptions: the options of `manylora serve`, from the command line or a YAML file."""

# ruff: noqa: RUF009 - _option makes a dataclass field, nothing that instances would share.

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.values import CONVERTERS, at_least, one_of
from manylora.errors import ConfigError
from manylora.llmapi import options as llm
from manylora.llmapi.engine_config import engine_config
from manylora.openai.serving.connections import HttpLimits

ALIASES = {
    "lora_root": ("lora_prefetch_dir",),
    "max_seq_len": ("max_model_len",),
    "config": ("extra_llm_api_options",),
}
# Arguments of `LLM` that the file may have beside the options. max_queue_size is the server's own queue here,
# and adapters are always served.
LLM_ARGUMENTS = [name for name in (*llm.KNOWN, *llm.NEUTRAL) if name not in ("max_queue_size", "enable_lora")]
PERIODS = ("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout", "lora_refresh_seconds")
# Fields of peft_cache_config that are options of the server, as it reads the adapters.
CACHE_OPTIONS = {
    "lora_prefetch_dir": "lora_root",
    "disk_cache_dir": "lora_disk_dir",
    "disk_cache_size": "lora_disk_bytes",
}


def _option(default: Any, text: str, kind: type = str) -> Any:
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(frozen=True)
class ServeOptions:
    """Each field is a flag, and a key of the file; tuples are flags that may be repeated."""

    model: Path
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _option(8000, "0 chooses a free one", int)
    served_model_name: tuple[str, ...] = _option((), "names of the base model; default: its folder's")
    tokenizer: Path | None = _option(None, "tokenizer directory; default: the model's", Path)
    chat_template: Path | None = _option(None, "Jinja file; default: the tokenizer's own template", Path)
    triton_url: str | None = _option(
        None, "host:port of a running Triton's gRPC: its model answers in place of an engine in this process"
    )
    triton_model: str = _option("tensorrt_llm", "the model of that Triton to ask, with token ids")
    device: str | None = _option(None, "auto, cpu, cuda, cuda:N")
    dtype: str | None = _option(None, "auto, float32, float16, bfloat16")
    max_batch_size: int | None = _option(None, "sequences in one step", int)
    max_num_tokens: int | None = _option(None, "token rows in one step, at least max_batch_size", int)
    max_seq_len: int | None = _option(None, "prompt and output, in tokens; default: the model's", int)
    batch_scheduler_policy: str | None = _option(None, "guaranteed_no_evict or max_utilization")
    enable_chunked_prefill: bool | None = _option(None, "long prompts in pieces", bool)
    lora_root: tuple[Path, ...] = _option((), "folder of adapters by name; watched", Path)
    lora_allowed_path: tuple[Path, ...] = _option(
        (),
        "another folder that links in the roots may lead to and requests may name adapters in by path",
        Path,
    )
    lora_text_only: bool = _option(
        False, "of adapters of a vision model, serve the text part; without it they are refused", bool
    )
    lora_refresh_seconds: float = _option(5.0, "in which a new or changed adapter serves", float)
    lora_keep_bytes: int = _option(2**28, "adapter tensors in memory beside the cache", int)
    lora_disk_bytes: int = _option(
        LoraCacheConfig.disk_cache_bytes,
        "copies of adapters on disk, which outlive their files' changes; 0: none",
        int,
    )
    lora_disk_dir: Path | None = _option(None, "folder of these copies; default: a temporary one", Path)
    lora_upload_bytes: int = _option(
        2**30, "adapters that come in requests to load_lora_adapter, all together; 0: none may", int
    )
    lora_upload_dir: Path | None = _option(
        None, "folder that keeps these, and serves them after a restart; default: a temporary one", Path
    )
    api_keys: Path | None = _option(None, "file of API keys and what they may use", Path)
    allow_runtime_lora_updating: bool = _option(
        False, "without --api-keys: everyone may load and unload adapters", bool
    )
    open_metrics: bool = _option(False, "/metrics without a key", bool)
    max_request_bytes: int = _option(2**24, "larger bodies are refused", int)
    max_queue_size: int = _option(1024, "requests that wait; more are refused; 0: no limit", int)
    max_connections: int = _option(
        4096, "open at one time; where idle ones do not give way, new ones get 503", int
    )
    max_connections_per_address: int | None = _option(
        None, "of these from one address, or one IPv6 /64; default: half of them", int
    )
    max_header_bytes: int = _option(2**16, "request line and headers; more are refused", int)
    header_timeout: float = _option(15.0, "seconds in which request line and headers must come", float)
    body_timeout: float = _option(30.0, "seconds in which so many KiB of a body must come", float)
    keep_alive_timeout: float = _option(5.0, "seconds between two requests on one connection", float)
    write_timeout: float = _option(60.0, "seconds in which a client must read what was sent", float)
    allowed_hosts: tuple[str, ...] = _option(
        (), "names that clients know this server by, and whose pages may use it; *.NAME, * for any"
    )
    drain_seconds: float = _option(30.0, "that requests under way have when the server stops", float)
    hang_timeout: float = _option(
        300.0, "seconds at one step after which the engine counts as dead; 0: never", float
    )
    restart: bool = _option(
        False, "serve in a process of its own; it, or this one, is started again when it was killed", bool
    )
    ssl_certfile: Path | None = _option(None, "PEM file, for HTTPS", Path)
    ssl_keyfile: Path | None = _option(None, "PEM file, for HTTPS", Path)
    log_level: str = _option("info", "debug, info, warning, error")
    sections: Mapping[str, Any] = field(default_factory=dict)  # LLM_ARGUMENTS of the file

    def __post_init__(self) -> None:
        at_least(1, self, "max_request_bytes", "max_connections", "max_connections_per_address")
        at_least(1024, self, "max_header_bytes")
        at_least(0, self, "hang_timeout")
        one_of(("debug", "info", "warning", "error"), log_level=self.log_level)
        for name in PERIODS:
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be in (0, 86400], got {getattr(self, name)}")
        if self.triton_url is not None:
            self._check_triton()
        if self.restart and self.port == 0:
            raise ConfigError("restart needs a port of its own, got port 0: every start would choose another")
        for folder in (*self.lora_root, *self.lora_allowed_path):
            if not folder.is_dir():
                raise ConfigError(f"{folder} is not a directory: give folders")

    def _check_triton(self) -> None:
        """Raises ConfigError for a setting of the engine, as it has no effect on Triton's. max_batch_size and
        max_seq_len stand in where Triton's configuration has none."""
        given = [
            name
            for name, value in {**self.sections, **self._engine_flags()}.items()
            if name not in (*llm.NEUTRAL, "lora_config", "max_batch_size", "max_seq_len")
            and value != getattr(EngineConfig, llm.NAMES.get(name, ""), None)
        ]
        lora = self.sections.get("lora_config")
        given += [f"lora_config.{name}" for name in sorted(getattr(lora, "given", llm.READING) - llm.READING)]
        if given:
            raise ConfigError(
                f"{given[0]} has no effect with triton_url: set it in Triton's model repository"
            )

    def _engine_flags(self) -> dict[str, Any]:
        flags = {name: getattr(self, name, None) for name in LLM_ARGUMENTS}
        return {name: value for name, value in flags.items() if value is not None}

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the base model."""
        return self.served_model_name or (self.model.resolve().name,)

    def http_limits(self, connections: int) -> HttpLimits:
        """connections: max_connections, or what the process can hold of them."""
        return HttpLimits(
            header_bytes=self.max_header_bytes,
            header_s=self.header_timeout,
            body_s=self.body_timeout,
            idle_s=self.keep_alive_timeout,
            write_s=self.write_timeout,
            connections=connections,
            connections_per_address=self.max_connections_per_address or max(1, connections // 2),
        )

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError, ValueError."""
        return engine_config(
            self.model,
            {**self.sections, **self._engine_flags()},
            tokenizer_dir=self.tokenizer or self.model,
            disk_cache_dir=self.lora_disk_dir,
            disk_cache_bytes=self.lora_disk_bytes,
            **({"text_only": True} if self.lora_text_only else {}),  # else what the file says
        )


def parse_options(arguments: Sequence[str]) -> ServeOptions:
    """The command line, over the file that it names. Raises ConfigError; argparse ends the process."""
    parser = argparse.ArgumentParser(prog="manylora serve", description="An OpenAI server with adapters.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face directory")
    _add(parser, "config", type=Path, metavar="FILE", help="YAML file: keys as the flags, with underscores")
    for one in fields(ServeOptions):
        if not one.metadata:
            continue
        kind, text = one.metadata["kind"], one.metadata["help"]
        if kind is bool:
            _add(parser, one.name, action=argparse.BooleanOptionalAction, help=text)
        elif isinstance(one.default, tuple):
            _add(parser, one.name, type=kind, action="append", metavar="X", help=text)
        else:
            default = getattr(EngineConfig, one.name, None) if one.default is None else one.default
            shown = "" if default in (None, MISSING) else f" (default: {default})"
            _add(parser, one.name, type=kind, metavar="X", help=text + shown)
    given = vars(parser.parse_args(arguments))
    file = given.pop("config", None)
    settings = {} if file is None else _read(file)
    settings |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return ServeOptions(**settings)
    except TypeError as error:
        raise ConfigError(f"serve: {error}") from error


def _add(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    """With dashes and with underscores, under every name."""
    names = [name, *ALIASES.get(name, ())]
    flags = dict.fromkeys(flag for one in names for flag in (f"--{one.replace('_', '-')}", f"--{one}"))
    parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, **how)


def _read(path: Path) -> dict[str, Any]:
    """Fields of ServeOptions. Raises ConfigError."""
    found = {name: value for name, value in llm.read_options(path).items() if value is not None}
    known = {one.name: one for one in fields(ServeOptions) if one.metadata}
    try:
        llm.check_names("option", found, [*known, *LLM_ARGUMENTS, *sum(ALIASES.values(), ())])
        given: list[tuple[str, Any]] = []
        for key, value in found.items():
            name = next((name for name, others in ALIASES.items() if key in others), key)
            if name == "peft_cache_config" and isinstance(value, dict):
                given += [(to, value[one]) for one, to in CACHE_OPTIONS.items() if value.get(one) is not None]
                value = {one: value[one] for one in value if one not in CACHE_OPTIONS}
            given.append((name, value))
        sections = llm.llm_arguments({name: value for name, value in given if name not in known})
        llm.check_known({name: value for name, value in sections.items() if name in llm.NEUTRAL})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    settings: dict[str, Any] = {}
    for name, value in given:
        if name in known:
            made = _convert(path, name, value, known[name])
            settings[name] = (*settings.get(name, ()), *made) if isinstance(made, tuple) else made
    return settings | {"sections": sections}


def _convert(path: Path, name: str, value: Any, one: Any) -> Any:
    kind = one.metadata["kind"]
    convert = CONVERTERS[kind.__name__] if kind in (int, float) else kind
    try:
        if kind is bool and not isinstance(value, bool):
            raise ValueError("must be true or false")
        if isinstance(one.default, tuple):
            return tuple(convert(item) for item in (value if isinstance(value, list) else [value]))
        return convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {name} {error}") from error

"""ServeOptions: the options of `manylora serve`."""

# ruff: noqa: RUF009 - `setting` makes a dataclass field, nothing that instances would share.

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.adapters.catalog.names import Aliases, is_name, name_problem, targets_of
from manylora.adapters.catalog.texts import PARTS, TOKENIZER_BYTES, TextSource, TrustedFolder
from manylora.adapters.remote.resolver import CACHE_BYTES, AdapterSources, Located, is_remote
from manylora.checkpoints.gguf.config import is_gguf
from manylora.checkpoints.gguf.container import NAMED
from manylora.config.engine import SETTINGS, EngineConfig, LoraCacheConfig
from manylora.config.foreign import LLM
from manylora.config.model_folder import (
    check_adapter_path,
    check_model_folder,
    check_tokenizer_folder,
    hub_name,
    is_hub_id,
    local_model,
)
from manylora.config.settings import check, readable, setting
from manylora.doors.http.serving.connections import HttpLimits
from manylora.doors.python import options as llm
from manylora.doors.python.options import engine_config
from manylora.errors import ConfigError
from manylora.generation.reply_formats import PARSERS, REASONING

# Arguments of `LLM` that the server also has. max_queue_size means the server's own queue here, and adapters
# are always enabled.
LLM_ARGUMENTS = [name for name in (*llm.KNOWN, *LLM) if name not in ("max_queue_size", "enable_lora")]
PERIOD = MappingProxyType({"above": 0, "most": 86400})  # seconds
LOG_LEVELS = ("debug", "info", "warning", "error")
# Errors of the engine name its settings and Triton's parameters. What they are called here:
SIZES = (
    "kv_cache_free_gpu_mem_fraction", "gpu_memory_utilization", "tokens_per_block", "max_beam_width",
    "max_num_tokens", "max_batch_size", "max_seq_len",
)  # fmt: skip
ENGINE_NAMES = {row.name: f"--{row.flags[0].replace('_', '-')}" for row in SETTINGS if row.name in SIZES} | {
    "lora_cache_host_memory_bytes": "--max-cpu-loras (host_cache_size of peft_cache_config in --config)",
    "lora_cache_gpu_memory_fraction": "--max-loras (device_cache_percent of peft_cache_config in --config)",
    "lora_cache_max_adapter_size": "--max-lora-rank",
    "lora_target_modules": "modules in lora_target_modules of lora_config in --config",
}


@dataclass(frozen=True)
class NamedAdapter:
    """path: a folder, a file, a hub id or a URL. text: which of its own text settings are used. located:
    what `path` was before, and holds its files.
    """

    name: str
    path: str
    text: TextSource = TextSource()
    pinned: bool = False
    located: Located | None = None

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> NamedAdapter:
        """NAME=PATH, NAME.gguf, or vLLM's JSON object, also with the keys of `TextSource`. Raises
        ArgumentTypeError."""
        name, equals, path = given.partition("=") if isinstance(given, str) else ("", "", "")
        if not equals and name.endswith(".gguf"):
            name, equals, path = Path(name).stem, "=", name
        text, pinned = TextSource(), False
        if isinstance(given, Mapping) or name.lstrip().startswith("{"):
            try:
                found = json.loads(given) if isinstance(given, str) else dict(given)
                found.pop("base_model_name", None)
                name, path = found.pop("name"), found.pop("path")
                pinned = found.pop("pinned", False)
                parts = {one: found.pop(one) for one in PARTS if one in found}
                for one, value in parts.items():
                    kinds = (bool, str, dict) if one == "generation_config" else (bool, str)
                    if not isinstance(value, kinds):
                        what = "true, a path, or an object of settings" if dict in kinds else "true or a path"
                        raise argparse.ArgumentTypeError(f"{one} must be {what}, got {str(value)[:80]!r}")
                paths = {one: Path(value) for one, value in parts.items() if isinstance(value, str)}
                text = TextSource(**(parts | paths))
            except (ValueError, KeyError, AttributeError):
                found = {"": 0}
            equals = "" if found else "="
        equals = equals if isinstance(pinned, bool) else ""
        if not (equals and isinstance(name, str) and isinstance(path, str) and is_name(name) and path):
            raise argparse.ArgumentTypeError(
                'must be NAME=PATH, such as sql=/adapters/sql, or {"name": NAME, "path": PATH} with optional '
                f"keys {', '.join(PARTS)}, pinned; a NAME has 1 to 128 of A-Z a-z 0-9 . _ : / -; "
                f"got {str(given)[:200]!r}"
            )
        return cls(name, path, text, pinned)


def _alias(given: str) -> tuple[str, str]:
    """NAME=TARGET, or NAME=TARGET@WEIGHT,TARGET@WEIGHT. Raises ArgumentTypeError."""
    name, _, target = given.partition("=")
    try:
        plain = is_name(target) or len(targets_of(target)) > 1
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name[:200]}: {error}") from error
    if not (is_name(name) and plain):
        raise argparse.ArgumentTypeError(f"must be NAME=TARGET, both names of models, got {given[:200]!r}")
    return name, target


def json_object(given: Any) -> Mapping[str, Any]:
    """A JSON object, as text or parsed. Raises ArgumentTypeError."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, dict):
        text = given if isinstance(given, str) else json.dumps(given)
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:200]!r}")
    return found


def json_list(given: Any) -> tuple[str, ...]:
    """A JSON list of texts, as text or parsed. Raises ArgumentTypeError."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        text = given if isinstance(given, str) else json.dumps(given)
        raise argparse.ArgumentTypeError(f"must be a JSON list such as '[\"*\"]', got {text[:200]!r}")
    return tuple(found)


def _trusted_folder(given: str) -> TrustedFolder:
    """Raises ArgumentTypeError."""
    try:
        return TrustedFolder.parse(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class ServeOptions:
    """Each field is a flag and a key of the file. Tuples are flags that may be repeated.

    model, tokenizer: folders, or hub ids until `located`.
    """

    # fmt: off
    model: str | Path
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = setting(8000, "port to listen on; 0 chooses a free one")
    uds: Path | None = setting(None, "path of a Unix socket to listen on, instead of host and port")
    served_model_name: tuple[str, ...] = setting(
        (), "names of the base model; default: its folder's, or its file's without .gguf", many=True)
    revision: str | None = setting(None, "branch, tag or commit, if the model is a hub id")
    tokenizer: str | Path | None = setting(
        None, "tokenizer folder or hub id; default: the model's", parse=str)
    tokenizer_revision: str | None = setting(None, "branch, tag or commit, if the tokenizer is a hub id")
    download_dir: Path | None = setting(None, "download folder; default: HF_HOME's, and ~/.cache/manylora")
    chat_template: Path | None = setting(None, "Jinja file; default: the tokenizer's template")
    reasoning_parser: str = setting(
        "auto", "how a model marks its reasoning: auto (see its chat template), none (it stays in the "
        "content), or a name of vLLM's", choices=("auto", "none", *sorted(REASONING)))
    tool_call_parser: str = setting(
        "auto", "how a model writes tool calls: auto (see its chat template), or a name of vLLM's",
        choices=("auto", *PARSERS), serve="tool_call_parser tool_parser")
    enable_prompt_tokens_details: bool = setting(False, "tell usage.prompt_tokens_details.cached_tokens")
    generation_config: str = setting(
        "auto", "where a request's defaults come from: auto (the model), vllm (none), or a folder with a "
        "generation_config.json")
    override_generation_config: Mapping[str, Any] | None = setting(
        None, "JSON object of such defaults, which replace the model's: '{\"temperature\": 0.6}'",
        parse=json_object)
    triton_url: str | None = setting(
        None, "host:port (gRPC) of a running Triton server to use instead of an engine in this process")
    triton_model: str = setting("tensorrt_llm", "name of the model on that Triton server")
    lora_modules: tuple[NamedAdapter, ...] = setting(
        (), "adapters as NAME=PATH, NAME.gguf, NAME=HUB_ID or NAME=URL (s3, gs, https, oci, hf); several "
        "values", parse=NamedAdapter.parse, many=True, serve="lora_modules lora")
    lora_root: tuple[Path, ...] = setting(
        (), "folder with one adapter per subfolder; watched for changes", serve="lora_root lora_prefetch_dir")
    lora_allowed_path: tuple[Path, ...] = setting(
        (), "further folder that links in the roots may point to, and that requests may name paths in")
    lora_allowed_source: tuple[str, ...] = setting(
        (), "URL below which requests may load adapters, such as s3://bucket/adapters; default: none")
    lora_download_bytes: int = setting(
        CACHE_BYTES, "disk space for adapters from URLs; the least recently used are deleted", least=1)
    lora_alias: tuple[tuple[str, str], ...] = setting(
        (), "NAME=TARGET: another name for an adapter, or for the base model; with shares of its users: "
        "NAME=TARGET@10,TARGET@90", parse=_alias)
    lora_trust: tuple[TrustedFolder, ...] = setting(
        (), f"FOLDER or FOLDER=PART,PART: use the adapters' own {', '.join(PARTS)} where they have them",
        parse=_trusted_folder)
    lora_tokenizer_bytes: int = setting(
        TOKENIZER_BYTES, "memory for adapters' own tokenizers; each counts as eight times its file")
    lora_text_only: bool = setting(
        False, "serve the text part of vision-model adapters; otherwise they are refused")
    lora_refresh_seconds: float = setting(5.0, "seconds until a new or changed adapter is served", **PERIOD)
    lora_keep_bytes: int = setting(
        2**28, "memory beside the cache for adapters that cannot be reloaded directly from their files")
    lora_disk_bytes: int = setting(
        LoraCacheConfig.disk_cache_bytes,
        "disk space for copies of adapters, which survive changes of their files; 0: none")
    lora_disk_dir: Path | None = setting(None, "folder for these copies; default: a temporary one")
    lora_upload_bytes: int = setting(
        2**30, "total size of adapters sent to load_lora_adapter; 0: refuse them")
    lora_upload_dir: Path | None = setting(
        None, "folder that keeps these across restarts; default: a temporary one")
    batch_dir: Path | None = setting(
        None, "folder for files and batches, which go on after a restart; default: a temporary one")
    batch_bytes: int = setting(2**30, "total size of the files of batches; 0: no batches", least=0)
    api_keys: Path | None = setting(None, "file of API keys and what they may use")
    api_key: tuple[str, ...] = setting((), "API key that may use all models; takes several values", many=True)
    allow_runtime_lora_updating: bool = setting(
        False, "let clients without an entry in --api-keys load and unload adapters")
    usage_log: Path | None = setting(
        None, "file to which a line of JSON is added for each request: key, adapter, tokens, times")
    otlp_traces_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector that gets a trace of each request; default: that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, if set")
    open_metrics: bool = setting(False, "serve /metrics without a key")
    max_request_bytes: int = setting(2**24, "maximum size of a request body", least=1)
    max_queue_size: int = setting(1024, "maximum number of waiting requests; 0: no limit")
    scheduling_policy: str = setting(
        "fcfs", "fcfs: adapters take turns, by tokens; priority: requests with a lower priority come first",
        choices=("fcfs", "priority"))
    max_connections: int = setting(
        4096, "maximum number of open connections; beyond it idle ones are closed, or new ones get 503",
        least=1)
    max_connections_per_address: int | None = setting(
        None, "the same per address, or per IPv6 /64; default: half of it", least=1)
    max_header_bytes: int = setting(2**16, "maximum size of request line and headers", least=1024)
    header_timeout: float = setting(15.0, "seconds for a client to send request line and headers", **PERIOD)
    body_timeout: float = setting(
        30.0, "seconds, in each of which a client must send 1 KiB of a body on average", **PERIOD)
    keep_alive_timeout: float = setting(
        5.0, "seconds that a connection may be idle between requests", **PERIOD)
    write_timeout: float = setting(60.0, "seconds for a client to read what was sent", **PERIOD)
    allowed_hosts: tuple[str, ...] = setting(
        (), "host names that clients use for this server, and whose pages may use it; *.NAME, or * for any")
    allowed_origins: Sequence[str] = setting(
        (), "origins whose pages may use this server (CORS), as a JSON list: '[\"https://example.com\"]'; "
        "\"*\" for any", parse=json_list)
    allowed_methods: Sequence[str] = setting(("*",), "their methods, as a JSON list", parse=json_list)
    allowed_headers: Sequence[str] = setting(("*",), "their headers, as a JSON list", parse=json_list)
    allow_credentials: bool = setting(False, "let them send cookies and HTTP authentication")
    drain_seconds: float = setting(30.0, "seconds that running requests have when the server stops")
    hang_timeout: float = setting(
        300.0, "seconds without progress after which the engine counts as dead; 0: never", least=0)
    enable_sleep_mode: bool = setting(
        False, "serve POST /sleep and /wake_up, which free the memory of an idle engine and get it back")
    restart: bool = setting(
        False, "run the server in a child process, which is restarted when it ends or is killed")
    ssl_certfile: Path | None = setting(None, "PEM file with the certificate, for HTTPS")
    ssl_keyfile: Path | None = setting(None, "PEM file with the key, for HTTPS")
    log_level: str = setting("info", "debug, info, warning, error", choices=LOG_LEVELS)
    # fmt: on
    sections: Mapping[str, Any] = field(default_factory=dict)  # settings of the engine: arguments of `LLM`
    given_paths: tuple[str, ...] = ()  # `paths` before `located`

    def __post_init__(self) -> None:
        if self.lora_upload_dir is not None:
            object.__setattr__(self, "lora_upload_dir", self.lora_upload_dir.absolute())
        check(self)
        if self.uds is not None and (self.host, self.port) != (ServeOptions.host, ServeOptions.port):
            raise ConfigError("uds is instead of host and port: leave them out")
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) != getattr(ServeOptions, name) and not self.allowed_origins:
                raise ConfigError(f"{name} needs allowed_origins, whose pages may use this server")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate of that key")
        if self.triton_url is not None:
            if self.enable_sleep_mode:
                raise ConfigError("enable_sleep_mode needs an engine in this process: leave triton_url out")
            # max_batch_size and max_seq_len are used where Triton's configuration lacks them.
            passed, lora = (
                (*LLM, "lora_config", "max_batch_size", "max_seq_len"),
                self.sections.get("lora_config"),
            )
            given = [
                name
                for name, value in self.sections.items()
                if name not in passed and not (name in llm.ARGUMENTS and value == llm.ARGUMENTS[name].default)
            ]
            read = getattr(lora, "given", llm.READING)
            given += [f"lora_config.{name}" for name in sorted(read - llm.READING)]
            if given:
                where = "set it in Triton's model repository"
                raise ConfigError(f"{given[0]} has no effect with triton_url: {where}")
        Aliases(dict(self.lora_alias))
        named = [("lora_modules", one.name) for one in self.lora_modules]
        named += [("lora_alias", name) for name, _ in self.lora_alias]
        names = [name for _, name in named]
        for flag, name in named:
            if problem := name_problem(name, (*self.bases, *self.paths)):
                raise ConfigError(f"{flag}: {name!r} cannot be the name of an adapter: {problem}")
            if names.count(name) > 1:
                raise ConfigError(f"{flag}: {name!r} is there twice: give each adapter a name of its own")
        for root in self.lora_root:
            with readable(root):
                is_adapter = (root / "adapter_config.json").is_file()
            if is_adapter:
                flag = f"--lora-modules {root.absolute().name}={root}"
                raise ConfigError(
                    f"lora_root {root} is an adapter itself: give the folder above it, or {flag}"
                )
        if self.restart and self.port == 0:
            raise ConfigError("restart needs a port of its own, got port 0: every start would choose another")
        folders = [("lora-root", folder) for folder in self.lora_root]
        folders += [("lora-allowed-path", folder) for folder in self.lora_allowed_path]
        folders += [("lora-trust", one.path) for one in self.lora_trust]
        for flag, folder in folders:
            with readable(folder):
                if not folder.is_dir():
                    what = "is a file" if folder.exists() else "does not exist"
                    raise ConfigError(f"--{flag} {folder} {what}: give a folder")

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the base model: by default the hub id's, or that of its folder or GGUF file."""
        if self.served_model_name:
            return self.served_model_name
        if is_hub_id(self.model):
            return (hub_name(self.model),)
        if not is_gguf(Path(self.model)):
            return (Path(self.model).resolve().name,)
        stem = Path(self.model).stem
        part = NAMED.fullmatch(stem)  # a part's number is no part of the name
        return (re.sub(r"[^\w.:/-]", "-", part["stem"] if part else stem, flags=re.ASCII),)

    @property
    def paths(self) -> tuple[str, ...]:
        """What clients of other servers call it: its path as it was given, and a GGUF file's name."""
        file = (Path(self.model).name,) if is_gguf(Path(self.model)) else ()
        return str(self.model), f"{self.model}/", *file, *self.given_paths

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be downloaded."""
        given = [self.model, self.tokenizer or "", *(one.path for one in self.lora_modules)]
        return not any(map(is_remote, given))

    @property
    def sources(self) -> AdapterSources:
        """Where adapters come from."""
        folder = None if self.download_dir is None else self.download_dir / "manylora-adapters"
        most, allowed = self.lora_download_bytes, self.lora_allowed_source
        return AdapterSources(folder, most, allowed, self.download_dir)

    def located(self) -> ServeOptions:
        """The same with folders for hub ids and URLs, downloaded if need be. Raises ConfigError."""
        model = local_model(self.model, self.revision, self.download_dir)
        check_model_folder(model, weights=self.triton_url is None)
        tokenizer = model
        if self.tokenizer is not None:
            tokenizer = local_model(self.tokenizer, self.tokenizer_revision, self.download_dir)
        check_tokenizer_folder(tokenizer)
        found = self.sources.locate_all([one.path for one in self.lora_modules])
        for located in found:
            check_adapter_path(located.path)
        return replace(
            self,
            model=model,
            tokenizer=tokenizer,
            revision=None,
            tokenizer_revision=None,
            served_model_name=self.bases,
            given_paths=self.paths,
            lora_modules=tuple(
                replace(one, path=str(new.path), located=one.located or new)
                for one, new in zip(self.lora_modules, found, strict=True)
            ),
        )

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return Path(self.model)

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer or self.model)

    @property
    def shared_dir(self) -> Path | None:
        """The folder of a catalog that several servers share. None: this server has its own."""
        return None

    def http_limits(self, connections: int) -> HttpLimits:
        """connections: max_connections, or as many as the process can hold."""
        return HttpLimits(
            header_bytes=self.max_header_bytes,
            header_s=self.header_timeout,
            body_s=self.body_timeout,
            idle_s=self.keep_alive_timeout,
            write_s=self.write_timeout,
            connections=connections,
            # Clients of a Unix socket have no address.
            connections_per_address=self.max_connections_per_address
            or (connections if self.uds else max(1, connections // 2)),
        )

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError, ValueError."""
        return engine_config(
            self.folder,
            self.sections,
            tokenizer_dir=self.tokenizer_folder,
            disk_cache_dir=self.lora_disk_dir,
            disk_cache_bytes=self.lora_disk_bytes,
            **({"text_only": True} if self.lora_text_only else {}),  # otherwise the file decides
        )

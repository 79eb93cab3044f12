"""ServeOptions: the options of `manylora serve`."""

# ruff: noqa: RUF009 - _option makes a dataclass field, nothing that instances would share.

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.hub import hub_name, is_hub_id, local_adapter, local_model
from manylora.config.model_folder import check_adapter_path, check_model_folder, check_tokenizer_folder
from manylora.config.values import at_least, one_of, readable
from manylora.errors import ConfigError
from manylora.gguf.container import NAMED
from manylora.gguf.folder import is_gguf
from manylora.llmapi import options as llm
from manylora.llmapi.engine_config import engine_config
from manylora.lora.catalog.names import Aliases, is_name, name_problem
from manylora.lora.text.adapter_text import PARTS, TOKENIZER_BYTES, TextSource, TrustedFolder
from manylora.openai.other_flags import json_object
from manylora.openai.serving.connections import HttpLimits

# Arguments of `LLM` that the file may also have. max_queue_size means the server's own queue here, and
# adapters are always enabled.
LLM_ARGUMENTS = [name for name in (*llm.KNOWN, *llm.NEUTRAL) if name not in ("max_queue_size", "enable_lora")]
PERIODS = ("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout", "lora_refresh_seconds")


def _option(default: Any, text: str, kind: Callable[[Any], Any] = str) -> Any:
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(frozen=True)
class NamedAdapter:
    """path: a folder, a file, or a hub id. text: which of its own text settings are used. pinned: it stays in
    the cache.
    """

    name: str
    path: str
    text: TextSource = TextSource()
    pinned: bool = False

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> NamedAdapter:
        """NAME=PATH, or vLLM's JSON object (base_model_name has no effect), also with the keys of
        `TextSource`.

        Raises ArgumentTypeError.
        """
        name, equals, path = given.partition("=") if isinstance(given, str) else ("", "", "")
        text, pinned = TextSource(), False
        if isinstance(given, Mapping) or name.lstrip().startswith("{"):
            try:
                found = json.loads(given) if isinstance(given, str) else dict(given)
                found.pop("base_model_name", None)
                name, path = found.pop("name"), found.pop("path")
                pinned = found.pop("pinned", False)
                text = _text_source({one: found.pop(one) for one in PARTS if one in found})
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


def _name_of(model: str | Path) -> str:
    """The id of a hub model, or the name of its folder or GGUF file, without a part's number."""
    if is_hub_id(model):
        return hub_name(model)
    if not is_gguf(Path(model)):
        return Path(model).resolve().name
    stem = Path(model).stem
    part = NAMED.fullmatch(stem)
    return re.sub(r"[^\w.:/-]", "-", part["stem"] if part else stem, flags=re.ASCII)


def _alias(given: str) -> tuple[str, str]:
    """NAME=TARGET. Raises ArgumentTypeError."""
    name, _, target = given.partition("=")
    if not (is_name(name) and is_name(target)):
        raise argparse.ArgumentTypeError(f"must be NAME=TARGET, both names of models, got {given[:200]!r}")
    return name, target


def _text_source(given: Mapping[str, Any]) -> TextSource:
    """Raises ArgumentTypeError."""
    kinds = {"generation_config": (bool, str, dict)}
    for name, value in given.items():
        if not isinstance(value, kinds.get(name, (bool, str))):
            what = "true, a path, or an object of settings" if name in kinds else "true or a path"
            raise argparse.ArgumentTypeError(f"{name} must be {what}, got {str(value)[:80]!r}")
    found: dict[str, Any] = {name: Path(one) if isinstance(one, str) else one for name, one in given.items()}
    return TextSource(**found)


def _object(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A JSON object. Raises ArgumentTypeError."""
    return json_object(given) if isinstance(given, str) else json_object(json.dumps(given))


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

    model: str | Path
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = _option(8000, "port to listen on; 0 chooses a free one", int)
    served_model_name: tuple[str, ...] = _option(
        (), "names of the base model; default: its folder's, or its file's without .gguf"
    )
    revision: str | None = _option(None, "branch, tag or commit, if the model is a hub id")
    tokenizer: str | Path | None = _option(None, "tokenizer folder or hub id; default: the model's")
    tokenizer_revision: str | None = _option(None, "branch, tag or commit, if the tokenizer is a hub id")
    download_dir: Path | None = _option(None, "download folder; default: that of HF_HOME", Path)
    chat_template: Path | None = _option(None, "Jinja file; default: the tokenizer's template", Path)
    generation_config: str = _option(
        "auto",
        "where a request's defaults come from: auto (the model), vllm (none), or a folder with a "
        "generation_config.json",
    )
    override_generation_config: Mapping[str, Any] | None = _option(
        None, "JSON object of such defaults, which replace the model's: '{\"temperature\": 0.6}'", _object
    )
    triton_url: str | None = _option(
        None, "host:port (gRPC) of a running Triton server to use instead of an engine in this process"
    )
    triton_model: str = _option("tensorrt_llm", "name of the model on that Triton server")
    device: str | None = _option(None, "auto, cpu, cuda, cuda:N")
    dtype: str | None = _option(None, "auto, float32, float16, bfloat16")
    max_batch_size: int | None = _option(None, "maximum number of sequences in one step", int)
    max_num_tokens: int | None = _option(
        None, "maximum number of tokens in one step, at least max_batch_size", int
    )
    max_seq_len: int | None = _option(None, "maximum tokens of prompt and output; default: the model's", int)
    gpu_memory_utilization: float | None = _option(
        None, "share of the device's memory for weights, KV cache and adapters", float
    )
    batch_scheduler_policy: str | None = _option(None, "guaranteed_no_evict or max_utilization")
    enable_chunked_prefill: bool | None = _option(None, "process long prompts in chunks", bool)
    lora_modules: tuple[NamedAdapter, ...] = _option(
        (), "adapters as NAME=PATH or NAME=HUB_ID; takes several values", NamedAdapter.parse
    )
    lora_root: tuple[Path, ...] = _option(
        (), "folder with one adapter per subfolder; watched for changes", Path
    )
    lora_allowed_path: tuple[Path, ...] = _option(
        (),
        "further folder that links in the roots may point to, and that requests may name paths in",
        Path,
    )
    lora_alias: tuple[tuple[str, str], ...] = _option(
        (), "NAME=TARGET: another name for an adapter, or for the base model", _alias
    )
    lora_trust: tuple[TrustedFolder, ...] = _option(
        (),
        f"FOLDER or FOLDER=PART,PART: use the adapters' own {', '.join(PARTS)} where they have them",
        _trusted_folder,
    )
    lora_tokenizer_bytes: int = _option(
        TOKENIZER_BYTES, "memory for adapters' own tokenizers; each counts as eight times its file", int
    )
    lora_text_only: bool = _option(
        False, "serve the text part of vision-model adapters; otherwise they are refused", bool
    )
    lora_refresh_seconds: float = _option(5.0, "seconds until a new or changed adapter is served", float)
    lora_keep_bytes: int = _option(
        2**28,
        "memory beside the cache for adapters that cannot be reloaded directly from their files",
        int,
    )
    lora_disk_bytes: int = _option(
        LoraCacheConfig.disk_cache_bytes,
        "disk space for copies of adapters, which survive changes of their files; 0: none",
        int,
    )
    lora_disk_dir: Path | None = _option(None, "folder for these copies; default: a temporary one", Path)
    lora_upload_bytes: int = _option(
        2**30, "total size of adapters sent to load_lora_adapter; 0: refuse them", int
    )
    lora_upload_dir: Path | None = _option(
        None, "folder that keeps these across restarts; default: a temporary one", Path
    )
    batch_dir: Path | None = _option(
        None, "folder for files and batches, which go on after a restart; default: a temporary one", Path
    )
    batch_bytes: int = _option(2**30, "total size of the files of batches; 0: no batches", int)
    api_keys: Path | None = _option(None, "file of API keys and what they may use", Path)
    api_key: tuple[str, ...] = _option((), "API key that may use all models; takes several values")
    allow_runtime_lora_updating: bool = _option(
        False, "let clients without an entry in --api-keys load and unload adapters", bool
    )
    open_metrics: bool = _option(False, "serve /metrics without a key", bool)
    max_request_bytes: int = _option(2**24, "maximum size of a request body", int)
    max_queue_size: int = _option(1024, "maximum number of waiting requests; 0: no limit", int)
    max_connections: int = _option(
        4096, "maximum number of open connections; beyond it idle ones are closed, or new ones get 503", int
    )
    max_connections_per_address: int | None = _option(
        None, "the same per address, or per IPv6 /64; default: half of it", int
    )
    max_header_bytes: int = _option(2**16, "maximum size of request line and headers", int)
    header_timeout: float = _option(15.0, "seconds for a client to send request line and headers", float)
    body_timeout: float = _option(
        30.0, "seconds, in each of which a client must send 1 KiB of a body on average", float
    )
    keep_alive_timeout: float = _option(5.0, "seconds that a connection may be idle between requests", float)
    write_timeout: float = _option(60.0, "seconds for a client to read what was sent", float)
    allowed_hosts: tuple[str, ...] = _option(
        (), "host names that clients use for this server, and whose pages may use it; *.NAME, or * for any"
    )
    drain_seconds: float = _option(30.0, "seconds that running requests have when the server stops", float)
    hang_timeout: float = _option(
        300.0, "seconds without progress after which the engine counts as dead; 0: never", float
    )
    restart: bool = _option(
        False, "run the server in a child process, which is restarted when it ends or is killed", bool
    )
    ssl_certfile: Path | None = _option(None, "PEM file with the certificate, for HTTPS", Path)
    ssl_keyfile: Path | None = _option(None, "PEM file with the key, for HTTPS", Path)
    log_level: str = _option("info", "debug, info, warning, error")
    sections: Mapping[str, Any] = field(default_factory=dict)  # LLM_ARGUMENTS of the file
    given_paths: tuple[str, ...] = ()  # `paths` before `located`

    def __post_init__(self) -> None:
        if self.lora_upload_dir is not None:
            object.__setattr__(self, "lora_upload_dir", self.lora_upload_dir.absolute())
        at_least(1, self, "max_request_bytes", "max_connections", "max_connections_per_address")
        at_least(1024, self, "max_header_bytes")
        at_least(0, self, "hang_timeout")
        one_of(("debug", "info", "warning", "error"), log_level=self.log_level)
        for name in PERIODS:
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be in (0, 86400], got {getattr(self, name)}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate of that key")
        if self.triton_url is not None:
            self._check_triton()
        self._check_adapters()
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

    def _check_adapters(self) -> None:
        Aliases(dict(self.lora_alias))
        given = [("lora_modules", one.name) for one in self.lora_modules]
        given += [("lora_alias", name) for name, _ in self.lora_alias]
        names = [name for _, name in given]
        for flag, name in given:
            if problem := name_problem(name, (*self.bases, *self.paths)):
                raise ConfigError(f"{flag}: {name!r} cannot be the name of an adapter: {problem}")
            if names.count(name) > 1:
                raise ConfigError(f"{flag}: {name!r} is there twice: give each adapter a name of its own")
        for root in self.lora_root:
            with readable(root):
                is_adapter = (root / "adapter_config.json").is_file()
            if is_adapter:
                raise ConfigError(
                    f"lora_root {root} is an adapter itself: give the folder above it, or "
                    f"--lora-modules {root.absolute().name}={root}"
                )

    def _check_triton(self) -> None:
        """Raises ConfigError for a setting of the engine, which has no effect on Triton's.

        max_batch_size and max_seq_len are allowed: they are used where Triton's configuration lacks them.
        """
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
        return self.served_model_name or (_name_of(self.model),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The base model's path as it was given, by which clients of vLLM and trtllm-serve call it, and a
        GGUF file's name, by which clients of llama.cpp do.
        """
        file = (Path(self.model).name,) if is_gguf(Path(self.model)) else ()
        return str(self.model), f"{self.model}/", *file, *self.given_paths

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be downloaded."""
        given = [self.model, self.tokenizer or "", *(one.path for one in self.lora_modules)]
        return not any(map(is_hub_id, given))

    def located(self) -> ServeOptions:
        """The same with hub ids replaced by folders. Files that are not in the cache are downloaded.

        Raises ConfigError, also for a folder that is not a model, tokenizer or adapter.
        """
        model = local_model(self.model, self.revision, self.download_dir)
        check_model_folder(model, weights=self.triton_url is None)
        tokenizer = model
        if self.tokenizer is not None:
            tokenizer = local_model(self.tokenizer, self.tokenizer_revision, self.download_dir)
        check_tokenizer_folder(tokenizer)
        adapters = [(one, local_adapter(one.path, None, self.download_dir)) for one in self.lora_modules]
        for _, path in adapters:
            check_adapter_path(path)
        return replace(
            self,
            model=model,
            tokenizer=tokenizer,
            revision=None,
            tokenizer_revision=None,
            served_model_name=self.bases,
            given_paths=self.paths,
            lora_modules=tuple(replace(one, path=str(path)) for one, path in adapters),
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
            connections_per_address=self.max_connections_per_address or max(1, connections // 2),
        )

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError, ValueError."""
        return engine_config(
            self.folder,
            {**self.sections, **self._engine_flags()},
            tokenizer_dir=self.tokenizer_folder,
            disk_cache_dir=self.lora_disk_dir,
            disk_cache_bytes=self.lora_disk_bytes,
            **({"text_only": True} if self.lora_text_only else {}),  # otherwise the file decides
        )

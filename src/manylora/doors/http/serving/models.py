"""The JSON of /v1/models, and what a base model's files say about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from manylora.adapters.catalog.entry import AdapterEntry
from manylora.checkpoints.gguf.config import linked_files
from manylora.checkpoints.gguf.container import read_parts
from manylora.config.model import ModelConfig
from manylora.config.model_folder import weight_files
from manylora.doors.http.api.schema import CompletionRequest
from manylora.errors import ConfigError
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.stats import EngineStats

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # always shown


def base_card(
    name: str, base: str, created: int, max_seq_len: int, defaults: GenerationDefaults
) -> dict[str, Any]:
    """name: one of the base model's names; base: the first of them."""
    card = _card(name, created, base, None) | {"max_model_len": max_seq_len}
    return card | {"default_sampling_params": _in_force(defaults)}


def adapter_card(
    entry: AdapterEntry,
    base: str,
    created: int,
    tier: str,
    defaults: GenerationDefaults,
    *,
    pinned: bool = False,
) -> dict[str, Any]:
    """rank, digest and sizes are null until its files have been read. defaults: the base model's."""
    version, facts = entry.version, entry.version and entry.version.facts
    card = _card(entry.name, version.created if version else created, entry.name, base) | {
        "rank": facts and facts.rank,
        "dtype": facts and facts.dtype,
        "format": facts and facts.kind,
        "digest": version and version.digest,
        "version": version and version.number,
        "bytes": facts and facts.num_bytes,
        "notes": list(facts.notes) if facts else [],
        **({"labels": facts.labels} if facts and facts.labels else {}),
        "tier": tier,
    }
    card |= {"owned_by": entry.terms.owner or card["owned_by"], "pinned": pinned}
    if entry.source:
        card["source"] = entry.source
    if entry.terms.idle_ttl_seconds is not None:
        card["idle_ttl_seconds"] = entry.terms.idle_ttl_seconds
    if version is not None and version.text is not None and version.text.defaults != NO_DEFAULTS:
        card["default_sampling_params"] = _in_force(version.text.defaults.over(defaults))
    if entry.problem is not None:
        card["problem"] = {"code": entry.problem.code, "message": entry.problem.message}
    return card


def _in_force(defaults: GenerationDefaults) -> dict[str, Any]:
    """What a request gets that leaves these fields out."""
    usual = {name: CompletionRequest.model_fields[name].default for name in DEFAULTS}
    length = {} if defaults.max_tokens is None else {"max_tokens": defaults.max_tokens}
    return usual | dict(defaults.fields) | length


def _card(name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    common = {"id": name, "object": "model", "created": created, "owned_by": "manylora"}
    return common | {"root": root, "parent": parent}


def tiers(stats: EngineStats) -> dict[str, str]:
    """The level of each adapter in the cache, "device" or "host". All others are only on disk."""
    return {one.name: "device" if one.on_device else "host" for one in stats.adapters.residents}


def state_of(entry: AdapterEntry) -> str:
    """ "ready", "stale" (newer files are broken, the last good version is served), "broken" or "unread"."""
    if entry.version is not None:
        return "ready" if entry.problem is None else "stale"
    return "unread" if entry.problem is None else "broken"


UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True)
class ModelFiles:
    """format: gguf or safetensors. num_bytes, parameters: of all weights; 0: unknown. quantization: as in
    Q4_K_M, BF16 or FP8. file_type: GGUF's number for that; None: no GGUF file.
    """

    format: str = "safetensors"
    num_bytes: int = 0
    parameters: int = 0
    quantization: str = ""
    file_type: int | None = None

    @classmethod
    def read(cls, folder: Path, model: ModelConfig) -> ModelFiles:
        """Reads headers only. Without weights, as in front of a Triton server, little is known."""
        from safetensors import safe_open

        kinds = Counter[str]()
        try:
            paths = weight_files(folder)
            size = sum(path.stat().st_size for path in paths)
            if linked := linked_files(folder):
                from gguf.constants import LlamaFileType  # its import takes a while

                header = read_parts(linked[0].resolve())
                number = header.metadata.get("general.file_type", -1)
                for one in header.tensors.values():
                    kinds[one.kind] += prod(one.shape)
                known = {
                    int(one): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in LlamaFileType
                }
                quantization = known.get(number) or kinds.most_common(1)[0][0]
                return cls("gguf", size, kinds.total(), quantization, number if number in known else None)
            for path in paths:
                with safe_open(path, "np") as opened:
                    for name in opened.keys():  # noqa: SIM118 - it is no mapping
                        found = opened.get_slice(name)
                        kinds[found.get_dtype()] += prod(found.get_shape())
        except (ConfigError, OSError):
            return cls()
        if model.quant is not None:  # values are packed, so their number is unknown
            return cls(num_bytes=size, quantization=str(model.quant.algo.value))
        return cls(num_bytes=size, parameters=kinds.total(), quantization=kinds.most_common(1)[0][0])

    @property
    def parameter_size(self) -> str:
        """As Ollama writes it: 134.52M, 8.0B."""
        for unit, letter in UNITS:
            if self.parameters >= unit:
                digits = 2 if letter == "M" else 1
                return f"{self.parameters / unit:.{digits}f}{letter}"
        return str(self.parameters or "")

    def details(self, family: str, parent: str) -> dict[str, Any]:
        """`details` of Ollama's API."""
        return {
            "parent_model": parent,
            "format": self.format,
            "family": family,
            "families": [family],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }

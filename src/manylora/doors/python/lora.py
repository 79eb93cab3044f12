"""LoraConfig: adapter settings of an LLM. LoRARequest: the adapter of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from manylora.adapters.modules import MODULE_NAMES
from manylora.adapters.remote.resolver import is_remote
from manylora.config.resolve import with_whole_qkv
from manylora.request import LoraInput, LoraMix, mix

SOURCES = ("hf", "nemo")
MAX_ID = 2**64 - 1


class Options:
    """Records which fields were set (`dataclasses.replace` sets all): only these override a build record."""

    given: frozenset[str]

    def __new__(cls, *values: Any, **named: Any) -> Options:
        made = super().__new__(cls)
        names = [one.name for one in fields(cls)][: len(values)]  # type: ignore[arg-type]
        object.__setattr__(made, "given", frozenset([*names, *named]))
        return made


@dataclass(frozen=True)
class LoraConfig(Options):
    """Settings for the adapters of one LLM. Raises ValueError for wrong values.

    lora_dir: adapter directories from which target modules are inferred if none are named. lora_ckpt_source:
    "hf" (PEFT directories) or "nemo". max_lora_rank: adapters of a larger rank are refused.
    lora_target_modules: names such as attn_q; adapters with others are refused. Empty: inferred, or else all.
    trtllm_modules_to_hf_modules: module name -> its name or names in the checkpoint. Empty: the usual ones.
    max_loras, max_cpu_loras: capacity of the device and host caches, in adapters of the largest rank with
    every target module. None: the sizes of PeftCacheConfig. swap_gate_up_proj_lora_b_weight: adapters have
    the gate first in fused rows, as PEFT writes them; False: up. lora_adapter_dtype: dtype in memory: auto,
    float32, bfloat16 or float16. lora_text_only: serve the text part of a vision model's adapter; otherwise
    it is refused. The last two have no effect.
    """

    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: Mapping[str, str | list[str]] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj_lora_b_weight: bool = True
    lora_adapter_dtype: str = "auto"
    lora_text_only: bool = False
    overlap_lora_and_base: bool = False
    cuda_graph_specialize_lora: bool = False

    def __post_init__(self) -> None:
        if self.lora_ckpt_source not in SOURCES:
            raise ValueError(f"lora_ckpt_source must be one of 'hf' or 'nemo', got {self.lora_ckpt_source}")
        for name in ("lora_dir", "lora_target_modules"):
            if isinstance(getattr(self, name), str | Path):
                raise ValueError(f"{name} must be a list, got {getattr(self, name)!r}")
        for name in (*self.lora_target_modules, *self.trtllm_modules_to_hf_modules):
            if name not in MODULE_NAMES:
                raise ValueError(f"Invalid LoRA module {name}")
        for name in ("max_lora_rank", "max_loras", "max_cpu_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def missing_qkv_modules(self) -> list[str]:
        """q, k and v modules that are not named although another of their group is. They are served, too."""
        targets = tuple(self.lora_target_modules)
        return list(with_whole_qkv(targets)[len(targets) :])


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its id, and the path to read it from. Raises ValueError.

    lora_int_id: 0 to 2**64 - 1; identifies the adapter for the lifetime of the LLM.
    lora_path: a PEFT directory, a directory with the two converted .npy files, or a hub id org/name or a URL
        (s3, gs, https, oci, hf), which is downloaded at its first use. None: as earlier for this id, or the
        tensors of `LLM.load_adapter`.
    lora_version: keep: the request uses one version of the adapter; follow: it switches to newer ones.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | None = ""
    lora_ckpt_source: str = "hf"
    lora_version: str = "keep"

    def __post_init__(self) -> None:
        path = self.lora_path
        if path is not None and (not str(path) or not (Path(path).exists() or is_remote(path))):
            raise ValueError(f"lora_path ({path}) does not exist.")
        if self.lora_ckpt_source not in SOURCES:
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', got '{self.lora_ckpt_source}'")
        if self.lora_version not in ("keep", "follow"):
            raise ValueError(f"lora_version must be 'keep' or 'follow', got {self.lora_version!r}")
        if not isinstance(self.lora_int_id, int) or not 0 <= self.lora_int_id <= MAX_ID:
            raise ValueError(f"lora_int_id must be an unsigned 64-bit integer, got {self.lora_int_id!r}")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str | None:
        return self.lora_path

    @property
    def ckpt_source(self) -> str:
        return self.lora_ckpt_source


LoRAChoice = LoRARequest | tuple[LoRARequest, float] | Sequence[tuple[LoRARequest, float]]
"""An adapter, an adapter with a scale, or several adapters that act together, each with its scale."""


def is_choice(given: object) -> bool:
    """Whether this is a single choice, rather than a list with one per prompt."""
    if isinstance(given, list | tuple):
        return _is_scaled(given) or (bool(given) and all(map(_is_scaled, given)))
    return given is None or isinstance(given, LoRARequest)


def members_of(given: LoRAChoice | None) -> list[tuple[LoRARequest, float]]:
    """The adapters, each with its scale. Raises ValueError."""
    if not is_choice(given):
        raise ValueError(
            "lora_request must be a LoRARequest, or (LoRARequest, scale), or a list of these pairs, "
            f"got {str(given)[:200]}"
        )
    if given is None or isinstance(given, LoRARequest):
        return [] if given is None else [(given, 1.0)]
    pairs: Any = [given] if _is_scaled(given) else given
    return [(one, float(scale)) for one, scale in pairs]


def lora_of(given: LoRAChoice | None, follow: bool = False) -> LoraInput | LoraMix | None:
    """By id, as the engine gets them. follow: to newer versions if asked. Raises RequestError, ValueError."""
    adapters = [
        (LoraInput(one.lora_int_id, follow=follow and one.lora_version == "follow"), scale)
        for one, scale in members_of(given)
    ]
    return mix(adapters, "lora_request")


def _is_scaled(given: object) -> bool:
    if not isinstance(given, list | tuple) or len(given) != 2 or not isinstance(given[0], LoRARequest):
        return False
    return isinstance(given[1], int | float) and not isinstance(given[1], bool)

"""Protects each module's list of public names: it can be imported, and has them; and how far a reader follows
a warm request: through as few files of src as ways.py says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import manylora

PACKAGE = Path(manylora.__file__).parent
WITH_RAY = tuple(f"doors.fleet.{name}" for name in ("calls", "front", "application", "local"))


SAME = [
    ("lora_manager", "LoraConfig"),
    ("lora_helper", "LoraConfig"),
    ("executor.request", "LoRARequest"),
    ("sampling_params", "SamplingParams"),
    ("sampling_params", "GuidedDecodingParams"),
    ("llmapi", "GuidedDecodingParams"),
    ("llmapi.llm_args", "PeftCacheConfig"),
    ("llmapi.llm_args", "KvCacheConfig"),
    ("llmapi.llm_args", "LoraConfig"),
    ("llmapi", "LLM"),
    ("llmapi", "RequestOutput"),
    ("models.modeling_utils", "QuantConfig"),
    ("quantization.mode", "QuantAlgo"),
]
"""Modules of TensorRT-LLM's and ours that have a name, which is one object everywhere."""


def test_public_names_exist() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if name.removeprefix("manylora.") in WITH_RAY and find_spec("ray") is None:
            continue  # the extra fleet is not installed
        loaded = importlib.import_module(name)
        names = getattr(loaded, "__all__", [])
        assert len(names) == len(set(names)), f"{name}.__all__ names something twice"
        assert all(hasattr(loaded, public) for public in names), name


def test_every_name_is_the_same_at_every_path() -> None:
    for module, name in SAME:
        assert getattr(importlib.import_module(f"manylora.{module}"), name) is getattr(manylora, name), module


def test_a_warm_request_runs_through_few_files() -> None:
    script = Path(__file__).resolve().parents[1] / "ways.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]

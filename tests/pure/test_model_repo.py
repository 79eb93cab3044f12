"""Protects the Triton contract: the table of tensors and every config.pbtxt say the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from manylora.config.repository import engine_config
from manylora.doors.triton.tensor_table import MODELS
from manylora.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    "triton_max_batch_size": "8", "logits_datatype": "TYPE_FP32", "lora_weights_data_type": "TYPE_FP16",
    "encoder_input_features_data_type": "TYPE_FP16", "triton_backend": "python", "decoupled_mode": "True",
    "max_queue_size": "0", "max_queue_delay_microseconds": "0", "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1", "bls_instance_count": "1", "llmapi_decoupled": "False",
}  # fmt: skip


def fill(text: str) -> str:
    for name, value in VALUES.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def config(model: str) -> model_config_pb2.ModelConfig:
    text = fill((ROOT / "model_repo" / model / "config.pbtxt").read_text())
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("model", sorted(MODELS))
def test_table_and_config_say_the_same(model: str) -> None:
    found, table = config(model), MODELS[model]
    ragged = model != "ensemble"  # an ensemble does not batch
    name = model_config_pb2.DataType.Name
    assert sorted(
        (t.name, name(t.data_type), tuple(t.dims), t.optional, t.HasField("reshape"), t.allow_ragged_batch)
        for t in found.input
    ) == sorted(
        (t.name, _type(t.dtype), t.dims, t.optional, t.scalar, t.ragged and ragged) for t in table.inputs
    )
    assert sorted((t.name, name(t.data_type), tuple(t.dims)) for t in found.output) == sorted(
        (t.name, _type(t.dtype), t.dims) for t in table.outputs
    )


def _type(dtype: str) -> str:
    return fill(dtype) if dtype.startswith("${") else f"TYPE_{dtype}"


def test_every_parameter_of_the_engine_is_in_the_template() -> None:
    class Asked(dict):
        names: ClassVar[set[str]] = set()

        def get(self, name: str, default: str = "") -> str:
            self.names.add(name)
            return super().get(name, default)

    engine_config(Asked(gpt_model_type="v1", gpt_model_path="/m"))
    text = (ROOT / "model_repo/tensorrt_llm/config.pbtxt").read_text()
    assert len(Asked.names) > 20
    assert Asked.names <= set(re.findall(r'key: "(\w+)"', text))


def test_parameters_become_a_config_or_name_what_is_wrong() -> None:
    good = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": "/m"}
    made = engine_config(
        good | {"lora_cache_max_adapter_size": "128", "lora_prefetch_dir": "${lora_prefetch_dir}"}
    )
    assert made.lora.rank_limit == 128
    assert made.lora.prefetch_dir is None
    assert made.lora.gpu_memory_fraction == 0.05
    assert made.lora.host_memory_bytes == 2**30
    for extra, words in [
        ({"gpt_model_type": "static"}, "Invalid gpt_model_type. Must be v1/inflight_batching"),
        ({"gpt_model_path": ""}, "gpt_model_path"),
        ({"lora_cache_gpu_memory_fraction": "lots"}, "lora_cache_gpu_memory_fraction must be a number"),
        ({"lora_cache_gpu_memory_fraction": "7"}, "lora_cache_gpu_memory_fraction must be in"),
        ({"enable_kv_cache_reuse": "maybe"}, "enable_kv_cache_reuse must be true or false"),
        ({"decoding_mode": "medusa"}, "decoding_mode value of 'medusa' is not supported"),
        ({"batch_scheduler_policy": "fifo"}, "batch_scheduler_policy must be one of"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            engine_config(good | extra)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_an_attention_window_is_taken_if_it_hides_nothing(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: 64}), encoding="utf-8")
    good = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": str(tmp_path)}
    for window, more in (("64", {}), ("2560, 64", {}), ("32", {"max_seq_len": "32"})):
        engine_config(good | {"max_attention_window_size": window} | more)
    for window, words in (
        ("63", "'63' is not supported; leave it empty, or use the longest sequence's length, 64, or more"),
        ("64,32", "max_attention_window_size value of '64,32' is not supported"),
        ("wide", "max_attention_window_size must be a whole number, got 'wide'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            engine_config(good | {"max_attention_window_size": window})


def test_the_models_beside_the_engine_load_neither_torch_nor_pydantic() -> None:
    """Torch takes 200 MiB and seconds of each process that imports it, by whatever way. pydantic is only for
    `manylora serve`: the extra `server` does not name it.
    """
    files = set(ROOT.glob("model_repo/*/1/model.py"))
    names = {
        n for file in files for n in re.findall(r"^from (manylora[\w.]+) import", file.read_text(), re.M)
    }
    engine = {name for name in names if name.startswith("manylora.engine")}
    for blocked, modules in (("torch transformers pydantic", names - engine), ("pydantic", names)):
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({blocked.split()}))\nimport {', '.join(modules)}"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

"""Protects that one setting means the same everywhere: Triton's parameters, `LLM`, `manylora serve` and
`manylora bench` resolve the same values to the same EngineConfig, with a build record and without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

import pytest

from manylora import LLM
from manylora.cli import main
from manylora.config.engine import QUANT_KEYS, EngineConfig, LoraCacheConfig
from manylora.config.repository import PARAMETERS as TRITON_ROWS
from manylora.config.repository import engine_config
from manylora.doors.cli.bench import ENGINE_FLAGS
from manylora.doors.cli.prepare_dataset import BenchRequest, write_dataset
from manylora.doors.http.arguments import parse_options
from manylora.doors.http.options import LLM_ARGUMENTS
from manylora.doors.python import base as llm_module
from manylora.doors.python.options import ARGUMENTS, llm_arguments
from manylora.errors import ConfigError

LLM_NAMES = {name: row.name for name, row in ARGUMENTS.items()}
PARAMETERS = {name: row.name for name, row in TRITON_ROWS.items()}
BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
FRONT_ENDS = ("triton", "llm", "serve", "bench")
# Values other than the defaults, within RECORD.
VALUES: dict[str, Any] = {
    "device": "cpu", "dtype": "float16", "max_batch_size": 3, "max_beam_width": 2, "max_num_tokens": 24,
    "max_seq_len": 20, "tokens_per_block": 16, "kv_cache_free_gpu_mem_fraction": 0.5,
    "gpu_memory_utilization": 0.75,
    "max_tokens_in_paged_kv_cache": 4096, "enable_kv_cache_reuse": False, "enable_chunked_context": False,
    "batch_scheduler_policy": "max_utilization", "max_queue_size": 7, "wrap_input_ids": True,
    "stream_interval": 5,
    "enable_cuda_graph": False, "cuda_graph_cache_size": 9, "enable_overlap": False, "tokenizer_dir": BASE,
    "optimal_adapter_size": 4, "max_adapter_size": 32, "gpu_memory_fraction": 0.25,
    "gpu_memory_bytes": 2**24, "host_memory_bytes": 2**25, "num_device_module_layer": 300,
    "num_host_module_layer": 400, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 2,
    "target_modules": ("attn_q", "attn_k", "attn_v"), "prefetch_dir": Path("/prefetch"),
    "catalog_dir": Path("/catalog"), "names_file": Path("/names.json"),
    "allowed_paths": (Path("/a"), Path("/b")),
    "lora_adapter_dtype": "bfloat16",
    "text_only": True, "disk_cache_dir": Path("/disk"), "disk_cache_bytes": 2**20, "quant_algo": "W4A16",
    "kv_cache_quant_algo": "FP8", "group_size": 64,
    "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "moe_expert_parallel_size": 4,
    "exclude_modules": ["*k_proj"], "max_draft_len": 5, "max_matching_ngram_size": 3,
    "min_matching_ngram_size": 1, "ngram_use_oldest": False, "max_draft_concurrency": 6,
    "kv_cache_host_memory_bytes": 2**23, "kv_disk_cache_dir": Path("/kv"), "kv_disk_cache_bytes": 2**24,
    "secondary_offload_min_priority": 40,
}  # fmt: skip
# Keys that a front end has no name for, and why.
FILES = {
    "prefetch_dir": "TensorRT-LLM's LLM API refuses it", "catalog_dir": "a request names its adapter's path",
    "names_file": "likewise", "allowed_paths": "for the links in these two",
}  # fmt: skip
MISSING: dict[str, dict[str, str]] = {
    "triton": {}, "llm": FILES, "bench": FILES,
    "serve": dict.fromkeys(FILES, "it has a catalog of its own")
    | {"max_queue_size": "it bounds the server's own queue"},
}  # fmt: skip
PYTHON_API = {"gpu_memory_fraction": 0.02, "max_beam_width": EngineConfig.max_batch_size}
# Defaults that TensorRT-LLM documents otherwise than for Triton, and for bench otherwise than for the API.
DEFAULTS: dict[str, dict[str, Any]] = {
    "triton": {"max_queue_size": 1024}, "llm": PYTHON_API, "serve": PYTHON_API,
    "bench": PYTHON_API | {"enable_kv_cache_reuse": False},
}  # fmt: skip
RECORD = {
    "build_config": {
        "max_batch_size": 4, "max_seq_len": 32, "max_num_tokens": 48,
        "lora_config": {
            "max_lora_rank": 4, "lora_target_modules": ["attn_q", "attn_k", "attn_v", "attn_dense"],
        },
    },
    "pretrained_config": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
}  # fmt: skip
RECORDED = {
    "max_batch_size": 4, "max_seq_len": 32, "max_num_tokens": 48, "max_lora_rank": 4,
    "target_modules": ("attn_q", "attn_k", "attn_v", "attn_dense"), "kv_cache_quant_algo": "FP8",
}  # fmt: skip


class Opened(Exception):  # noqa: N818
    """In place of an engine."""


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(config: EngineConfig) -> NoReturn:
        raise Opened(config)

    monkeypatch.setattr(llm_module, "open_engine", engine)


@pytest.fixture(params=[False, True], ids=["plain", "built"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    path = tmp_path / "model"
    path.mkdir()
    for file in BASE.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(
        json.dumps(config | (RECORD if request.param else {})), encoding="utf-8"
    )
    return path


def keys() -> list[str]:
    own = [one.name for one in fields(EngineConfig) if one.name not in ("model_dir", "quant", "lora")]
    return [*own, *(one.name for one in fields(LoraCacheConfig)), *QUANT_KEYS]


def flat(config: EngineConfig) -> dict[str, Any]:
    """Every key's value."""
    quant = dict.fromkeys(QUANT_KEYS) if config.quant is None else asdict(config.quant)
    if config.quant is None:
        quant["group_size"] = 128
    found = {**vars(config), **vars(config.lora), **quant}
    return {key: found[key] for key in keys()}


def resolved(front_end: str, model: Path, said: Mapping[str, Any]) -> EngineConfig:
    """Guided decoding is asked for everywhere, so that there is a tokenizer's directory."""
    if front_end == "triton":
        return _triton(model, said)
    options = _options(said, front_end)
    if front_end == "serve":
        file = model.parent / "serve.json"
        file.write_text(json.dumps(options), encoding="utf-8")
        return parse_options([str(model), "--config", str(file)]).engine_config()
    options |= {} if "lora_config" in options else {"enable_lora": True}
    with pytest.raises(Opened) as opened:
        if front_end == "llm":
            LLM(model, **llm_arguments(options))
        else:
            _bench(model, options)
    return opened.value.args[0]  # type: ignore[no-any-return]


def _triton(model: Path, said: Mapping[str, Any]) -> EngineConfig:
    names = {key: name for name, key in PARAMETERS.items()}
    parameters = {"gpt_model_type": "v1", "gpt_model_path": str(model), "guided_decoding_backend": "xgrammar"}
    for key, value in said.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        parameters[names[key]] = text
    return engine_config(parameters)


def _options(said: Mapping[str, Any], front_end: str) -> dict[str, Any]:
    """What a file holds."""
    names = {key: name for name, key in LLM_NAMES.items() if name != "kv_cache_config.dtype"}
    options: dict[str, Any] = {"guided_decoding_backend": "xgrammar"}
    for key, value in said.items():
        if key == "tokenizer_dir":
            options["tokenizer"] = str(value)
        elif key == "enable_overlap":
            options["disable_overlap_scheduler"] = not value
        elif key not in MISSING[front_end]:
            part, _, field = names[key].rpartition(".")
            made = str(value) if isinstance(value, Path) else value
            (options.setdefault(part, {}) if part else options)[field] = (
                list(made) if isinstance(made, tuple) else made
            )
    return options


def _bench(model: Path, options: Mapping[str, Any], *flags: str) -> None:
    data, file = model.parent / "data", model.parent / "bench.json"
    write_dataset(data, [BenchRequest(0, "Hi", None, 1)])
    file.write_text(json.dumps(options), encoding="utf-8")
    main(
        ["bench", "--model", str(model), "throughput", "--dataset", str(data), "--config", str(file), *flags]
    )


def test_every_setting_has_a_name_everywhere() -> None:
    assert set(VALUES) == set(keys()), "a field of EngineConfig or LoraCacheConfig has no value here"
    top = {name: key for name, key in LLM_NAMES.items() if name.partition(".")[0] in LLM_ARGUMENTS}
    tables = {"triton": PARAMETERS, "llm": LLM_NAMES, "bench": LLM_NAMES, "serve": top}
    for front_end, names in tables.items():
        named = {*names.values(), "tokenizer_dir"}  # an argument of its own
        assert set(keys()) - named == set(MISSING[front_end]), front_end


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_defaults_are_the_same_but_for_those_written_here(front_end: str, model: Path) -> None:
    built = "build_config" in (model / "config.json").read_text(encoding="utf-8")
    expected = flat(EngineConfig(model)) | {"max_lora_rank": 64, "tokenizer_dir": model}
    expected |= DEFAULTS[front_end] | (RECORDED if built else {})
    if built and front_end != "triton":
        expected["max_beam_width"] = 4
    assert flat(resolved(front_end, model, {})) == expected


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_one_setting_acts_the_same_everywhere(front_end: str, model: Path) -> None:
    for key in VALUES.keys() - MISSING[front_end].keys():
        said = {key: VALUES[key]}
        if key in ("max_num_tokens", "max_beam_width"):
            said["max_batch_size"] = 3
        if "ngram" in key or key == "max_draft_concurrency":
            said["max_draft_len"] = 5
        if key == "kv_disk_cache_bytes":
            said["kv_disk_cache_dir"] = VALUES["kv_disk_cache_dir"]
        found = flat(resolved(front_end, model, said))
        assert found[key] == VALUES[key], key
        others = flat(resolved("triton", model, said))
        differing = {name for name in keys() if found[name] != others[name]}
        assert differing <= {*DEFAULTS[front_end], *DEFAULTS["triton"]} - {key}, key


@pytest.mark.parametrize("model", [True], ids=["built"], indirect=True)
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"max_batch_size": 5}, "max_batch_size (5) is larger than the directory was built for (4)"),
        ({"max_seq_len": 33}, "build again with --max_seq_len 33"),
        ({"max_num_tokens": 49}, "max_num_tokens (49) is larger"),
        ({"max_lora_rank": 64}, "max_lora_rank (64) is larger than the directory was built for (4)"),
        ({"target_modules": ("mlp_gate",)}, "mlp_gate is not among those the directory was built for"),
        ({"max_num_tokens": 2}, "max_num_tokens must be at least max_batch_size (4), got 2"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"max_batch_size": "many"}, "must be a whole number, got 'many'"),
        ({"enable_cuda_graph": "maybe"}, "must be true or false, got 'maybe'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("front_end", ["triton", "llm", "serve"])
def test_what_cannot_be_served_is_refused_alike(
    front_end: str, said: dict[str, Any], text: str, model: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        if front_end == "llm":
            LLM(model, **llm_arguments(_options(said, front_end)))
        else:
            resolved(front_end, model, said)
    assert text in str(error.value)


def test_flags_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(BASE)
    model, file = tmp_path / "model", {key: VALUES[key] for key in ("max_batch_size", "max_seq_len", "dtype")}
    flags = ["--max_batch_size", "5", "--max_num_tokens", "40", "--max_seq_len", "30", "--dtype", "bfloat16"]
    with pytest.raises(Opened) as opened:
        more = ["--scheduler_policy", "max_utilization", "--disable_chunked_context"]
        _bench(model, file, *flags, *more, "--kv_cache_free_gpu_mem_fraction", "0.5")
    assert set(ENGINE_FLAGS) >= {
        "scheduler_policy",
        "enable_chunked_context",
        "kv_cache_free_gpu_mem_fraction",
    }
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(file | {"kv_cache_config": {"free_gpu_memory_fraction": 0.5}}))
    more = ["--batch_scheduler_policy", "max_utilization", "--no-enable-chunked-prefill"]
    disk = ["--lora-disk-dir", "/disk", "--lora-disk-bytes", "5", "--lora-text-only"]
    served = parse_options([str(model), "--config", str(path), *flags, *more, *disk]).engine_config()
    assert (served.lora.disk_cache_dir, served.lora.disk_cache_bytes) == (Path("/disk"), 5)
    assert served.lora.text_only
    for config in (opened.value.args[0], served):
        assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (5, 40, 30)
        assert (config.dtype, config.batch_scheduler_policy) == ("bfloat16", "max_utilization")
        assert (config.enable_chunked_context, config.kv_cache_free_gpu_mem_fraction) == (False, 0.5)


def test_what_has_no_effect_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"kv_cache_config": {"onboard_blocks": False}, "peft_cache_config": {"num_put_workers": 2}}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options | {"max_batch_size": 2}), encoding="utf-8")
    parse_options([str(BASE), "--config", str(file)]).engine_config()
    given = {"gpt_model_type": "v1", "gpt_model_path": str(BASE), "num_nodes": "2", "max_beam_width": "1"}
    engine_config(given)
    assert sorted(record.message for record in caplog.records) == [
        "kv_cache_config.onboard_blocks has no effect here",
        "parameter num_nodes has no effect here",
        "peft_cache_config.num_put_workers has no effect here",
    ]


def test_settings_of_an_engine_elsewhere_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    for options, name in (
        ({"device": "cpu"}, "device"),
        ({"kv_cache_config": {"max_tokens": 9}}, "kv_cache_config"),
        ({"quant_config": {"quant_algo": "W8A16"}}, "quant_config"),
        ({"lora_config": {"lora_dir": [], "max_lora_rank": 9}}, "lora_config.max_lora_rank"),
    ):
        file.write_text(json.dumps(options), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{name} has no effect with triton_url"):
            parse_options([str(BASE), "--config", str(file), "--triton-url", "localhost:1"])
    file.write_text('{"lora_config": {"lora_dir": []}, "device": "auto", "max_seq_len": 9}', encoding="utf-8")
    assert (
        parse_options([str(BASE), "--config", str(file), "--triton-url", "localhost:1"]).sections[
            "max_seq_len"
        ]
        == 9
    )


def test_vllms_flag_divides_experts_among_all_ranks_of_a_layer() -> None:
    flags = [str(BASE), "--enable-expert-parallel"]
    sizes = {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4}
    assert parse_options([*flags, "-tp", "4"]).sections == sizes
    without = parse_options([str(BASE), "--no-enable-expert-parallel", "--tp-size", "4"])
    assert without.sections == {"tensor_parallel_size": 4}
    for wrong, reason in ((["-tp", "4", "--ep-size", "2"], "means --ep-size 4, got 2"), ([], "both")):
        with pytest.raises(ConfigError, match=reason):
            parse_options([*flags, *wrong])


def test_weights_are_quantised_by_a_flag_of_vllm() -> None:
    for value, algo in (("W4A8", "W4A8"), ("fp8", "FP8")):
        quant = parse_options([str(BASE), "-q", value]).engine_config().quant
        assert quant is not None and quant.quant_algo == algo

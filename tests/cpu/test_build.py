"""Protects `manylora build`: what it writes answers as the original, within its limits and with its adapters,
and what cannot be built is said before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model

from manylora import LLM, LoraConfig, LoRARequest, QuantConfig, SamplingParams
from manylora.cli import main
from manylora.config.engine import read_build_record
from manylora.config.repository import engine_config
from manylora.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
BASE = DEMO / "base"
ALGOS = ("W8A16", "W4A16", "FP8")
PROMPT = "Where is the capital of Egypt? \\nAnswer:"
JAPANESE = LoRARequest("japanese", 1, str(DEMO / "adapters" / "japanese"))


def build(output: Path, *flags: str, model: Path = BASE) -> Path:
    assert main(["build", "--model_dir", str(model), "--output_dir", str(output), *flags]) == 0
    return output


def answers(model: Path, adapter: LoRARequest | None, **options: object) -> list[tuple[int, ...]]:
    with LLM(model, device="cpu", **options) as llm:  # type: ignore[arg-type]
        prompts = [PROMPT, "Where is the capital of Peru? \\nAnswer:"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12), [adapter, None], False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("algo", [None, *ALGOS])
def test_a_built_directory_answers_as_the_original(tmp_path: Path, algo: str | None) -> None:
    """Quantised when it was built, or when it is loaded: the same."""
    modules = ["attn_q", "attn_k", "attn_v"]
    lora = ["--lora_target_modules", *modules, "--max_lora_rank", "16"]
    built = build(tmp_path / "out", "--dtype", "float32", *lora, *(["--quant_algo", algo] if algo else []))
    quant = QuantConfig(algo) if algo else None
    config = LoraConfig(lora_target_modules=modules, max_lora_rank=16)
    expected = answers(BASE, JAPANESE, quant_config=quant, lora_config=config, dtype="float32")
    assert answers(built, JAPANESE) == expected


def test_it_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quant_algo", "W4A16", "--dtype", "bfloat16", "--max_batch_size", "4", "--max_seq_len", "64"]
    flags += ["--kv_cache_quant_algo", "FP8"]
    chinese = str(DEMO / "adapters" / "chinese")
    built = build(tmp_path / "out", *flags, "--lora_dir", chinese, "--max_lora_rank", "8")
    assert "28 of 28 linear layers in W4A16" in capsys.readouterr().out
    config = json.loads((built / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["pretrained_config"]["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "W4A16"
    assert config["build_config"] == {
        "max_batch_size": 4, "max_seq_len": 64, "max_num_tokens": None, "max_beam_width": None,
        "lora_config": {
            "lora_dir": [chinese], "lora_target_modules": ["attn_q", "attn_k", "attn_v"],
            "lora_ckpt_source": "hf", "max_lora_rank": 8,
        },
    }  # fmt: skip
    assert engine_config({"gpt_model_type": "v1", "gpt_model_path": str(built)}).quant == QuantConfig(
        kv_cache_quant_algo="FP8"
    )
    tensors = load_file(built / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.qweight"].dtype == torch.uint8
    assert "model.layers.0.mlp.up_proj.weight" not in tensors
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (built / name).read_bytes() == (BASE / name).read_bytes()
    assert (built / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_its_limits_are_defaults_and_upper_bounds(tmp_path: Path) -> None:
    built = build(
        tmp_path / "out", "--max_batch_size", "4", "--max_seq_len", "48", "--max_num_tokens", "32",
        "--max_lora_rank", "8", "--lora_target_modules", "attn_q",
    )  # fmt: skip
    with LLM(built, device="cpu") as llm:
        assert llm.stats().max_batch_size == 4
        assert len(llm.generate([5] * 40, SamplingParams(max_tokens=99, end_id=-1)).outputs[0].token_ids) == 8
        with pytest.raises(Exception, match="48"):
            llm.generate([5] * 48)
    with LLM(built, device="cpu", max_batch_size=2, max_seq_len=16) as llm:
        assert llm.stats().max_batch_size == 2
    given = {"gpt_model_type": "v1", "gpt_model_path": str(built)}
    served = engine_config(given)
    assert (served.max_batch_size, served.max_seq_len, served.max_num_tokens) == (4, 48, 32)
    assert served.lora.rank_limit == 8 and "attn_v" in served.lora.target_modules


def test_several_files_and_excluded_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is fused with an excluded one stays plain as well, so the directory loads."""
    model = make_model(tmp_path / "model", "llama-biases", seed=3, sharded=True)
    monkeypatch.setattr("manylora.model.builder.SHARD_BYTES", 40_000)
    built = build(tmp_path / "out", "--quant_algo", "W8A16", "--exclude_modules", "*k_proj", model=model)
    assert len(list(built.glob("model-0*-of-0*.safetensors"))) > 2
    index = json.loads((built / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert "model.layers.0.self_attn.q_proj.weight" in index
    assert "model.layers.0.self_attn.o_proj.qweight" in index
    quant = QuantConfig("W8A16", exclude_modules=["*k_proj"])
    with LLM(built, device="cpu") as a, LLM(model, device="cpu", quant_config=quant) as b:
        assert a.stats().weight_bytes == b.stats().weight_bytes
        params = SamplingParams(max_tokens=8, end_id=-1)
        assert a.generate("Hi", params).outputs[0].token_ids == b.generate("Hi", params).outputs[0].token_ids
    again = build(tmp_path / "out", model=model)  # over the earlier build
    assert {name for name in load_all(again) if name.endswith("qweight")} == set()


def load_all(model: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in model.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt-neox", "gemma2"])
@pytest.mark.parametrize("algo", ALGOS)
def test_every_layout_of_a_checkpoint_is_quantised_alike(tmp_path: Path, family: str, algo: str) -> None:
    """Fused, transposed and interleaved in the checkpoint: built quantised equals loaded quantised."""
    model = make_model(tmp_path / "model", family, seed=3)
    built = build(tmp_path / "out", "--quant_algo", algo, model=model)
    params = SamplingParams(max_tokens=8, end_id=-1)
    with LLM(built, device="cpu") as a, LLM(model, device="cpu", quant_config=QuantConfig(algo)) as b:
        assert a.stats().weight_bytes == b.stats().weight_bytes
        assert a.generate("Hi", params).outputs[0].token_ids == b.generate("Hi", params).outputs[0].token_ids


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tp_size", "3"], "--tp_size must divide the model's "),
        (["--pp_size", "0"], "--pp_size must be at least 1, got 0"),
        (["--quant_algo", "NVFP4"], "build: --quant_algo NVFP4 is not supported"),
        (["--kv_cache_quant_algo", "INT8"], "no attention kernel here"),
        (["--max_seq_len", "2049"], "more than the model's 2048 positions"),
        (["--max_num_tokens", "8"], "--max_num_tokens must be at least --max_batch_size (64)"),
        (["--quant_algo", "W8A16", "--exclude_modules", "*"], "nothing to quantise: --exclude_modules names"),
        (["--gemm_plugin", "auto", "--strip_plan", "--max_input_len=9"],
         "leave out --gemm_plugin, --strip_plan, --max_input_len, which trtllm-build takes for its engines, "
         "or add --trtllm-flags"),
        (["--trtllm-flags", "--max_input_len", "9", "--max_seq_len", "8"],
         "--max_input_len must be at most --max_seq_len (8), got 9"),
        (["--trtllm-flags", "--max_input_len", "many"], "--max_input_len must be a whole number, got many"),
        (["--trtllm-flags", "--streamingllm", "enable"], "--streamingllm enable cannot be had: tokens"),
        (["--trtllm-flags", "--lora_plugin", "disable", "--max_lora_rank", "8"],
         "--lora_plugin disable and --max_lora_rank contradict each other"),
        (["--lora_target_modules", "attn_x"],
         "--lora_target_modules: Invalid LoRA module attn_x; modules are attn_qkv, attn_q"),
        (["--model_dir", "/nowhere"], "the model's folder /nowhere does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_said(
    tmp_path: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["build", "--model_dir", str(BASE), "--output_dir", str(out), *flags]) == 1
    assert text in capsys.readouterr().err
    assert not (out / "config.json").exists()


# As in TensorRT-LLM's page on LoRA, and in llgtrt's.
TRTLLM_LINES = (
    "--remove_input_padding enable --gpt_attention_plugin float16 --context_fmha enable --paged_kv_cache "
    "enable --gemm_plugin float16 --lora_plugin float16 --max_batch_size 128 --max_input_len 512 "
    "--max_seq_len 512 --lora_dir {adapter} --max_lora_rank 16 --lora_target_modules attn_q attn_k attn_v",
    "--gemm_plugin bfloat16 --use_paged_context_fmha enable --lora_plugin bfloat16 --lora_dir {adapter} "
    "--lora_ckpt_source hf --lora_target_modules attn_q attn_k attn_v",
    "--lora_plugin auto --gemm_plugin auto --max_input_len 100 --workers 1 --gather_all_token_logits",
)


@pytest.mark.parametrize("line", TRTLLM_LINES, ids=["trtllm", "llgtrt", "plugin alone"])
def test_lines_for_trtllm_build_are_taken_as_they_stand(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = line.format(adapter=JAPANESE.path).split()
    arguments = ["build", "--checkpoint_dir", str(BASE), "--output_dir", str(tmp_path / "out"), *flags]
    assert main(arguments) == 1
    assert "add --trtllm-flags" in capsys.readouterr().err
    assert main([*arguments, "--trtllm-flags"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("without effect here: --") and "--gemm_plugin" in told
    assert "lora" not in told and "--max_batch_size" not in told
    record = read_build_record(tmp_path / "out")
    assert record.lora["max_lora_rank"] == (16 if "--max_lora_rank" in flags else 64)
    assert answers(tmp_path / "out", JAPANESE) == answers(BASE, JAPANESE, lora_config=LoraConfig())


def test_stacked_experts_are_built_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Granite was released; of others, transformers' form in memory is refused."""
    model = make_model(tmp_path / "granite", "granitemoe-shared", seed=2)
    built = build(tmp_path / "built", "--dtype", "float32", "--quant_algo", "W8A16", model=model)
    quant = QuantConfig(quant_algo="W8A16")
    options = {"dtype": "float32", "max_seq_len": 128}
    assert answers(built, None, **options) == answers(model, None, quant_config=quant, **options)
    mixtral = make_model(tmp_path / "mixtral", "mixtral", stacked=True)
    flags = ["--model_dir", str(mixtral), "--output_dir", str(tmp_path / "no"), "--quant_algo", "W8A16"]
    assert main(["build", *flags]) == 1
    assert "experts.down_proj holds all experts of a layer as" in capsys.readouterr().err


def test_what_tensorrt_llm_made_is_told_from_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = {"architecture": "LlamaForCausalLM", "mapping": {}}
    made = {"checkpoint": checkpoint, "engine": {"pretrained_config": checkpoint}}
    for kind, config in made.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["build", "--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 1
        words = f"is a TensorRT-LLM {kind}: name the Hugging Face directory that it was made from"
        assert words in capsys.readouterr().err


def test_other_directories_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for output, text in (("model", "holds another model"), ("notes", "is not empty")):
        assert main(["build", "--model_dir", str(BASE), "--output_dir", str(tmp_path / output)]) == 1
        assert text in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    built = build(tmp_path / "out")
    assert main(["build", "--model_dir", str(built), "--output_dir", str(tmp_path / "twice")]) == 1
    assert "was built already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="quantised already"):
        LLM(build(tmp_path / "q", "--quant_algo", "W8A16"), device="cpu", quant_config=QuantConfig("W8A16"))

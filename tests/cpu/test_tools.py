"""Protects the converters and `manylora`: what they write equals the definition of the formats, whichever
way an adapter came, and what is wrong is one sentence and exit status 1."""

from __future__ import annotations

import importlib.util
import io
import json
import resource
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, read_adapter_folder

from manylora import cli
from manylora.adapters.convert import main as hf_lora_convert
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.npy import read_npy
from manylora.adapters.number_types import widen_bfloat16
from manylora.doors.cli.inspect import GATES

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[[list[str]], int]


def tool(name: str) -> Tool:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda arguments: module.main([str(argument) for argument in arguments])


extract_lora, normalize_dora = tool("extract_lora"), tool("normalize_dora")
nemo_lora_convert = tool("nemo_lora_convert")


def manylora(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tools") / "model", seed=1)


@pytest.fixture(scope="module")
def lora(model: Path) -> Path:
    return make_adapter(model.parent / "lora", model, 1, rank=4, modules=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def dora(model: Path) -> Path:
    return make_adapter(model.parent / "dora", model, 2, rank=3, modules=("v_proj",), use_dora=True)


@pytest.fixture(scope="module")
def half(lora: Path) -> Path:
    """The adapter in bfloat16."""
    path = shutil.copytree(lora, lora.parent / "half")
    file = path / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file)
    return path


def nemo(path: Path, layers: int = 2, config_layers: int = 2, rank: int = 2) -> dict[str, torch.Tensor]:
    key = "model.layers.{}.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"
    torch.manual_seed(0)
    state = {}
    for layer in range(layers):
        state[key.format(layer, "in")] = torch.randn(rank, 64)
        state[key.format(layer, "out")] = torch.randn(128, rank)
    stream = io.BytesIO()
    torch.save(state, stream)
    with tarfile.open(path, "w") as archive:
        for name, data in [
            ("model_config.yaml", f"num_layers: {config_layers}\n".encode()),
            ("model_weights.ckpt", stream.getvalue()),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return state


def rows_of_definition(adapter: Path) -> dict[tuple[int, int], torch.Tensor]:
    """(module id, layer) -> A, then B times alpha / r, written down directly from the PEFT files."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    ids, found = {"q_proj": 1, "v_proj": 3, "down_proj": 6}, {}
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            parts = key.split(".")
            b = tensors[key.replace("lora_A", "lora_B")].float() * config["lora_alpha"] / config["r"]
            place = ids[parts[-3]], int(parts[parts.index("layers") + 1])
            found[place] = torch.cat((a.float().flatten(), b.flatten()))
    return found


def check_rows(weights: np.ndarray, config: np.ndarray, adapter: Path, dtype: torch.dtype) -> None:
    expected = rows_of_definition(adapter)
    assert {tuple(row[:2]) for row in config.tolist()} == expected.keys()
    for row, values in zip(config.tolist(), weights, strict=True):
        wanted = expected[tuple(row[:2])].to(dtype).float().numpy()
        np.testing.assert_array_equal(values[: len(wanted)], wanted)
        assert not values[len(wanted) :].any()


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_way_gives_the_same_elements(storage: str, lora: Path, tmp_path: Path) -> None:
    dtype = getattr(torch, storage)
    assert hf_lora_convert(["-i", str(lora), "-o", str(tmp_path / "hf"), "--storage-type", storage]) == 0
    assert extract_lora(["-i", lora, "-o", tmp_path / "x.safetensors", "-t", storage]) == 0
    assert manylora("convert", "-i", tmp_path / "x.safetensors", "-o", tmp_path / "back") == 0
    one = tmp_path / "two" / "y.safetensors"
    assert manylora("convert", "-i", tmp_path / "hf", "-o", one, "--to", "llgtrt") == 0
    for folder in ("hf", "back"):
        weights, config = read_npy(tmp_path / folder)
        wide = widen_bfloat16(weights) if storage == "bfloat16" else weights.astype(np.float32)
        check_rows(wide[0], config[0], lora, dtype)
    for file in (one, tmp_path / "x.safetensors"):
        tensors = load_file(file)
        assert (tensors["weights"].dtype, tensors["config"].dtype) == (dtype, torch.int32)
        assert tensors["config"].shape == (4, 3)
        check_rows(tensors["weights"].float().numpy(), tensors["config"].numpy(), lora, dtype)


def test_extract_keeps_the_type_of_the_checkpoint(half: Path, tmp_path: Path) -> None:
    assert extract_lora(["-i", half, "-o", tmp_path / "x.safetensors"]) == 0
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["weights"].dtype == torch.bfloat16
    check_rows(tensors["weights"].float().numpy(), tensors["config"].numpy(), half, torch.bfloat16)


def test_a_bin_is_converted_as_it_is_by_every_converter(lora: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(lora / "adapter_config.json", pickled)
    torch.save(load_file(lora / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    for source, name in ((lora, "a"), (pickled, "b")):
        seed = ["-i", str(source), "-o", str(tmp_path / name), "--storage-type", "float16"]
        assert hf_lora_convert(seed) == 0
        assert extract_lora(["-i", source, "-o", tmp_path / f"{name}.safetensors"]) == 0
        assert manylora("convert", "-i", source, "-o", tmp_path / f"{name}-whole") == 0
    for name in ("a", "a-whole"):
        other = name.replace("a", "b", 1)
        for expected, found in zip(read_npy(tmp_path / name), read_npy(tmp_path / other), strict=True):
            assert expected.dtype == found.dtype
            np.testing.assert_array_equal(expected, found)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_nemo_as_runtime_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = nemo(tmp_path / "a.nemo")
    arguments = ["-i", tmp_path / "a.nemo", "-o", tmp_path / "out", "--write-cpp-runtime-tensors"]
    assert nemo_lora_convert([*arguments, "--storage-type", "float32", "--verbose"]) == 0
    assert "layer 1 attn_qkv rank 2" in capsys.readouterr().out
    weights, config = read_npy(tmp_path / "out")
    assert config.tolist() == [[[0, 0, 2], [0, 1, 2]]]
    values = list(state.values())
    for layer in range(2):
        expected = torch.cat((values[2 * layer].flatten(), values[2 * layer + 1].flatten()))
        assert weights[0, layer].tolist() == expected.tolist()
    nemo(tmp_path / "b.nemo", config_layers=3)
    assert nemo_lora_convert(["-i", tmp_path / "b.nemo", *arguments[2:]]) == 1
    assert "adapts 2 layers up to 1, num_layers is 3" in capsys.readouterr().err


def test_nemo_as_raw_files(tmp_path: Path) -> None:
    state = nemo(tmp_path / "a.nemo")
    arguments = ["-i", tmp_path / "a.nemo", "-o", tmp_path / "out", "--customization-id", "spanish"]
    assert nemo_lora_convert(arguments) == 0
    settings = json.loads((tmp_path / "out" / "lora_weights.json").read_text())["lora_config"]
    assert settings == {"lora_kqv_adapter": {"0": {"key": "spanish", "low_rank": 2}}, "precision": "float16"}
    for key, value in state.items():
        name = key.replace("lora_kqv_adapter", "lora_kqv_adapter.0")
        found = np.frombuffer((tmp_path / "out" / f"model.{name}.bin").read_bytes(), np.float16)
        assert found.tolist() == value.T.half().flatten().tolist()


def test_normalised_dora_is_what_a_reader_with_the_base_makes(
    model: Path, dora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read_adapter_folder(dora, BaseWeights(model))
    assert expected[1][0, :, 3].tolist() == [1, 1]
    assert normalize_dora(["-i", dora, "-b", model, "-o", tmp_path / "out"]) == 0
    found = read_adapter_folder(tmp_path / "out")
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert normalize_dora(["-i", tmp_path / "out", "-b", model, "-o", tmp_path / "twice"]) == 1
    assert "normalised already" in capsys.readouterr().err
    assert normalize_dora(["-i", dora, "-b", model, "-o", tmp_path / "plain", "--strip"]) == 0
    assert read_adapter_folder(tmp_path / "plain")[1][0, :, 3].tolist() == [0, 0]
    assert hf_lora_convert(["-i", str(dora), "-o", str(tmp_path / "x")]) == 1
    assert "use_dora: DoRA magnitudes" in capsys.readouterr().err
    arguments = ["-i", str(dora), "-o", str(tmp_path / "x"), "-b", str(model), "--storage-type", "float32"]
    assert hf_lora_convert(arguments) == 0
    np.testing.assert_array_equal(read_npy(tmp_path / "x")[0], expected[0])
    # llgtrt's file gets the fourth column then.
    assert manylora("convert", "-i", tmp_path / "x", "-o", tmp_path / "d.safetensors", "--to", "llgtrt") == 0
    assert load_file(tmp_path / "d.safetensors")["config"][:, 3].tolist() == [1, 1]


def test_a_bin_is_normalised_into_a_bin_and_nvlabs_names_are_known(
    model: Path, dora: Path, tmp_path: Path
) -> None:
    tensors = load_file(dora / "adapter_model.safetensors")
    renamed = {
        key.replace("lora_magnitude_vector", "weight_m_wdecomp.weight"): v.unsqueeze(1) if v.ndim == 1 else v
        for key, v in tensors.items()
    }
    path = tmp_path / "bin"
    path.mkdir()
    shutil.copy(dora / "adapter_config.json", path)
    torch.save(renamed, path / "adapter_model.bin")
    assert normalize_dora(["-i", path, "-b", model, "-o", tmp_path / "out"]) == 0
    assert manylora("convert", "-i", tmp_path / "out", "-o", tmp_path / "npy") == 0
    np.testing.assert_array_equal(
        read_npy(tmp_path / "npy")[0], read_adapter_folder(dora, BaseWeights(model))[0]
    )


def test_tools_name_their_flags_and_no_line_of_their_code(
    model: Path, dora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["-i", str(dora), "-o", str(tmp_path / "out")]
    for run in (hf_lora_convert, extract_lora):
        for more, text in (([], "name it with --base"), (["--base", "/nowhere"], "/nowhere")):
            assert run([*here, *more]) == 1
            told = capsys.readouterr().err
            assert text in told and told.count("\n") == 1
    assert hf_lora_convert([*here[:1], str(model), *here[2:]]) == 1  # no adapter
    assert "not an adapter directory of PEFT" in capsys.readouterr().err
    assert manylora("inspect", dora, "--base", model, "--max-adapter-size", 0) == 1
    assert capsys.readouterr().err == "--max-adapter-size must be at least 1, got 0\n"


def test_inspect_says_which_matrix_each_module_id_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """5 is the gate. Swapped with 7 an adapter still fits, and no check can see it: it must be told."""
    gated = make_adapter(tmp_path / "gated", model, 3, rank=4, modules=("gate_proj", "up_proj", "down_proj"))
    assert manylora("inspect", gated, "--tensors", "--base", model) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tensors")]
    assert told == [
        "tensors  5 mlp_h_to_4h: gate_proj, the one behind the activation; A [rank, 64], B [96, rank]",
        "tensors  6 mlp_4h_to_h: down_proj; A [rank, 96], B [64, rank]",
        "tensors  7 mlp_gate: up_proj, the one the activation is multiplied with; A [rank, 64], B [96, rank]",
        f"tensors  {GATES}",
    ]
    assert hf_lora_convert(["-i", str(gated), "-o", str(tmp_path / "npy"), "--storage-type", "float32"]) == 0
    weights, config = read_npy(tmp_path / "npy")
    scale = 2.0  # alpha / r
    for row, (module_id, layer, *_) in zip(weights[0], config[0].tolist(), strict=True):
        name = {5: "gate_proj", 6: "down_proj", 7: "up_proj"}[module_id]
        [b] = [
            value.numpy()
            for key, value in load_file(gated / "adapter_model.safetensors").items()
            if f"layers.{layer}.mlp.{name}.lora_B" in key
        ]
        start = 4 * (96 if module_id == 6 else 64)
        np.testing.assert_allclose(row[start : start + b.size].reshape(b.shape), b * scale, rtol=1e-6)
    assert manylora("inspect", tmp_path / "npy", "--tensors") == 0
    assert "A [rank, in], B [out, rank]" in capsys.readouterr().out


def test_a_full_disk_is_named(lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without room for the weights; the limit on a file's size stands for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        assert manylora("convert", "-i", lora, "-o", tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == f"{tmp_path / 'out'} cannot be written: File too large\n"

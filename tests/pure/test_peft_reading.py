"""Protects strict reading: an adapter that would be served as something else is refused with the reason, and
a hostile file is an error like any other; values of safetensors come back, scaled and checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from manylora.adapters.convert import convert_peft, main
from manylora.adapters.formats.npy import read_npy
from manylora.adapters.formats.peft_folder import read_peft
from manylora.adapters.formats.tensor_files import decode, encode, read_safetensors, write_safetensors
from manylora.errors import AdapterInvalidError

PREFIX = "base_model.model.model.layers"


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = pair("q_proj")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config})
    )
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(
    name: str, layer: int = 0, rank: int = 2, size: int = 4, prefix: str = PREFIX
) -> dict[str, np.ndarray]:
    block = "mlp" if name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") else "self_attn"
    a = np.arange(rank * size, dtype=np.float32).reshape(rank, size)
    return {
        f"{prefix}.{layer}.{block}.{name}.lora_A.weight": a,
        f"{prefix}.{layer}.{block}.{name}.lora_B.weight": np.ones((size, rank), np.float32),
    }


def test_the_tiny_example(tmp_path: Path) -> None:
    a = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    b = np.array([[1, 0], [0, 1], [1, 1], [2, -1]], np.float32)
    key = f"{PREFIX}.0.self_attn.q_proj.lora_"
    write(tmp_path, {f"{key}A.weight": a, f"{key}B.weight": b})
    weights, config = convert_peft(tmp_path, "float32")
    assert weights[0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 2, 2, 2, 4, -2]
    assert config.tolist() == [[[1, 0, 2, 0]]]
    write(tmp_path, {f"{key}A.weight": a, f"{key}B.weight": b}, use_rslora=True)
    assert convert_peft(tmp_path, "float32")[0][0, 0, 8] == pytest.approx(4 / 2**0.5)


def test_the_adapters_own_name_in_names_of_tensors(tmp_path: Path) -> None:
    """As scripts write them that save the state of PEFT's model as it is."""
    tensors = pair("q_proj") | pair("down_proj", layer=1)
    expected = convert_peft(write(tmp_path / "plain", tensors), "float32")
    named = {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}
    for found, wanted in zip(
        convert_peft(write(tmp_path / "named", named), "float32"), expected, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(AdapterInvalidError, match=r"default\.weight and .* mean the same tensor"):
        convert_peft(write(tmp_path / "both", tensors | named), "float32")


@pytest.mark.parametrize(
    ("pattern", "scale"),
    [
        ({"q_proj": 8}, 4),
        ({"layers.0.self_attn.q_proj": 8}, 4),
        ({"model.layers.0.self_attn.q_proj": 8}, 4),
        ({"^model.layers.0.self_attn.q_proj": 8}, 4),
        ({"layers.1.self_attn.q_proj": 8}, 2),
        ({"proj": 8}, 2),
    ],
)
def test_alpha_pattern_matches_names_as_peft_does(tmp_path: Path, pattern: dict, scale: float) -> None:
    write(tmp_path, alpha_pattern=pattern)
    assert read_peft(tmp_path)[0][0, 0, -1] == scale


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"arrow_config": {"top_k": 2}}, "arrow_config"),
        ({"use_bdlora": {"nblocks": "x"}}, "use_bdlora must have nblocks"),
        ({"use_qalora": True, "qalora_group_size": 0}, "qalora_group_size"),
        ({"use_later": True}, "use_later, which is not supported"),
        ({"alora_invocation_tokens": 5}, "alora_invocation_tokens must be a list of token ids, got 5"),
        ({"alora_invocation_tokens": [1], "use_dora": True}, "alora_invocation_tokens and use_dora"),
        ({"alora_invocation_tokens": [1], "task_type": "SEQ_CLS"}, "and task_type SEQ_CLS"),
        ({"invocation_string": "<x>"}, "set alora_invocation_tokens to its token ids"),
        ({"init_lora_weights": "olora"}, "computed from the base's weights"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got None"),
    ],
)
def test_settings_that_mean_more_than_lora_are_refused(tmp_path: Path, config: dict, reason: str) -> None:
    with pytest.raises(AdapterInvalidError, match=reason.replace("(", r"\(")):
        read_peft(write(tmp_path, **config))


def change(**replaced: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors = pair("q_proj")
    for name, value in replaced.items():
        key = f"{PREFIX}.0.self_attn.q_proj.lora_{name}.weight"
        tensors.pop(key)
        if value is not None:
            tensors[key] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            change(B=None) | {f"{PREFIX}.77.self_attn.q_proj.lora_B.weight": np.ones((4, 2), np.float32)},
            "layers.0.self_attn.q_proj is missing its lora_B matrix, and .*77.self_attn.q_proj is missing",
        ),
        (
            pair("q_proj") | {f"{PREFIX}.0.self_attn.k_proj.lora_magnitude_vector": np.ones(4, np.float32)},
            "k_proj is missing its lora_A matrix",
        ),
        (pair("q_proj") | pair("q_proj", prefix="model.layers"), "mean the same module|two models"),
        (pair("q_proj") | {"base_model.model.lm_head.lora_A.weight": np.ones((2, 4), np.float32)}, "head"),
        (pair("q_proj") | {f"{PREFIX}.0.self_attn.q_proj.bias": np.ones(4, np.float32)}, "biases"),
        (pair("q_proj") | {"base_model.model.model.norm.weight": np.ones(4, np.float32)}, "have a place"),
        (
            pair("q_proj") | {f"{PREFIX}.0.self_attn.k_proj.weight": np.ones((4, 4), np.float32)},
            "modules_to_save",
        ),
    ],
)
def test_tensors_that_would_be_lost_are_refused(tmp_path: Path, tensors: dict, reason: str) -> None:
    with pytest.raises(AdapterInvalidError, match=reason):
        read_peft(write(tmp_path, tensors))


def test_allow_partial_tells_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"base_model.model.lm_head.lora_A.weight": np.ones((2, 4), np.float32)}
    write(tmp_path / "in", pair("q_proj") | extra)
    arguments = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--storage-type", "float32"]
    assert main(arguments) == 1
    assert "lm_head" in capsys.readouterr().err
    assert main([*arguments, "--allow-partial"]) == 0
    assert "lm_head" in capsys.readouterr().out
    assert read_npy(tmp_path / "out")[0].shape == (1, 1, 16)


@pytest.mark.parametrize("storage_type", ["float16", "bfloat16"])
def test_a_value_beyond_the_storage_type_is_refused(
    tmp_path: Path, storage_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = change(B=np.full((4, 2), np.finfo(np.float32).max, np.float32))
    write(tmp_path / "in", largest, lora_alpha=2)
    arguments = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--storage-type", storage_type]
    assert main(arguments) == 1
    assert f"attn_q of layer 0 is not finite in {storage_type}" in capsys.readouterr().err


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    picks = np.random.default_rng(0)
    given = {
        "a": picks.normal(size=(3, 5)).astype(np.float32),
        "b": picks.normal(size=(7,)).astype(np.float16),
        "none": np.zeros((0, 4), np.float32),
        "one": np.full((), 2.5, np.float32),
    }
    save_file(given, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert sorted(found) == sorted(given)
    for key, values in given.items():
        np.testing.assert_array_equal(decode(key, found[key]), values.astype(np.float32))


def test_values_are_filled_in_scaled_and_checked_whatever_they_are_stored_as(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 7), np.float32)
    for dtype in ("F64", "F32", "F16", "BF16"):
        path = tmp_path / f"{dtype}.safetensors"
        write_safetensors(path, {"a": encode("a", values, dtype)})
        [(key, found)] = read_safetensors(path).items()
        target = np.full((3, 7), 9, np.float32)
        found.fill(key, target, 0.5)
        np.testing.assert_array_equal(target, decode(key, found) * np.float32(0.5))
        found.fill(key, target)
        np.testing.assert_array_equal(target, decode(key, found))
        with pytest.raises(AdapterInvalidError, match="a holds a NaN or an infinity"):
            found.fill(key, target, 3e38)

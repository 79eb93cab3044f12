"""Protects the sources of adapters: each is told by its content and read to the same tensors, and a hostile
file is refused with its reason, at once, with nothing of it run."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from selection import extended
from tiny_models import read_adapter_folder

from manylora.adapters.formats.nemo import nemo_num_layers
from manylora.adapters.formats.npy import write_llgtrt, write_npy
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_source, source_dtype
from manylora.errors import AdapterInvalidError

KEY = "model.language_model.encoder.layers.{}.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"
PEFT = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
RAN = Path("/tmp/manylora-was-unpickled")


class Bomb:
    def __reduce__(self) -> tuple:
        return (RAN.touch, ())


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def nemo_state(layers: int = 2, hidden: int = 4, out: int = 8, rank: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {}
    for layer in range(layers):
        state[KEY.format(layer, "in")] = torch.randn(rank, hidden).bfloat16()
        state[KEY.format(layer, "out")] = torch.randn(out, rank).bfloat16()
    return state


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def write_nemo(path: Path, weights: bytes | None = None, prefix: str = "") -> Path:
    return write_tar(
        path,
        member(
            f"{prefix}model_config.yaml",
            b"# a model\nmcore_gpt: true\nnum_layers: 2\ndata:\n  num_layers: 9\n",
        ),
        member(f"{prefix}model_weights.ckpt", saved(nemo_state()) if weights is None else weights),
    )


def write_peft(folder: Path, pickled: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    tensors = {f"{PEFT}A.weight": np.ones((2, 4), np.float16), f"{PEFT}B.weight": np.ones((4, 2), np.float16)}
    if pickled is None:
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        (folder / "adapter_model.bin").write_bytes(pickled)
    return folder


@pytest.mark.parametrize("prefix", ["", "./"])
def test_nemo_is_read_as_it_is(tmp_path: Path, prefix: str) -> None:
    path = write_nemo(tmp_path / "7" / "some.nemo", prefix=prefix)
    state = nemo_state()
    for where in (path, path.parent):
        source = find_source(where)
        assert (source.kind, source.path) == ("nemo", path)
        weights, config = read_source(source)
        assert config.tolist() == [[[0, 0, 2, 0], [0, 1, 2, 0]]]
        for layer in range(2):
            expected = torch.cat([state[KEY.format(layer, s)].float().flatten() for s in ("in", "out")])
            assert weights[0, layer].tolist() == expected.tolist()
    assert source_dtype(source) == "bfloat16"
    assert nemo_num_layers(path) == 2


def test_every_source_in_a_folder_is_told_by_its_content(tmp_path: Path) -> None:
    weights, config = np.arange(16, dtype=np.float16).reshape(1, 1, 16), np.array([[[1, 0, 2, 0]]], np.int32)
    write_npy(tmp_path / "npy", weights, config)
    write_llgtrt(tmp_path / "llgtrt" / "spanish.safetensors", weights, config)
    write_peft(tmp_path / "peft")
    write_nemo(tmp_path / "nemo" / "a.nemo")
    for kind in ("npy", "llgtrt", "peft", "nemo"):
        assert find_source(tmp_path / kind).kind == kind
        read_adapter_folder(tmp_path / kind)
    found, columns = read_adapter_folder(tmp_path / "llgtrt")
    assert columns.tolist() == [[[1, 0, 2]]]
    assert (found.dtype, found.tolist()) == (np.float16, weights.tolist())
    assert source_dtype(find_source(tmp_path / "peft")) == "float16"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path / "none", "none does not exist"),
        (lambda path: path / ("long" * 100), "cannot be read: File name too long"),
        (lambda path: path, r"folder \S+ holds neither"),
        (lambda path: write_peft(path / "p") / "adapter_model.safetensors", "is neither a .nemo archive nor"),
        (lambda path: (write_nemo(path / "1.nemo"), write_nemo(path / "2.nemo"), path)[2], "2 .nemo files"),
        (lambda path: (os.mkfifo(path / "pipe"), path / "pipe")[1], "neither a file nor a directory"),
    ],
)
def test_what_is_no_source_is_said(tmp_path: Path, make: Callable[[Path], Path], reason: str) -> None:
    with pytest.raises(AdapterInvalidError, match=reason):
        find_source(make(tmp_path))


def without(state: dict, key: str) -> dict:
    return {name: value for name, value in state.items() if name != key}


def repacked(data: bytes, change: Callable[[str, bytes], bytes], compression: int = 0) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return stream.getvalue()


ONE = KEY.format(0, "in")
ZEROS = saved({"a": torch.zeros(2**22)})
ONES = saved({ONE: torch.ones(4)})
WIDE = b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))
LONG_PICKLE = b"\x80\x02" + b"N0" * 2_000_000 + b"."


def as_pickle(content: bytes) -> bytes:
    return repacked(ONES, lambda name, data: content if name.endswith("data.pkl") else data)


WEIGHTS = {
    "truncated": (saved(nemo_state())[:-200], "not the zip archive"),
    "code": (saved({"a": Bomb()}), r"names \S+, which is not a tensor; code in a checkpoint is never run"),
    "by name": (as_pickle(pickle.dumps(Bomb(), 4)), "STACK_GLOBAL"),
    "long pickle": (as_pickle(LONG_PICKLE), "longer than an adapter's"),
    # Without a bound, the first takes 2^60 steps to hash, and the second the stack of the process.
    "wide key": (as_pickle(b"\x80\x02}K\x01q\x00" + WIDE + b"Ns."), "tuples in tuples"),
    "deep key": (as_pickle(b"\x80\x02}N" + b"\x85" * 400_000 + b"Ns."), "tuples in tuples"),
    "no tensors": (saved([1, 2]), "something else than named tensors"),
    "compressed": (repacked(ZEROS, lambda _, d: d, zipfile.ZIP_DEFLATED), "compressed"),
    "repeated value": (saved({ONE: torch.ones(1).expand(10**6, 10**6)}), "larger than the file"),
    "claims": (
        repacked(ONES, lambda n, d: d.replace(b"K\x04", b"J\xff\xff\xff\x00") if "pkl" in n else d),
        "not a readable torch checkpoint",
    ),
    "shape beyond storage": (
        repacked(ONES, lambda n, d: d.replace(b"K\x04\x85", b"J\xff\xff\xff\x00\x85") if "pkl" in n else d),
        "not a readable torch checkpoint|larger than the file",
    ),
    "one side": (saved(without(nemo_state(), KEY.format(1, "out"))), "Layer 1 is missing required 'out'"),
    "other module": (saved({"model.layers.0.mlp.weight": torch.ones(2)}), "unsupported key model.layers.0"),
    "not finite": (saved({**nemo_state(), ONE: torch.full((2, 4), torch.nan)}), "NaN or an infinity"),
    "integers": (saved({**nemo_state(), ONE: torch.ones(2, 4, dtype=torch.int32)}), "must be float32"),
    "rank 0": (saved(nemo_state(rank=0)), "mismatches adapter size"),
}  # fmt: skip


def refused_at_once(path: Path, reason: str) -> None:
    started = time.process_time()
    with pytest.raises(AdapterInvalidError, match=reason) as raised:
        read_source(find_source(path), ReadOptions(allow_bin=True))
    assert time.process_time() - started < 1
    assert str(path.parent) not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not RAN.exists()


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_a_hostile_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    weights, reason = WEIGHTS[name]
    refused_at_once(write_nemo(tmp_path / "a.nemo", weights), reason)


@pytest.mark.parametrize("name", ["code", "truncated", *extended("by name", "compressed")])
def test_a_hostile_bin_is_refused(tmp_path: Path, name: str) -> None:
    weights, reason = WEIGHTS[name]
    refused_at_once(write_peft(tmp_path / "peft", weights), reason)


def test_a_bin_is_read_by_tools_alone(tmp_path: Path) -> None:
    tensors = {f"{PEFT}A.weight": torch.ones(2, 4), f"{PEFT}B.weight": torch.ones(4, 2)}
    parameters = {key: torch.nn.Parameter(value) for key, value in tensors.items()}
    source = find_source(write_peft(tmp_path / "peft", saved(parameters)))
    with pytest.raises(AdapterInvalidError, match="which servers never read: convert the adapter"):
        read_source(source)
    assert read_source(source, ReadOptions(allow_bin=True))[0].tolist() == [[[1.0] * 16]]


GOOD = saved(nemo_state())
TARS = {
    "traversal": ([member("../model_weights.ckpt", GOOD)], "points outside the archive"),
    "symlink": ([member("model_weights.ckpt", type=tarfile.SYMTYPE, linkname="/etc/pw")], "neither a pl"),
    "twice": ([member("model_weights.ckpt", GOOD), member("./model_weights.ckpt", GOOD)], "twice"),
    "members": ([member(str(i)) for i in range(2000)], "more than 256 members"),
    "no weights": ([member("model_config.yaml", b"num_layers: 2\n")], "Both model_weights paths not found"),
    "large config": ([member("model_config.yaml", b"#" * 2**21)], "at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TARS))
def test_a_hostile_tar_is_refused(tmp_path: Path, name: str) -> None:
    members, reason = TARS[name]
    refused_at_once(write_tar(tmp_path / "a.nemo", *members), reason)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [((1, 16), np.int64, "config must be int32"), ((1, 1, 16), np.int32, "two dimensions")],
)
def test_a_wrong_llgtrt_file_is_refused(tmp_path: Path, shape: tuple, dtype: type, reason: str) -> None:
    tensors = {"weights": np.ones(shape, np.float32), "config": np.ones((1, 3), dtype)}
    save_file(tensors, tmp_path / "a.safetensors")
    refused_at_once(tmp_path / "a.safetensors", reason)

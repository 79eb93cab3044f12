"""Makes adapters that nobody should be harmed by: a seeded stream of files that claim, hide, repeat, point
elsewhere, break off or are no files at all."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN = 64
PREFIX = "base_model.model.model.layers"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NEMO_KEY = "model.encoder.layers.{}.self_attention.adapter_layer.lora_kqv_adapter.linear_{}.weight"
HUGE = (2**20, 10**7, 2**31 - 1, 2**31, 2**32, 2**53, 2**61, 2**63 - 1, 2**63, 2**64, 10**40)
NUMBERS: list[Any] = [
    *HUGE, 0, -1, 1.5, 1e308, -1e308, True, False, None, "64", "NaN", "", [], {}, [[]], 10**4000,
    float("nan"), float("inf"),
]  # fmt: skip
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F64": 8, "I64": 8, "BOOL": 1, "F4": 1}
PATTERNS = [
    "(a+)+", "(.*)*x", ".*.*.*.*.*x", "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)x",
    "(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)(.|..)x",
    "(?:(?:a{1,100}){1,100}){1,100}", "(", "[", "\\", "(?P<x>", "(?<=.*)x", "a{99999999999}", "*",
    r"(\w+\.)+x", "(?=.*.*.*)x", "x" * 5000 + ".?", "(" * 2000, "((((.*)*)*)*)*",
]  # fmt: skip
NAMES = [
    "\n", "\r\nINFO all is well", "\x1b[2J", "a" * 300, "é\u202e", "%s%n", "{}", "..", "x/../../y", "\ud800",
    "wpe" * 200 + ".lora_", "model." * 400, "base_model." * 40,
]  # fmt: skip


TEXTS = [b"[" * 10**5, b'{"a":' * 10**5, b"{" * 999, b"{}", b"", b"null", b"[]", b"\xff", b"\x00"]
SHAPES = [
    "(1, -1, 9)", f"({2**62}, 8, 9)", "(1,)*999", "('a',)", "9" * 9999, "()", "(" * 5000, "(1, 1, 1e9)",
    f"(1, 1, {10**40})", "(True, 1, 2)",
]  # fmt: skip
TYPES = [
    "'|O'", "'O8'", "'|V1'", "'<f3'", "'<U9'", "'<M8[s]'", "[('a', '<f4')]", "('<f4', (9,))", "[" * 999,
    "'" + "x" * 5000 + "'",
]  # fmt: skip


def number(rng: random.Random) -> Any:
    return rng.choice(NUMBERS)


def put(rng: random.Random, where: Any, place: Any) -> None:
    """Anything but what is there."""
    where[place] = rng.choice([n for n in NUMBERS if n != where[place]])


def header(path: Path, entries: dict[str, Any] | bytes, size: int | None = None, values: bytes = b"") -> None:
    """size: of the data, which is a hole; None: the values."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
    if size is not None:
        os.truncate(path, 8 + len(text) + min(size, 2**43))


def entries_of(shapes: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    end = 0
    for key, (dtype, shape) in shapes.items():
        size = SIZES[dtype]
        for n in shape:
            size *= n
        found[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return found, end


def pair(rank: int, layer: int = 0, name: str = "self_attn.q_proj", dtype: str = "F32") -> dict[str, Any]:
    stem = f"{PREFIX}.{layer}.{name}.lora_"
    return {f"{stem}A.weight": (dtype, [rank, HIDDEN]), f"{stem}B.weight": (dtype, [HIDDEN, rank])}


def settings(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **more})
    (folder / CONFIG).write_text(text, encoding="utf-8", errors="surrogatepass")


def good(folder: Path, rank: int = 2) -> Path:
    settings(folder)
    entries, size = entries_of({**pair(rank), **pair(rank, 1)})
    header(folder / WEIGHTS, entries, values=np.ones(size // 4, np.float32).tobytes())
    return folder


def large_claims(rng: random.Random, folder: Path) -> None:
    """Sparse files whose headers claim much."""
    settings(folder, use_dora=rng.random() < 0.1, r=number(rng) if rng.random() < 0.3 else 2)
    dtype = rng.choice(["F32", "F16", "BF16", "F8_E4M3", "F64"])
    moe = f"{PREFIX}.0.mlp.experts"
    table = rng.choice(["embed_tokens.weight", "lm_head.weight", "embed_tokens.lora_embedding_A"])
    part = rng.choice(["self_attn.q_proj.lora_B.bias", "input_layernorm.weight", "mlp.up_proj.bias"])
    layers, norms = range(rng.choice([3, 3000])), range(rng.choice([5000, 20_000]))
    claims: list[dict[str, tuple[str, list[int]]]] = [
        pair(rng.choice([200, 5000, 200_000, 10**7, 2**31]), dtype=dtype),
        {key: one for layer in layers for key, one in pair(9, layer).items()},
        {f"base_model.model.model.norm.{i}": (dtype, [1]) for i in norms},
        {**pair(2), f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": (dtype, [10**9])},
        {**pair(2), f"base_model.model.model.{table}": (dtype, [10**6, 4096])},
        {**pair(2), f"{PREFIX}.0.{part}": (dtype, [10**9])},
        {f"{moe}.{n}.w1.lora_{side}.weight": (dtype, [10**5, 10**4]) for n in (0, 99999) for side in "AB"},
        {f"{moe}.lora_A.weight": (dtype, [10**7, 64]), f"{moe}.lora_B.weight": (dtype, [64, 10**7])},
        {**pair(2), f"{PREFIX}.0.{rng.choice(NAMES)}": (dtype, [2])},
    ]
    header(folder / WEIGHTS, *entries_of(rng.choice(claims)))


def odd_header(rng: random.Random, folder: Path) -> None:
    settings(folder)
    entries, size = entries_of({**pair(2), **pair(2, 1)})
    one, part = rng.choice(list(entries)), rng.choice(["shape", "data_offsets", "dtype"])
    entry, left = entries[one], {key: value for key, value in entries.items() if key != one}
    numbers, bad = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
    bad[rng.randrange(bad.size)] = rng.choice([np.nan, np.inf, -np.inf])
    values, raw = numbers.tobytes(), json.dumps(entries)
    twice = "{" + ",".join([raw[1:-1]] * 2) + "}"

    def but(**fields: Any) -> dict[str, Any]:
        return {**left, one: {**entry, **fields}}

    def changed(name: str) -> dict[str, Any]:
        where = list(entry[name])
        put(rng, where, rng.randrange(2))
        return but(**{name: where})

    files: list[tuple[dict[str, Any] | bytes, bytes]] = [
        (changed("shape"), values),
        (changed("data_offsets"), values),
        (but(**{part: rng.choice(NUMBERS)}), values),
        (but(shape=rng.choice([[], [0], [2] * 3000, [0, HIDDEN], [2**32] * 3, [-2, -64]])), values),
        (but(data_offsets=rng.choice(list(left.values()))["data_offsets"]), values),
        (but(dtype=rng.choice(["I64", "BOOL", "F8_E5M2", "F4", "X", "C64", 3, None])), values),
        ({**left, one: {key: value for key, value in entry.items() if key != part}}, values),
        ({**left, rng.choice(NAMES): entry}, values),
        ({**left, "__metadata__": rng.choice([{"x": "y" * 10**6}, 3, [[]] * 10**5, {"\n": "\n"}])}, values),
        (rng.choice([*TEXTS, raw.encode() + b"x", twice.encode()]), values),
        (entries, values[: rng.randrange(len(values))]),
        (entries, values + bytes(rng.randrange(1, 99))),
        (entries, bad.tobytes()),
    ]
    target, number_of = folder / WEIGHTS, rng.randrange(len(files) + 1)
    if number_of < len(files):
        header(target, files[number_of][0], values=files[number_of][1])
        return
    target.write_bytes(rng.choice(HUGE[:8]).to_bytes(8, "little") + b"{}" + values)
    if rng.random() < 0.5:
        os.truncate(target, 2**40)


def odd_settings(rng: random.Random, folder: Path) -> None:
    good(folder)
    path, pattern = folder / CONFIG, rng.choice(PATTERNS)
    alphas = [n for n in NUMBERS if n not in (0, 1.5, -1, True, *HUGE)]
    more = rng.choice(["trainable_token_indices", "modules_to_save", "target_parameters"])
    values: list[dict[str, Any]] = [
        {"lora_alpha": rng.choice(alphas)},
        {"alpha_pattern": {pattern: 8}},
        {"alpha_pattern": {f"{pattern}{i}(.|x)": 8 for i in range(1000)}},
        {"alpha_pattern": {f"layers.{i}.*q_proj": 8 for i in range(10**4)}},
        {"alpha_pattern": {"q_proj": rng.choice(["x", None, [], "1", 10**400])}},
        {rng.choice(["alpha_pattern", "rank_pattern"]): rng.choice([[1], 3, "x", True])},
        {"peft_type": number(rng) or "x"},
        {"init_lora_weights": "pissa\n", "lora_alpha": None},
        {more: rng.choice([[-1], [1, 1], {"a": 3}, ["x", 3], 3, {"x": [[]]}]), "lora_alpha": None},
    ]
    kind = rng.randrange(len(values) + 2)
    if kind < len(values):
        settings(folder, **values[kind])
    elif kind == len(values):
        path.write_bytes(rng.choice([text for text in TEXTS if text != b"{}"]))
    else:
        path.write_text("{")
        os.truncate(path, rng.choice([2**22, 2**33, 2**40]))


def npy_header(shape: str, descr: str = "'<f4'", version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text


def odd_npy(rng: random.Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "model.lora_weights.npy", folder / "model.lora_config.npy"
    np.save(weights, np.ones((1, 1, 256), np.float32))
    np.save(config, np.array([[[1, 0, 2, 0]]], np.int32))
    target = rng.choice([weights, config])
    kind = rng.randrange(10)
    if kind == 0:  # a claim over a hole
        rows, width = rng.choice([(1, 3 * 10**9), (3 * 10**9, 1), (2**20, 3000), (14, 10**9)])
        text = npy_header(f"(1, {rows}, {width})", rng.choice(["'<f4'", "'<f2'", "'|V2'", "'<i4'"]))
        target.write_bytes(text)
        item = {"4": 4, "2": 2}[text.split(b"'")[3][-1:].decode()]
        os.truncate(target, len(text) + rows * width * item)
    elif kind == 1:
        text = npy_header(rng.choice(SHAPES))
        target.write_bytes(text + bytes(1024))
    elif kind == 2:
        target.write_bytes(npy_header("(1, 1, 256)", rng.choice(TYPES)) + bytes(1024))
    elif kind == 3:
        target.write_bytes(b"\x93NUMPY\x02\x00" + rng.choice(HUGE[:3]).to_bytes(4, "little") + b"{")
        os.truncate(target, 2**34)
    elif kind == 4:
        content = target.read_bytes()
        target.write_bytes(content[: rng.randrange(len(content))])
    elif kind == 5:
        with target.open("wb") as file:
            pickle.dump({"a": 1}, file)
    elif kind == 6:
        row = [number(rng) for _ in range(4)]
        row = [int(n) if isinstance(n, int) and abs(n) < 2**31 else -7 for n in row]
        np.save(config, np.array([[row]], np.int32))
    elif kind == 7:
        rows = rng.choice([3, 2000])
        np.save(weights, np.ones((1, rows, 256), np.float32))
        np.save(config, np.array([[[1, 0, 2, 0]] * rows], np.int32))
    elif kind == 8:
        np.save(config, np.array([[[1, 0, 2, 0]]], rng.choice([np.int64, np.float32, np.uint8, np.bool_])))
    else:
        values = np.ones((1, 1, 256), np.float32)
        values[0, 0, rng.randrange(256)] = rng.choice([np.nan, np.inf])
        np.save(weights, values)


def odd_llgtrt(rng: random.Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "one.safetensors"
    claims = [(1, 3 * 10**9), (3 * 10**9, 1), (2**20, 3000), (14, 10**9), (10**6, 0), (2**31, 0), (10**5, 2)]
    rows, width = rng.choice([*claims, (1, 256)])  # all zero: rank 0
    shape = rng.choice([[rows, 3]] * 4 + [[], [0], [3], [1, 1, 3]])
    weights = (rng.choice(["F32", "F16", "BF16", "F8_E4M3"]), [rows, width] if shape == [rows, 3] else [])
    entries, size = entries_of({"weights": weights, "config": ("F32", shape)})
    entries["config"]["dtype"] = "I32"
    header(path, entries, size)


def checkpoint(rng: random.Random) -> bytes:
    rank = rng.choice([0, 500])
    state: dict[str, Any] = {}
    for layer in range(rng.choice([1, 2, 4])):
        state[NEMO_KEY.format(layer, "in")] = torch.ones(rank, HIDDEN)
        state[NEMO_KEY.format(layer, "out")] = torch.ones(2 * HIDDEN, rank)
    kind = rng.randrange(5)
    if kind == 0:
        state = {f"x{i}": torch.ones(1) for i in range(300)}
    elif kind == 1:
        state[next(iter(state))] = torch.ones(1).expand(10**6, 10**6)
    elif kind == 2:
        state[next(iter(state))] = torch.full((2, HIDDEN), torch.nan)
    elif kind == 3:
        state = {str(i) + rng.choice(NAMES[:7]): i for i in range(9)}
    stream = io.BytesIO()
    torch.save(state, stream)
    data = stream.getvalue()
    if rng.random() < 0.2:
        middle = rng.randrange(len(data))
        data = data[:middle] + os.urandom(9) + data[middle + 9 :]
    return data


def odd_nemo(rng: random.Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "a.nemo"
    kind = rng.randrange(8)
    members: list[tuple[tarfile.TarInfo, bytes]] = []

    def member(name: str, data: bytes = b"", **more: Any) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for field, value in more.items():
            setattr(info, field, value)
        members.append((info, data))

    hole = 0
    if kind == 0:
        member("model_weights.ckpt", checkpoint(rng))
    elif kind == 1:  # a name, or other words about a member, of any size
        info = tarfile.TarInfo("x")
        info.type, info.size = rng.choice([b"x", b"g", b"L", b"K"]), rng.choice([2**20, 2**31, 2**33 - 1])
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, 512 + info.size + 512)
        return
    elif kind == 2:
        member("model_weights.ckpt", size=rng.choice([2**31, 2**33, 2**40]))
        hole = members[0][0].size
    elif kind == 3:
        for i in range(300):
            member(f"{i}")
    elif kind == 4:
        member("model_weights.ckpt", checkpoint(rng), type=rng.choice([b"1", b"2", b"3", b"6", b"S"]))
    elif kind == 5:
        member("9" * 99, pax_headers={"a": "9" * 10**5})
        member("model_weights.ckpt", checkpoint(rng))
    elif kind == 6:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", b"\0" * 10**7)
        member("model_weights.ckpt", stream.getvalue())
    else:
        path.write_bytes(os.urandom(257) + b"ustar" + os.urandom(2000))
        return
    if hole:
        path.write_bytes(members[0][0].tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, 512 + hole + 1024)
        return
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)


def no_file(rng: random.Random, folder: Path) -> None:
    """A pipe, a socket, a device, a folder, a loop or nothing in the place of a file."""
    good(folder)
    target = folder / rng.choice([WEIGHTS, CONFIG])
    target.unlink()

    def make_socket() -> None:
        with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as short:
            listener.bind(f"{short}/x")  # a socket's path may have some hundred characters only
            shutil.move(f"{short}/x", target)

    links = [
        *("/dev/zero", "/dev/null", "/dev/tty", "/dev/random"), target.name, str(folder / "gone"),
        *("/etc/passwd", "/proc/self/mem", "/proc/self/environ", "/etc"), "x" * 4000, "../" * 100,
    ]  # fmt: skip
    others: list[Callable[[], object]] = [
        lambda: os.mkfifo(target), make_socket, target.mkdir, lambda: target.write_bytes(b""),
    ]  # fmt: skip
    if rng.random() < 0.5:
        target.symlink_to(rng.choice(links))
    else:
        rng.choice(others)()


KINDS: list[Callable[[random.Random, Path], None]] = [
    large_claims, odd_header, odd_settings, odd_npy, odd_llgtrt, odd_nemo, no_file,
]  # fmt: skip


def hostile(folder: Path, count: int, seed: int = 0, start: int = 0) -> Iterator[tuple[str, Path]]:
    """So many adapters from number `start` on, each in a folder of its own; what it is, and where."""
    for number_of in range(start, start + count):
        rng = random.Random(f"{seed}-{number_of}")
        make = KINDS[number_of % len(KINDS)]
        path = folder / f"{number_of}"
        make(rng, path)
        yield f"{make.__name__} {seed}-{number_of}", path

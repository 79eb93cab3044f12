"""Types that train few numbers and make A and B of them: VeRA, VB-LoRA, TinyLoRA, UniLoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.names import LAYER
from manylora.lora.formats.peft.settings import CONFIG
from manylora.lora.formats.peft_types.converted import LoraForm, Matrices, Pairs, PeftFiles
from manylora.lora.formats.tensor_files import decode

ROOT = "base_model"  # where PEFT keeps what modules share


def read_vera(files: PeftFiles) -> LoraForm:
    """diag(b) B diag(d) A, where A and B are random and shared by all modules. Raises AdapterInvalidError."""
    return _read(files, "vera", 1)


def read_pvera(files: PeftFiles) -> LoraForm:
    """Like VeRA, with twice as many rows of A and d; the second half is only for sampling in training. Raises
    AdapterInvalidError."""
    if files.settings.get("sample_at_inference"):
        raise AdapterInvalidError(
            f"{CONFIG} sets sample_at_inference: such a PVERA adapter answers at random and is not served"
        )
    return _read(files, "pvera", 2)


def _read(files: PeftFiles, kind: str, times: int) -> LoraForm:
    """times: rows of A and of d per rank."""
    pairs = Pairs(files, [f"{kind}_{part}" for part in ("lambda_b", "lambda_d", "A", "B")])
    paths = list(pairs.paths(f"{kind}_lambda_b", f"{kind}_lambda_d"))
    if not paths:
        raise AdapterInvalidError(f"the adapter holds no vectors of {pairs.kind}")
    dims = {path: _dims(pairs, path, f"{kind}_lambda_b") for path in paths}
    rows = pairs.shape(paths[0], f"{kind}_lambda_d", 1)[0]
    rank, most = rows // times, [max(column) for column in zip(*dims.values(), strict=True)]
    shared_a, shared_b = _projections(pairs, kind, (rows, most[0]), (most[1], rank))
    for path, (in_dim, out_dim) in dims.items():
        d, b = pairs.read(path, f"{kind}_lambda_d"), pairs.read(path, f"{kind}_lambda_b")
        if d.shape != (rows,):
            raise AdapterInvalidError(f"{path} has {len(d)} numbers in {kind}_lambda_d, {paths[0]} {rows}")
        pairs.check_rank(path, rank)
        pairs.add_shared(path, shared_a[:rank, :in_dim], shared_b[:out_dim], b, d[:rank])
    return pairs.form()


def _dims(pairs: Pairs, path: str, part: str) -> tuple[int, int]:
    """Inputs and outputs of a module, checked before matrices of these sizes are made."""
    in_dim, (out_dim,), module = pairs.in_dim(path), pairs.shape(path, part, 1), pairs.module(path)
    if module is not None and module.experts == 1 and out_dim != module.out_dim:
        raise AdapterInvalidError(
            f"{path} has {out_dim} numbers in {part}, {module.name} of this model has {module.out_dim} "
            "outputs: the adapter was made for another model"
        )
    return in_dim, out_dim


def _projections(
    pairs: Pairs, kind: str, of_a: tuple[int, int], of_b: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A and B from the file, or as PEFT draws them; both may be wider than these shapes."""
    if pairs.files.settings.get("save_projection", True):
        a, b = pairs.read(ROOT, f"{kind}_A"), pairs.read(ROOT, f"{kind}_B")
    else:
        pairs.files.options.bounds.check_rank(of_b[1])
        pairs.files.options.bounds.check_elements(math.prod(of_a) + math.prod(of_b))
        a, b = _draw(pairs, of_a, of_b)
    fit = a.ndim == b.ndim == 2 and len(a) == of_a[0] and b.shape[1] == of_b[1]
    if not fit or a.shape[1] < of_a[1] or len(b) < of_b[0]:
        raise AdapterInvalidError(
            f"{kind}_A {a.shape} and {kind}_B {b.shape} do not fit modules that need {of_a} and {of_b}: the "
            "adapter was made for another model"
        )
    return a, b


def _draw(pairs: Pairs, *shapes: tuple[int, int]) -> list[np.ndarray]:
    import torch

    key = pairs.files.settings.get("projection_prng_key", 0)
    if type(key) is not int or not -(2**63) <= key < 2**63:
        raise AdapterInvalidError(f"{CONFIG}: projection_prng_key must be an integer of 64 bits")
    generator = torch.Generator(device="cpu").manual_seed(key)
    made = []
    for shape in shapes:
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
        made.append(
            torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator).numpy()
        )
    return made


BANK = "vblora_vector_bank"
SIDES = ("vblora_logits_A", "vblora_logits_B")


def read_vblora(files: PeftFiles) -> LoraForm:
    """A and B consist of pieces. Each is a weighted sum of a few vectors of a bank. Raises
    AdapterInvalidError."""
    saved = [f"{side}_topk_{what}" for side in SIDES for what in ("indices", "weights")]
    pairs = Pairs(files, (*SIDES, *saved, BANK))
    bank = pairs.read(ROOT, BANK)
    if bank.ndim != 2 or 0 in bank.shape:
        raise AdapterInvalidError(f"{BANK} has shape {bank.shape}, vectors and their length are expected")
    pairs.check_count(BANK, "num_vectors", bank.shape[0])
    pairs.check_count(BANK, "vector_length", bank.shape[1])
    topk = pairs.count("topk", 2)
    if topk > len(bank):
        raise AdapterInvalidError(f"topk is {topk}, and {BANK} has {len(bank)} vectors")
    for path in pairs.paths(*SIDES, *saved):
        (rank, inputs, _), (outputs, other, _) = (_shape(pairs, path, side) for side in SIDES)
        if rank != other:
            raise AdapterInvalidError(f"{path} has rank {rank} in A and {other} in B")
        pairs.check_rank(path, rank)

        length = bank.shape[1]
        make = partial(_mixed_pair, pairs, path, rank, bank, topk)
        pairs.add(path, rank, inputs * length, outputs * length, make)
    return pairs.form()


def _mixed_pair(pairs: Pairs, path: str, rank: int, bank: np.ndarray, topk: int) -> Matrices:
    a, b = (_mix(pairs, path, side, bank, topk) for side in SIDES)
    return a.reshape(rank, -1), b.transpose(0, 2, 1).reshape(-1, rank)


def _shape(pairs: Pairs, path: str, side: str) -> tuple[int, ...]:
    return pairs.shape(path, side if pairs.has(path, side) else f"{side}_topk_indices", 3)


def _mix(pairs: Pairs, path: str, side: str, bank: np.ndarray, topk: int) -> np.ndarray:
    """[.., .., length]: one piece, of the length of a vector, for each set of logits."""
    if pairs.has(path, side):
        logits = pairs.read(path, side)
        if logits.shape[2] != len(bank):
            raise AdapterInvalidError(f"{path}.{side} has {logits.shape[2]} logits for {len(bank)} vectors")
        chosen = np.argsort(-logits, axis=2, kind="stable")[:, :, :topk]
        high = np.take_along_axis(logits, chosen, 2)
        weights = np.exp(high - high[:, :, :1])
        weights /= weights.sum(2, keepdims=True)
    else:
        chosen = pairs.integers(path, f"{side}_topk_indices", len(bank))
        saved = pairs.read(path, f"{side}_topk_weights") if topk > 1 else np.zeros((*chosen.shape[:2], 0))
        if chosen.shape[2] != topk or saved.shape != (*chosen.shape[:2], topk - 1):
            raise AdapterInvalidError(f"{path}.{side} does not have {topk} vectors for each piece")
        weights = np.concatenate((saved, 1 - saved.sum(2, keepdims=True)), axis=2).astype(np.float32)
    made = np.zeros((*chosen.shape[:2], bank.shape[1]), np.float32)
    for place in range(topk):
        made += weights[:, :, place, None] * bank[chosen[:, :, place]]
    return made


# Of the families whose layers are so; in others, such as OPT and those with recurrent layers, it is another.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value", "dense", "c_proj",
)  # fmt: skip
MLP = (
    "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "down_proj", "fc2", "c_proj",
    "dense_4h_to_h",
)  # fmt: skip
PATH = re.compile(rf"(?!.*decoder).*?\b{LAYER}(?:(?P<mlp>mlp)|\w*attn|\w*attention)\.(?P<name>\w+)")


def in_model_order(paths: Iterable[str]) -> list[str]:
    """Paths in the order in which PEFT visits a model's linear layers, which TinyLoRA and UniLoRA depend on.
    Raises AdapterInvalidError for a module whose position is not known."""
    return sorted(paths, key=_place)


def _place(path: str) -> tuple[int, bool, int]:
    found = PATH.fullmatch(path)
    names = MLP if found and found["mlp"] else ATTENTION
    if found is None or found["name"] not in names:
        raise AdapterInvalidError(
            f"{path}: which part of the adapter belongs to it depends on the order of the model's modules, "
            "which is not known of this one: merge it into the base with PEFT"
        )
    return int(found["layer"]), bool(found["mlp"]), names.index(found["name"])


TINYLORA_KEY = re.compile(r"base_model\.tinylora_v\.(\d{1,6})")


def read_tinylora(files: PeftFiles) -> LoraForm:
    """B R A: A and B come from the base's weights, R is a weighted sum of random matrices. Modules may share
    the few weights. Raises AdapterInvalidError."""
    found = {int(m[1]): key for key in files.tensors if (m := TINYLORA_KEY.fullmatch(key))}
    rest = {key: tensor for key, tensor in files.tensors.items() if not TINYLORA_KEY.fullmatch(key)}
    pairs = Pairs(replace(files, tensors=rest), ("tinylora_A", "tinylora_B", "tinylora_P"))
    groups = _groups(pairs, list(pairs.paths("tinylora_A", "tinylora_B")))
    for place, (path, group) in enumerate(groups.items()):
        (rank, in_dim), (out_dim, _) = pairs.shape(path, "tinylora_A"), pairs.shape(path, "tinylora_B")
        pairs.check_rank(path, rank)
        if group not in found:
            raise AdapterInvalidError(f"the adapter is missing tinylora_v.{group}, which {path} takes")
        numbers = decode(found[group], files.tensors[found[group]])

        make = partial(_tinylora_pair, pairs, path, place, rank, numbers)
        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _tinylora_pair(pairs: Pairs, path: str, place: int, rank: int, numbers: np.ndarray) -> Matrices:
    random = _random(pairs, path, place, len(numbers), rank)
    if random.shape != (*numbers.shape, rank, rank):
        raise AdapterInvalidError(f"{path}.tinylora_P has shape {random.shape}, which does not fit")
    mixed = np.tensordot(numbers, random, 1)
    return mixed @ pairs.read(path, "tinylora_A"), pairs.read(path, "tinylora_B")


def _groups(pairs: Pairs, paths: list[str]) -> dict[str, int]:
    """Which group of weights each module uses, in the model's order."""
    tied, count = pairs.number("weight_tying", 0.0), len(paths)
    if not 0 <= tied <= 1:
        raise AdapterInvalidError(f"{CONFIG}: weight_tying must be from 0 to 1")
    groups = max(1, round(count * (1 - tied)))
    size = max(1, count // groups)
    return {path: min(at // size, groups - 1) for at, path in enumerate(in_model_order(paths))}


def _random(pairs: Pairs, path: str, place: int, numbers: int, rank: int) -> np.ndarray:
    """Random matrices [numbers, rank, rank], from the file or as PEFT draws them."""
    import torch

    if pairs.has(path, "tinylora_P"):
        return pairs.read(path, "tinylora_P")
    pairs.files.options.bounds.check_elements(numbers * rank * rank)
    seed = pairs.files.settings.get("projection_seed", 42)
    if type(seed) is not int or not -(2**62) <= seed < 2**62:
        raise AdapterInvalidError(f"{CONFIG}: projection_seed must be an integer of 62 bits")
    generator = torch.Generator().manual_seed(seed + place)
    drawn = torch.normal(0.0, 1.0 / rank**0.5, (numbers, rank, rank), generator=generator)
    return drawn.numpy()


UNILORA_NUMBERS = "unilora_theta_d"
UNILORA_PARTS = [f"unilora_{what}_{side}" for side in "AB" for what in ("indices", "scales")]


def read_unilora(files: PeftFiles) -> LoraForm:
    """Each element of A and B is one of a few numbers, chosen at random, times a scale. Raises
    AdapterInvalidError."""
    pairs = Pairs(files, (*UNILORA_PARTS, UNILORA_NUMBERS))
    numbers = pairs.read(ROOT, UNILORA_NUMBERS)
    if numbers.ndim != 1 or not numbers.size:
        raise AdapterInvalidError(f"{UNILORA_NUMBERS} has shape {numbers.shape}, one dimension is expected")
    pairs.check_count(UNILORA_NUMBERS, "theta_d_length", len(numbers))
    paths = list(pairs.paths(*UNILORA_PARTS))
    if not paths:
        return _drawn(pairs, numbers)
    for path in paths:
        (rank, in_dim), (out_dim, _) = (pairs.shape(path, f"unilora_indices_{side}") for side in "AB")
        pairs.check_rank(path, rank)

        make = partial(_unilora_pair, pairs, path, numbers)
        pairs.add(path, rank, in_dim, out_dim, make)
    return pairs.form()


def _unilora_pair(pairs: Pairs, path: str, numbers: np.ndarray) -> Matrices:
    a, b = (_side(pairs, path, side, numbers) for side in "AB")
    return a, b


def _side(pairs: Pairs, path: str, side: str, numbers: np.ndarray) -> np.ndarray:
    chosen = pairs.integers(path, f"unilora_indices_{side}", len(numbers))
    scales = pairs.read(path, f"unilora_scales_{side}")
    if scales.shape != chosen.shape:
        raise AdapterInvalidError(f"{path}: indices and scales of {side} do not fit together")
    return numbers[chosen] * scales


def _drawn(pairs: Pairs, numbers: np.ndarray) -> LoraForm:
    """If the file does not have the choices, they are drawn like PEFT does, for all adapted modules of the
    model."""
    rank, seed = pairs.count("r", 4), pairs.files.settings.get("proj_seed", 42)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise AdapterInvalidError(f"{CONFIG}: proj_seed must be a positive integer")
    dims = {}
    for path in in_model_order(_targets(pairs)):
        module = pairs.module(path)
        if module is None or module.experts > 1:
            raise AdapterInvalidError(f"{path} is not a linear layer that adapters of this model may have")
        dims[path] = module.in_dim, module.out_dim
    total = sum(rank * (in_dim + out_dim) for in_dim, out_dim in dims.values())
    pairs.files.options.bounds.check_rank(rank)
    pairs.files.options.bounds.check_elements(total)
    chosen = _choices(total, len(numbers), seed)
    counts = np.bincount(chosen, minlength=len(numbers)).astype(np.float32)
    scaled = numbers / np.sqrt(np.maximum(counts, 1))
    at = 0
    for path, (in_dim, out_dim) in dims.items():
        a = scaled[chosen[at : at + rank * in_dim]].reshape(rank, in_dim)
        at += rank * in_dim
        b = scaled[chosen[at : at + out_dim * rank]].reshape(out_dim, rank)
        at += out_dim * rank
        pairs.add(path, rank, in_dim, out_dim, partial(tuple, (a, b)))
    return pairs.form()


def _choices(total: int, count: int, seed: int) -> np.ndarray:
    """Each of `count` indices equally often, or once more."""
    random = np.random.default_rng(seed)
    chosen = np.repeat(np.arange(count), total // count)
    if rest := total % count:
        chosen = np.concatenate([chosen, random.choice(count, size=rest, replace=False)])
    random.shuffle(chosen)
    return chosen


def _targets(pairs: Pairs) -> Iterator[str]:
    """The paths of the base's modules that target_modules names."""
    settings, base = pairs.files.settings, pairs.files.base
    names, layers = settings.get("target_modules") or [], settings.get("layers_to_transform")
    plain = (
        isinstance(names, list) and names and all(isinstance(name, str) and "." not in name for name in names)
    )
    if base is None or not plain or layers is not None or settings.get("exclude_modules"):
        raise AdapterInvalidError(
            "which of its numbers an UNILORA adapter takes where depends on all modules of the base: save it "
            "with save_indices=True, or name the base with --base and have target_modules be a list of names"
        )
    for name in base.names():
        path, _, part = name.rpartition(".")
        if part == "weight" and path.rpartition(".")[2] in names:
            yield f"base_model.model.{path}"

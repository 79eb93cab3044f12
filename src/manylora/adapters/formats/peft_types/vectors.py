"""Types that train few numbers and make A and B of them: VeRA, VB-LoRA, TinyLoRA, UniLoRA. All functions
raise AdapterInvalidError."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from manylora.adapters.formats.peft.names import LAYER
from manylora.adapters.formats.peft.settings import CONFIG, peft_type
from manylora.adapters.formats.peft_types import converted
from manylora.adapters.formats.peft_types.converted import (
    LoraForm,
    Matrices,
    Pairs,
    PeftFiles,
    integer,
    unfit,
)
from manylora.adapters.formats.tensor_files import decode
from manylora.errors import AdapterInvalidError

ROOT = "base_model"  # where PEFT keeps what modules share
KINDS = {"vera": 1, "pvera": 2}  # rows of A and of d per rank


def read_vera(files: PeftFiles) -> LoraForm:
    """VeRA: diag(b) B diag(d) A, where A and B are random and shared by all modules. PVeRA: with twice as
    many rows of A and d; the second half is only for sampling in training."""
    kind, bounds = peft_type(files.settings).lower(), files.options.bounds
    pairs = Pairs(files, [f"{kind}_{part}" for part in ("lambda_b", "lambda_d", "A", "B")])
    if kind == "pvera" and files.settings.get("sample_at_inference"):
        raise AdapterInvalidError(
            f"{CONFIG} sets sample_at_inference: such a PVERA adapter answers at random and is not served"
        )
    of_b, of_d = f"{kind}_lambda_b", f"{kind}_lambda_d"
    dims = {}  # inputs and outputs, checked before matrices of these sizes are made
    for path in pairs.paths(of_b, of_d):
        module, (out_dim,) = pairs.known_module(path), pairs.shape(path, of_b, 1)
        if module.experts == 1 and out_dim != module.out_dim:
            raise AdapterInvalidError(
                f"{path} has {out_dim} numbers in {of_b}, {module.name} of this model has {module.out_dim} "
                "outputs: the adapter was made for another model"
            )
        dims[path] = module.in_dim, out_dim
    if not dims:
        raise AdapterInvalidError(f"the adapter holds no vectors of {pairs.kind}")
    first = next(iter(dims))
    rows = pairs.shape(first, of_d, 1)[0]
    rank, most = rows // KINDS[kind], [max(column) for column in zip(*dims.values(), strict=True)]
    if rank == 0:
        raise unfit(first)
    if files.settings.get("save_projection", True):
        shared_a, shared_b = pairs.read(ROOT, f"{kind}_A"), pairs.read(ROOT, f"{kind}_B")
    else:
        bounds.check_rank(rank)
        bounds.check_elements(rows * most[0] + most[1] * rank)
        shared_a, shared_b = _draw(files, (rows, most[0]), (most[1], rank))
    fit = shared_a.ndim == shared_b.ndim == 2 and len(shared_a) == rows and shared_b.shape[1] == rank
    if not fit or shared_a.shape[1] < most[0] or len(shared_b) < most[1]:  # both may be wider
        raise AdapterInvalidError(
            f"{kind}_A {shared_a.shape} and {kind}_B {shared_b.shape} do not fit modules that need "
            f"{(rows, most[0])} and {(most[1], rank)}: the adapter was made for another model"
        )
    for path, (in_dim, out_dim) in dims.items():
        d, b = pairs.read(path, of_d), pairs.read(path, of_b)
        if d.shape != (rows,):
            raise AdapterInvalidError(f"{path} has {len(d)} numbers in {of_d}, {first} {rows}")
        pairs.check_rank(path, rank)
        pairs.add_shared(path, shared_a[:rank, :in_dim], shared_b[:out_dim], b, d[:rank])
    return pairs.form()


def _draw(files: PeftFiles, *shapes: tuple[int, int]) -> list[np.ndarray]:
    """A and B as PEFT draws them."""
    import torch

    bits = range(-(2**63), 2**63)
    key = integer(files.settings, "projection_prng_key", 0, bits, "an integer of 64 bits")
    generator = torch.Generator(device="cpu").manual_seed(key)
    made = []
    for shape in shapes:
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
        drawn = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        made.append(drawn.numpy())
    return made


BANK = "vblora_vector_bank"
SIDES = ("vblora_logits_A", "vblora_logits_B")


def read_vblora(files: PeftFiles) -> LoraForm:
    """A and B consist of pieces. Each is a weighted sum of a few vectors of a bank."""
    saved = [f"{side}_topk_{what}" for side in SIDES for what in ("indices", "weights")]
    pairs = Pairs(files, (*SIDES, *saved, BANK))
    bank = pairs.read(ROOT, BANK)
    if bank.ndim != 2 or 0 in bank.shape:
        raise AdapterInvalidError(f"{BANK} has shape {bank.shape}, vectors and their length are expected")
    count, length = bank.shape
    pairs.check_count(BANK, "num_vectors", count)
    pairs.check_count(BANK, "vector_length", length)
    topk = integer(files.settings, "topk", 2, *converted.COUNTS)
    if topk > count:
        raise AdapterInvalidError(f"topk is {topk}, and {BANK} has {count} vectors")

    def mixed(path: str) -> Matrices:
        of_a, of_b = (side if pairs.has(path, side) else f"{side}_topk_indices" for side in SIDES)
        rank, inputs, outputs = pairs.sizes(path, "r i o", **{of_a: "r i n", of_b: "o r m"})
        pairs.check_rank(path, rank)
        pairs.reserve(path, rank, inputs * length, outputs * length)
        a, b = (_mix(pairs, path, side, bank, topk) for side in SIDES)
        return a.reshape(rank, -1), b.transpose(0, 2, 1).reshape(-1, rank)

    return pairs.convert(pairs.paths(*SIDES, *saved), mixed)


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
    Refuses a module whose position is not known."""
    places = {}
    for path in paths:
        found = PATH.fullmatch(path)
        names = MLP if found and found["mlp"] else ATTENTION
        if found is None or found["name"] not in names:
            raise AdapterInvalidError(
                f"{path}: which part of the adapter belongs to it depends on the order of the model's "
                "modules, which is not known of this one: merge it into the base with PEFT"
            )
        places[path] = int(found["layer"]), bool(found["mlp"]), names.index(found["name"])
    return sorted(places, key=places.__getitem__)


TINYLORA_KEY = re.compile(r"base_model\.tinylora_v\.(\d{1,6})")


def read_tinylora(files: PeftFiles) -> LoraForm:
    """B R A: A and B come from the base's weights, R is a weighted sum of random matrices. Modules may share
    the few weights."""
    found = {int(m[1]): key for key in files.tensors if (m := TINYLORA_KEY.fullmatch(key))}
    rest = {key: tensor for key, tensor in files.tensors.items() if not TINYLORA_KEY.fullmatch(key)}
    pairs = Pairs(replace(files, tensors=rest), ("tinylora_A", "tinylora_B", "tinylora_P"))
    paths = in_model_order(pairs.paths("tinylora_A", "tinylora_B"))
    places, tied = {path: place for place, path in enumerate(paths)}, pairs.number("weight_tying", 0.0)
    if not 0 <= tied <= 1:
        raise AdapterInvalidError(f"{CONFIG}: weight_tying must be from 0 to 1")
    groups = max(1, round(len(paths) * (1 - tied)))
    size = max(1, len(paths) // groups)

    def mixed(path: str) -> Matrices:
        group = min(places[path] // size, groups - 1)
        rank, in_dim, out_dim = pairs.sizes(path, "r i o", tinylora_A="r i", tinylora_B="o r")
        pairs.check_rank(path, rank)
        if group not in found:
            raise AdapterInvalidError(f"the adapter is missing tinylora_v.{group}, which {path} takes")
        pairs.reserve(path, rank, in_dim, out_dim)
        numbers = decode(found[group], files.tensors[found[group]])
        if pairs.has(path, "tinylora_P"):
            random = pairs.read(path, "tinylora_P")
        else:
            random = _draw_tinylora(files, places[path], (len(numbers), rank, rank))
        if random.shape != (*numbers.shape, rank, rank):
            raise AdapterInvalidError(f"{path}.tinylora_P has shape {random.shape}, which does not fit")
        mixed = np.tensordot(numbers, random, 1)
        return mixed @ pairs.read(path, "tinylora_A"), pairs.read(path, "tinylora_B")

    return pairs.convert(paths, mixed)


def _draw_tinylora(files: PeftFiles, place: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Random matrices of a module as PEFT draws them."""
    import torch

    files.options.bounds.check_elements(math.prod(shape))
    bits = range(-(2**62), 2**62)
    seed = integer(files.settings, "projection_seed", 42, bits, "an integer of 62 bits")
    generator = torch.Generator().manual_seed(seed + place)
    return torch.normal(0.0, 1.0 / shape[1] ** 0.5, shape, generator=generator).numpy()


UNILORA_NUMBERS = "unilora_theta_d"
UNILORA_PARTS = [f"unilora_{what}_{side}" for side in "AB" for what in ("indices", "scales")]


def read_unilora(files: PeftFiles) -> LoraForm:
    """Each element of A and B is one of a few numbers, chosen at random, times a scale."""
    pairs = Pairs(files, (*UNILORA_PARTS, UNILORA_NUMBERS))
    numbers = pairs.read(ROOT, UNILORA_NUMBERS)
    if numbers.ndim != 1 or not numbers.size:
        raise AdapterInvalidError(f"{UNILORA_NUMBERS} has shape {numbers.shape}, one dimension is expected")
    pairs.check_count(UNILORA_NUMBERS, "theta_d_length", len(numbers))
    paths = list(pairs.paths(*UNILORA_PARTS))
    if not paths:
        return _drawn(pairs, numbers)

    def chosen(path: str) -> Matrices:
        names = {f"unilora_indices_{side}": shape for side, shape in (("A", "r i"), ("B", "o r"))}
        rank, in_dim, out_dim = pairs.sizes(path, "r i o", **names)
        pairs.check_rank(path, rank)
        pairs.reserve(path, rank, in_dim, out_dim)
        made = []
        for side in "AB":
            indices = pairs.integers(path, f"unilora_indices_{side}", len(numbers))
            scales = pairs.read(path, f"unilora_scales_{side}")
            if scales.shape != indices.shape:
                raise unfit(path, f"indices and scales of {side}")
            made.append(numbers[indices] * scales)
        return made[0], made[1]

    return pairs.convert(paths, chosen)


def _drawn(pairs: Pairs, numbers: np.ndarray) -> LoraForm:
    """If the file does not have the choices, they are drawn like PEFT does, for all modules of the base that
    target_modules names."""
    settings, base, bounds = pairs.files.settings, pairs.files.base, pairs.files.options.bounds
    rank = integer(settings, "r", 4, *converted.COUNTS)
    seed = integer(settings, "proj_seed", 42, range(2**63), "a positive integer")
    names, layers = settings.get("target_modules") or [], settings.get("layers_to_transform")
    plain = isinstance(names, list) and names and not any("." in name for name in names)
    if base is None or not plain or layers is not None or settings.get("exclude_modules"):
        raise AdapterInvalidError(
            "which of its numbers an UNILORA adapter takes where depends on all modules of the base: save it "
            "with save_indices=True, or name the base with --base and have target_modules be a list of names"
        )
    weights = [name.removesuffix(".weight") for name in base.names() if name.endswith(".weight")]
    targets = (f"base_model.model.{path}" for path in weights if path.rpartition(".")[2] in names)
    dims = {}
    for path in in_model_order(targets):
        module = pairs.module(path)
        if module is None or module.experts > 1:
            raise AdapterInvalidError(f"{path} is not a linear layer that adapters of this model may have")
        dims[path] = module.in_dim, module.out_dim
    total = sum(rank * (in_dim + out_dim) for in_dim, out_dim in dims.values())
    bounds.check_rank(rank)
    bounds.check_elements(total)
    # Each number equally often, or once more.
    random, (often, rest) = np.random.default_rng(seed), divmod(total, len(numbers))
    chosen = np.repeat(np.arange(len(numbers)), often)
    if rest:
        chosen = np.concatenate([chosen, random.choice(len(numbers), size=rest, replace=False)])
    random.shuffle(chosen)
    counts = np.bincount(chosen, minlength=len(numbers)).astype(np.float32)
    scaled = numbers / np.sqrt(np.maximum(counts, 1))
    starts = dict(zip(dims, np.cumsum([0, *(rank * sum(sizes) for sizes in dims.values())]), strict=False))

    def drawn(path: str) -> Matrices:
        (in_dim, out_dim), start = dims[path], starts[path]
        pairs.reserve(path, rank, in_dim, out_dim)
        a, b = np.split(scaled[chosen[start : start + rank * (in_dim + out_dim)]], [rank * in_dim])
        return a.reshape(rank, in_dim), b.reshape(out_dim, rank)

    return pairs.convert(dims, drawn)

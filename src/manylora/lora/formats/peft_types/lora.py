"""LoRA's variants that are a LoRA once their matrices are written out, LoRAs whose start was taken out of the
base's weights (PiSSA, OLoRA, KaSA), and trainable tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.extras import TOKENS
from manylora.lora.formats.peft.names import LORA_NAMES, SIDE
from manylora.lora.formats.peft.settings import CONFIG, config_of, initial_kind
from manylora.lora.formats.peft_types.converted import LoraForm, Matrices, Pairs, PeftFiles, raw
from manylora.lora.formats.tensor_files import RawTensor, check_type, decode

if TYPE_CHECKING:
    from torch import Tensor

DELTA = TOKENS.rpartition(".")[2]
Tensors = Mapping[str, RawTensor]
STARTS = ("pissa", "olora", "kasa")  # `initial_kind` of LoRAs that are written out
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # in `init_lora_weights`
# What training alone needs: the sampler of MonteCLoRA, the projection of VeLoRA.
OF_TRAINING = {
    "monteclora_config": re.compile(r".+\.lora_monteclora_sampler\..+"),
    "velora_config": re.compile(r".+\.lora_velora_embed(?:\.weight)?"),
}


def read_tokens(files: PeftFiles) -> LoraForm:
    """Trainable tokens: rows of the embedding alone, as `trainable_token_indices` of a LoRA. Raises
    AdapterInvalidError.
    """
    found, tables = {}, []
    for key, tensor in files.tensors.items():
        path, _, part = key.rpartition(".")
        if part == DELTA and not path.endswith(".token_adapter"):
            tables.append(path.rpartition(".")[2])
            key = f"{path}.{TOKENS}"
        found[key] = tensor
    if not tables:
        raise AdapterInvalidError(f"the adapter holds no {DELTA}")
    ids = files.settings.get("token_indices") or []
    indices = {"trainable_token_indices": dict.fromkeys(tables, ids)}
    return LoraForm(config_of({"lora_alpha": 1, **indices}), found)


def read_lora(files: PeftFiles) -> LoraForm:
    """A LoRA with any of its variants. Raises AdapterInvalidError."""
    settings, tensors = files.settings, files.tensors
    for name, pattern in OF_TRAINING.items():
        if settings.get(name):
            tensors = {key: tensor for key, tensor in tensors.items() if not pattern.fullmatch(key)}
    start, dora = initial_kind(settings), bool(settings.get("use_dora"))
    own = initial_kind({**settings, "kasa_config": None})
    twice = start == "kasa" and (dora or own.startswith(OTHER_BASES))
    changes = [change for name, change in CHANGES.items() if settings.get(name)]
    if len(changes) + max(dora, start in STARTS) > 1 or twice:
        raise AdapterInvalidError(f"{CONFIG} asks for several variants of LORA that are not served together")
    for change in changes:
        tensors = change(replace(files, tensors=tensors))
    if start in STARTS:
        return _without_start(replace(files, tensors=tensors), start)
    return LoraForm(config_of(settings), tensors)


def _qalora(files: PeftFiles) -> Tensors:
    """QALoRA: A is multiplied with the means of groups of inputs, times their number. PEFT does so on layers
    of GPTQ only; on other layers use_qalora has no effect, and A has a column for each input.
    """
    size = files.settings.get("qalora_group_size", 16)
    if type(size) is not int or not 0 < size < 2**31:
        raise AdapterInvalidError(f"{CONFIG}: qalora_group_size must be a positive number")

    def is_plain(path: str) -> bool:
        key, modules = f"{path}.lora_A.weight", files.options.modules
        name = LORA_NAMES.find(key, modules)
        module = None if name is None or name.stack is not None else name.module(modules)
        return (
            module is not None and key in files.tensors and files.tensors[key].shape[-1:] == (module.in_dim,)
        )

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if side == "B" or is_plain(path):
            return values
        factor = np.float32(values.shape[1]) / np.float32(size)
        return np.repeat(values * factor, size, axis=1)

    return _rewritten(files, spread, lambda path, side: size if side == "A" and not is_plain(path) else 1)


def _bdlora(files: PeftFiles) -> Tensors:
    """BD-LoRA: A or B of a module consists of blocks on its diagonal, stored one below the other."""
    found = files.settings["use_bdlora"]
    blocks = found.get("nblocks", 1) if isinstance(found, dict) else None
    # Parts of the names of modules that have blocks in A and in B.
    patterns = {side: found.get(f"target_modules_bd_{side.lower()}") or [] for side in "AB"} if blocks else {}
    named = all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in patterns.values())
    if type(blocks) is not int or not 0 < blocks < 2**16 or not named:
        raise AdapterInvalidError(f"{CONFIG}: use_bdlora must have nblocks and lists of names of modules")

    def is_cut(path: str, side: str) -> bool:
        name = path.rpartition(".")[2]
        sides = [one for one in "AB" if any(part in name for part in patterns[one])]
        if len(sides) > 1:
            raise AdapterInvalidError(f"{CONFIG}: use_bdlora names {path} for A and for B")
        return side in sides

    def spread(path: str, side: str, values: np.ndarray) -> np.ndarray:
        if not is_cut(path, side):
            return values
        rows, width = values.shape
        if rows % blocks:
            raise AdapterInvalidError(f"{path}: {rows} rows of lora_{side} are not {blocks} blocks")
        whole = np.zeros((blocks, rows // blocks, blocks, width), np.float32)
        for place, block in enumerate(np.split(values, blocks)):
            whole[place, :, place] = block
        return whole.reshape(rows, -1)

    return _rewritten(files, spread, lambda path, side: blocks if is_cut(path, side) else 1)


# By the setting that asks for them: what writes the matrices out.
CHANGES: dict[str, Callable[[PeftFiles], Tensors]] = {"use_qalora": _qalora, "use_bdlora": _bdlora}


def _rewritten(
    files: PeftFiles,
    change: Callable[[str, str, np.ndarray], np.ndarray],
    growth: Callable[[str, str], int],
) -> Tensors:
    """The tensors with A and B of each module changed. change, growth: by a module's path and the side.
    growth: by how much the size of the matrix is multiplied, which is checked first."""
    made, elements = {}, 0
    for key, tensor in files.tensors.items():
        match = SIDE.fullmatch(key)
        if match is None:
            made[key] = tensor
            continue
        check_type(key, tensor)
        if len(tensor.shape) != 2:
            raise AdapterInvalidError(f"{key} has shape {tensor.shape}, 2 dimensions are expected")
        elements += tensor.shape[0] * tensor.shape[1] * growth(match["path"], match["side"])
        files.options.bounds.check_elements(elements)
        made[key] = raw(change(match["path"], match["side"], decode(key, tensor)))
    return made


def _without_start(files: PeftFiles, kind: str) -> LoraForm:
    """A LoRA that was initialised from the base's weights. Training started from W - C instead of W, so the
    adapter is B A - C. C has the same rank and is computed from W again. The signs that a library gives its
    factors do not matter. kind: one of STARTS. Raises AdapterInvalidError."""
    pairs = Pairs(files, ("lora_A", "lora_B", "lora_diag"))
    config, base = config_of(files.settings), files.base
    if base is None:
        raise AdapterInvalidError(
            f"{CONFIG} sets {kind}: the adapter is relative to a changed base, which is computed from the "
            "base's weights: name its directory with --base, or convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )

    def difference(path: str, scale: np.float32) -> Matrices:
        a, b, module = pairs.read(path, "lora_A"), pairs.read(path, "lora_B"), pairs.module(path)
        if kind == "kasa":
            a = a * pairs.read(path, "lora_diag").reshape(-1, 1)
        transposed = config.fan_in_fan_out if module is None else module.transposed
        if transposed and kind != "pissa":
            raise AdapterInvalidError(f"{path} is a Conv1D, of which PEFT has no {kind}")
        start_a, start_b = _start(kind, base.weight(path, a.shape[1], len(b), transposed), len(a))
        start_b = start_b * scale if kind == "olora" else start_b
        return np.concatenate((a, start_a)), np.concatenate((b * scale, -start_b), axis=1)

    work = 0
    for path in pairs.paths("lora_A", "lora_B"):
        (rank, in_dim), (out_dim, other) = pairs.shape(path, "lora_A"), pairs.shape(path, "lora_B")
        if rank != other or rank > min(in_dim, out_dim):
            raise AdapterInvalidError(f"{path}: its lora_A and lora_B do not fit together")
        told = rank if config.default_rank is None else config.rank(path)
        # A weight has no more parts than its smaller side; the scaling is of the rank that was asked for.
        if rank != min(told, in_dim, out_dim):
            config.check_rank(path, rank)
        work += in_dim * out_dim * min(in_dim, out_dim)
        files.options.bounds.check_decompositions(kind, work)
        make = partial(difference, path, np.float32(config.scale(path, told)))
        pairs.add(path, 2 * rank, in_dim, out_dim, make)
    form, dora = pairs.form(), ("use_dora", "dora_normalized")  # DoRA is of base plus adapter, as in any LoRA
    return replace(form, config=replace(form.config, **{name: getattr(config, name) for name in dora}))


def _start(kind: str, weight: Tensor, rank: int) -> Matrices:
    """A and B of what was taken out of W [out, in]: PiSSA takes the parts with the largest singular values,
    KaSA those with the smallest, OLoRA the first columns of Q and rows of R."""
    import torch

    if kind == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].numpy(), q[:, :rank].numpy()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    part = slice(-rank, None) if kind == "kasa" else slice(rank)
    return v[part].numpy(), (u[:, part] * s[part]).numpy()

"""Routed experts in PEFT directories: matrices of each expert by its number, or of all experts in one pair.

PEFT writes the second form for `target_parameters`: A [experts * rank, in], the rows of one expert together,
and B [out, rank * experts], the columns of one rank together. `gate_up_proj` and `down_proj` of a layer are
two wrappers around the same module, told apart by their dimensions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from manylora.adapters.bounds import Bounds
from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.peft import names
from manylora.adapters.formats.peft.settings import CONFIG, PeftConfig
from manylora.adapters.formats.tensor_files import RawTensor, check_type
from manylora.adapters.modules import MODULE_NAMES, LoraModule
from manylora.adapters.number_types import NumberType
from manylora.adapters.tensors import AdapterRow, check_dims
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import RowFormat

LARGEST_SCALE = 1e36  # times 448, a float32
IN_TURN = re.compile(r"gpt[-_]?oss", re.IGNORECASE)
"""In the name of a base whose stacked rows are those of gate and up in turn."""
MAGNITUDE = "M"
DORA_REASON = "DoRA magnitudes are divided by the row norms of the base model: name it with --base"
Matrices = dict[str, np.ndarray]  # "A", "B", MAGNITUDE


def check_expert_shapes(
    tensors: Mapping[str, RawTensor], modules: Mapping[int, LoraModule], bounds: Bounds
) -> int:
    """The number of elements of all tensors. tensors: those whose names EXPERT_KEY matches. Raises
    AdapterInvalidError if one of them must not be read."""
    for key, tensor in tensors.items():
        match = names.EXPERT_KEY.fullmatch(key)
        assert match is not None
        if match["part"] is None:
            check_type(key, tensor)
            continue
        if len(tensor.shape) != 2:
            raise AdapterInvalidError(f"{key} must be a matrix, got {tensor.shape}")
        check_type(key, tensor)
        if match["stacked"] is None or names.DOWN in modules:
            experts = 1 if match["stacked"] is None else modules[names.DOWN].experts
            bounds.check_rank(tensor.shape[match["part"] == "B"] // experts)
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


@dataclass(frozen=True)
class ExpertReader:
    """modules: the model's; the adapter must have the same experts and dimensions. Empty: not known. kind: if
    the tensors are bytes of an encoded type, the rows keep them, with one scaling per row beside them. All
    methods raise AdapterInvalidError."""

    config: PeftConfig
    modules: Mapping[int, LoraModule]
    kind: NumberType | None

    def rows(self, tensors: Mapping[str, np.ndarray], base: BaseReader | None) -> list[AdapterRow]:
        """Rows in float32, with the scaling folded into B. tensors: those whose names EXPERT_KEY matches, of
        shapes that `check_expert_shapes` accepts. base: as of `RowPlan.read`."""
        single: dict[tuple[int, int], dict[int, tuple[str, Matrices]]] = defaultdict(dict)
        stacked: dict[int, dict[str, Matrices]] = defaultdict(dict)
        down = self.modules.get(names.DOWN)
        for key, values in sorted(tensors.items()):
            match = names.EXPERT_KEY.fullmatch(key)
            assert match is not None
            layer, path, part = int(match["layer"]), match["path"], match["part"] or MAGNITUDE
            if match["stacked"] is not None:
                if part == MAGNITUDE or self.config.use_dora:
                    raise AdapterInvalidError(
                        f"{key}: DoRA is served of experts that are linear layers, as in PEFT, not of stacks"
                    )
                check_order_known(key, self.config.base, self.modules)
                matrices = stacked[layer].setdefault(path, {})
            else:
                if down is not None and match["list"] is not None and not down.interleaved:
                    raise AdapterInvalidError(
                        f"{path}: this model's experts are not called so; the adapter is for another"
                    )
                if match["list"] is not None:
                    module_id, number = names.EXPERT_LISTS[match["list"]], match["number"]
                else:
                    module_id, number = names.EXPERT_NAMES[match["name"]], match["expert"]
                    module_id = names.H_TO_4H if module_id == names.GATE and self._is_ungated else module_id
                matrices = single[layer, module_id].setdefault(int(number), (path, {}))[1]
            if part in matrices:
                raise AdapterInvalidError(f"{key} names an expert's matrix a second time")
            matrices[part] = values
        rows = [row for place, experts in single.items() for row in self._from_single(*place, experts, base)]
        for layer, wrappers in stacked.items():
            rows += self._from_stacked(layer, wrappers)
        return rows

    def _from_single(
        self,
        layer: int,
        module_id: int,
        experts: Mapping[int, tuple[str, Matrices]],
        base: BaseReader | None,
    ) -> list[AdapterRow]:
        where, count = f"{MODULE_NAMES[module_id]} of layer {layer}", max(experts) + 1
        self._check_count(where, count, module_id)
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        magnitudes: list[np.ndarray | None] = []
        for number in range(count):
            path, matrices = experts.get(number, (where, {}))
            a, b = _both(f"expert {number}: {path}", matrices)
            fused = ".gate_up_projs." in path
            for part in (b[::2], b[1::2]) if fused else (b,):
                check_dims(path, a.shape, part.shape, self._of_one(module_id))
            first = pairs[0] if pairs else (a, b)
            if (a.shape, b.shape) != (first[0].shape, first[1].shape):
                raise AdapterInvalidError(
                    f"{where}: A and B of expert {number} are {a.shape} and {b.shape}, of expert 0 "
                    f"{first[0].shape} and {first[1].shape}: all must be alike"
                )
            scale = self.config.scale(path, len(a))
            pairs.append((a, self._scaled(path, b, scale)))
            stored = matrices.get(MAGNITUDE)
            magnitudes.append(normalised_magnitude(path, stored, *pairs[-1], self.config, base))
        given = [one for one in magnitudes if one is not None]
        if len(given) not in (0, count):
            raise AdapterInvalidError(f"{where}: some experts have a DoRA magnitude, and some have none")
        a, b = (np.stack([pair[i] for pair in pairs]) for i in range(2))
        m = np.stack(given) if given else None
        if not fused:
            return [self._row(module_id, layer, a, b, scale, m)]
        each = ((names.H_TO_4H, slice(0, None, 2)), (names.GATE, slice(1, None, 2)))
        return [
            self._row(part_id, layer, a, b[:, rows], scale, None if m is None else m[:, rows])
            for part_id, rows in each
        ]

    def _from_stacked(self, layer: int, wrappers: Mapping[str, Matrices]) -> list[AdapterRow]:
        pairs = {path: _both(path, matrices) for path, matrices in wrappers.items()}
        rows: list[AdapterRow] = []
        down = self._of_one(names.DOWN)
        for name, path in self._names({path: (a.shape[1], len(b)) for path, (a, b) in pairs.items()}).items():
            a, b = pairs[path]
            turned = down is not None and (a.shape[1], len(b)) in self._turned(down)
            own = "weight" if path.endswith(tuple(names.EXPERT_PARAMETERS)) else name
            parameter = f"{path.removesuffix('.base_layer')}.{own}"
            rank = self.config.rank(parameter)
            if self.config.moe_rank_scaling and down is not None:
                rank = len(a) // self.modules[names.DOWN].experts or rank
            count, rest = divmod(len(a), rank)
            if rest or count == 0 or b.shape[1] != len(a):
                raise AdapterInvalidError(
                    f"{path}: A {a.shape} and B {b.shape} do not hold experts of rank {rank}, as "
                    f"{CONFIG} says"
                )
            target = names.DOWN if name == "down_proj" else names.H_TO_4H
            self._check_count(f"{path} with rank {rank}", count, target)
            a = a.reshape(count, rank, -1)
            b = b.reshape(len(b), rank, count).transpose(2, 0, 1)
            if turned:
                a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
            scale = self.config.scale(parameter, rank)
            b = self._scaled(path, b, scale)
            half, odd = divmod(b.shape[1], 2)
            if name != "gate_up_proj":
                parts = {target: b}
            elif odd:
                raise AdapterInvalidError(f"{path}: the fused gate and up must have an even number of rows")
            elif target in self.modules and self.modules[target].interleaved:
                parts = {names.H_TO_4H: b[:, ::2], names.GATE: b[:, 1::2]}
            else:
                parts = {names.H_TO_4H: b[:, :half], names.GATE: b[:, half:]}
            for module_id, part in parts.items():
                check_dims(path, a[0].shape, part[0].shape, self._of_one(module_id))
                # If gate and up were adapted separately and then fused, half of the ranks are idle in each.
                busy = part.any(axis=(0, 1))
                busy[0] |= not busy.any()
                rows.append(self._row(module_id, layer, a[:, busy], part[:, :, busy], scale))
        return rows

    def _names(self, sizes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
        """The path of the wrapper of each parameter of a layer. gate_up_proj goes from hidden to 2 * inner
        dimensions, down_proj from inner to hidden, so their sizes always differ."""
        down = self._of_one(names.DOWN)
        by_path = {names.EXPERT_PARAMETERS.get(path.rpartition(".")[2]): path for path in sizes}
        if None not in by_path:
            found: dict[str | None, str] = by_path
        elif down is not None:
            inner, hidden = down.in_dim, down.out_dim
            wanted = {(hidden, 2 * inner): "gate_up_proj", (inner, hidden): "down_proj"}
            if self._is_ungated:
                wanted = {(hidden, inner): "up_proj", (inner, hidden): "down_proj"}
            wanted |= self._turned(down)
            found = {wanted.get(size): path for path, size in sizes.items()}
        elif len(sizes) == 2:
            (one, (one_in, one_out)), (two, (two_in, two_out)) = sizes.items()
            if (one_in, one_out) == (two_out, 2 * two_in):
                found = {"gate_up_proj": one, "down_proj": two}
            elif (two_in, two_out) == (one_out, 2 * one_in):
                found = {"gate_up_proj": two, "down_proj": one}
            else:
                found = {None: one}
        else:
            targets = {name.rpartition(".")[2] for name in self.config.target_parameters}
            known = targets & {"gate_up_proj", "down_proj"}
            found = {known.pop() if len(known) == 1 else None: next(iter(sizes))}
        if None in found or len(found) < len(sizes):
            path = found.get(None, next(iter(sizes)))
            raise AdapterInvalidError(
                f"{path} goes from {sizes[path][0]} to {sizes[path][1]} dimensions: neither gate_up_proj nor "
                f"down_proj of {'this' if self.modules else 'any'} model's experts"
            )
        return {name: path for name, path in found.items() if name}

    def _turned(self, down: LoraModule) -> dict[tuple[int, int], str]:
        """What a wrapper adapts whose A and B have swapped dimensions, by these. PEFT swaps those of matrices
        [in, out], and its first versions those of all others, as NeMo AutoModel does."""
        inner, hidden = down.in_dim, down.out_dim
        usual = [] if down.transposed else [(hidden, 2 * inner), (inner, hidden)]
        turned = {(2 * inner, hidden): "gate_up_proj", (hidden, inner): "down_proj"}
        return {} if self._is_ungated else {size: name for size, name in turned.items() if size not in usual}

    @property
    def _is_ungated(self) -> bool:
        """Whether up_proj is the only matrix into an expert."""
        return names.H_TO_4H in self.modules and not self.modules[names.H_TO_4H].gated

    def _check_count(self, where: str, count: int, module_id: int) -> None:
        module = self.modules.get(module_id)
        if module is not None and count != module.experts:
            raise AdapterInvalidError(f"{where} has {count} experts, this model has {module.experts}")

    def _of_one(self, module_id: int) -> LoraModule | None:
        """The module of a single expert; None: the model is not known or has no such module."""
        module = self.modules.get(module_id)
        if module is None:
            return None
        count = module.experts
        return replace(module, in_dim=module.in_dim // count, out_dim=module.out_dim // count)

    def _scaled(self, where: str, b: np.ndarray, scale: float) -> np.ndarray:
        if self.kind is None:
            return b * np.float32(scale)
        check_scale(where, scale)
        return b

    def _row(
        self,
        module_id: int,
        layer: int,
        a: np.ndarray,
        b: np.ndarray,
        scale: float,
        magnitude: np.ndarray | None = None,
    ) -> AdapterRow:
        row = RowFormat(a.shape[1], dora=magnitude is not None)
        payload = np.concatenate([part.ravel() for part in (a, b, magnitude) if part is not None])
        if self.kind is not None:
            row = replace(row, scale=float(np.float32(scale)), encoding=self.kind.encoding)
            payload = payload.view(self.kind.dtype)
        return AdapterRow(module_id, layer, row, payload)


def _both(where: str, matrices: Matrices) -> tuple[np.ndarray, np.ndarray]:
    for side in "AB":
        if side not in matrices:
            raise AdapterInvalidError(f"{where} is missing its lora_{side} matrix")
    return matrices["A"], matrices["B"]


def normalised_magnitude(
    path: str,
    stored: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    config: PeftConfig,
    base: BaseReader | None,
    transposed: bool = False,
) -> np.ndarray | None:
    """DoRA's magnitude [out], divided by the norms of the rows of base plus B A if it is not yet; None: the
    module at `path` has none. Raises AdapterInvalidError."""
    if stored is None:
        if config.use_dora:
            raise AdapterInvalidError(f"{path} is missing its DoRA magnitude")
        return None
    if stored.size != len(b):
        raise AdapterInvalidError(f"{path} has {len(b)} rows and a DoRA magnitude of {stored.size}")
    if config.dora_normalized:
        return stored.reshape(-1)
    if base is None:
        raise AdapterInvalidError(f"{path}: {DORA_REASON}")
    return stored.reshape(-1) / base.row_norms(path, a, b, transposed)


def check_order_known(key: str, base: str, modules: Mapping[int, LoraModule]) -> None:
    """base: what the trainer calls it. Raises AdapterInvalidError if rows of gate and up in one matrix may or
    may not be in turn."""
    if not modules and IN_TURN.search(base):
        raise AdapterInvalidError(
            f"{key}: in which order the rows of gate and up are depends on the base model, which "
            "is not known here: name its directory (--base)"
        )


def check_scale(where: str, scale: float) -> None:
    """The scaling of a row in an encoded type. Raises AdapterInvalidError if it is beyond float32's range."""
    if not abs(scale) < LARGEST_SCALE:
        raise AdapterInvalidError(f"{where}: its scaling {scale:g} is beyond float32's range")

"""Which rows of which checkpoint tensors make up each of the decoder's weights. No tensor is touched here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from manylora.config import ModelConfig
from manylora.model.families import FAMILIES
from manylora.model.families.family import Names

__all__ = ["Part", "Piece", "checkpoint_plan", "head_name"]


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of a checkpoint tensor, which has `total` of them."""

    source: str
    start: int
    rows: int
    total: int


@dataclass(frozen=True)
class Part:
    """One of our tensors: pieces stacked along rows. columns 0: a vector.

    is_matrix: `linear` reads it, so it is packed. transposed: the checkpoint has [in, out]. plus_one: the
    weight is 1 + the stored one, in float32, because bfloat16 would round small stored weights away.
    """

    pieces: tuple[Piece, ...]
    columns: int = 0
    is_matrix: bool = False
    transposed: bool = False
    plus_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(piece.rows for piece in self.pieces)
        return (rows, self.columns) if self.columns else (rows,)

    def stored_shape(self, piece: Piece) -> tuple[int, ...]:
        if not self.columns:
            return (piece.total,)
        return (self.columns, piece.total) if self.transposed else (piece.total, self.columns)


def checkpoint_plan(config: ModelConfig, stored: Collection[str]) -> dict[str, Part]:
    """Our names to parts, of a checkpoint that holds tensors of the names `stored`."""
    names = _names(config)
    root = names.root
    if names.root_optional and not any(name.startswith(root) for name in stored):
        root = ""
    hidden = config.hidden_size
    plan = {"embed": Part((_whole(f"{root}{names.embed}.weight", config.vocab_size),), hidden)}
    if config.learned_positions:
        table = _whole(f"{root}{names.positions}.weight", config.max_position_embeddings)
        plan["positions"] = Part((table,), hidden)
    plan |= _norm("norm", f"{root}{names.norm}", hidden, config)
    if not config.tie_word_embeddings:
        plan["head.weight"] = Part((_whole(f"{names.head}.weight", config.vocab_size),), hidden, True)
    if config.head_bias:
        plan["head.bias"] = Part((_whole(f"{names.head}.bias", config.vocab_size),))
    for layer in range(config.num_layers):
        source = f"{root}{names.layers}.{layer}."
        plan |= {f"{layer}.{name}": part for name, part in _layer(config, names, source).items()}
    return plan


def head_name(config: ModelConfig) -> str:
    return _names(config).head


def _names(config: ModelConfig) -> Names:
    return FAMILIES[config.architecture].names(config)


def _layer(config: ModelConfig, names: Names, source: str) -> dict[str, Part]:
    hidden = config.hidden_size
    out = (_whole(source + names.out, hidden),)
    parts = _linear("qkv", _qkv(config, names, source), hidden, config.attention_bias, config)
    parts |= _linear("out", out, config.q_size, config.attention_out_bias, config)
    for ours, theirs in names.block_norms.items():
        parts |= _norm(ours, source + theirs, hidden, config)
    if config.qk_norm:
        whole = config.qk_norm == "all"
        parts |= _norm("q_norm", source + names.q_norm, config.q_size if whole else config.head_dim, config)
        parts |= _norm("k_norm", source + names.k_norm, config.kv_size if whole else config.head_dim, config)
    return parts | _mlp(config, names, source)


def _mlp(config: ModelConfig, names: Names, source: str) -> dict[str, Part]:
    hidden, inner = config.hidden_size, config.intermediate_size
    if not config.gated_mlp:
        up: tuple[Piece, ...] = (_whole(source + names.up_gate[0], inner),)
    elif len(names.up_gate) == 1:  # the checkpoint's [gate; up] becomes our [up; gate]
        fused = source + names.up_gate[0]
        up = (Piece(fused, inner, inner, 2 * inner), Piece(fused, 0, inner, 2 * inner))
    else:
        up = tuple(_whole(source + name, inner) for name in names.up_gate)
    down = (_whole(source + names.down, hidden),)
    return _linear("up_gate", up, hidden, config.mlp_bias, config) | _linear(
        "down", down, inner, config.mlp_bias, config
    )


def _qkv(config: ModelConfig, names: Names, source: str) -> tuple[Piece, ...]:
    sizes = (config.q_size, config.kv_size, config.kv_size)
    if len(names.qkv) == 3:
        return tuple(_whole(source + name, size) for name, size in zip(names.qkv, sizes, strict=True))
    fused, groups, total = source + names.qkv[0], config.qkv_groups, sum(sizes)
    pieces, first = [], 0
    for size in sizes:
        rows = size // groups
        pieces += [Piece(fused, g * (total // groups) + first, rows, total) for g in range(groups)]
        first += rows
    return tuple(pieces)


def _linear(
    name: str, pieces: Iterable[Piece], columns: int, biased: bool, config: ModelConfig
) -> dict[str, Part]:
    """A weight and, if there is one, its bias, of pieces that name the layer."""
    weight = _suffixed(pieces, ".weight")
    parts = {f"{name}.weight": Part(weight, columns, True, config.transposed_weights)}
    if biased:
        parts[f"{name}.bias"] = Part(_suffixed(pieces, ".bias"))
    return parts


def _norm(name: str, source: str, size: int, config: ModelConfig) -> dict[str, Part]:
    weight = Part((_whole(f"{source}.weight", size),), plus_one=config.norm == "rms_plus_one")
    if config.norm != "layer":
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": Part((_whole(f"{source}.bias", size),))}


def _suffixed(pieces: Iterable[Piece], suffix: str) -> tuple[Piece, ...]:
    return tuple(Piece(piece.source + suffix, piece.start, piece.rows, piece.total) for piece in pieces)


def _whole(source: str, rows: int) -> Piece:
    return Piece(source, 0, rows, rows)

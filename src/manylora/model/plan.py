"""Which rows of which checkpoint tensors make up each of the model's weights. No tensor is touched here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from manylora.config.engine import ModelConfig
from manylora.model.families import FAMILIES
from manylora.model.families.family import Names

__all__ = ["Part", "Piece", "checkpoint_plan", "unused_names"]


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of a checkpoint tensor, which has `total` of them.

    expert, experts: of a tensor that stacks the matrices of so many experts, the rows of this one.
    """

    source: str
    start: int
    rows: int
    total: int
    expert: int = 0
    experts: int = 0


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
        if piece.experts:
            return (piece.experts, piece.total, self.columns)
        return (self.columns, piece.total) if self.transposed else (piece.total, self.columns)


def checkpoint_plan(config: ModelConfig, stored: Collection[str]) -> dict[str, Part]:
    """Our names to parts, of a checkpoint that holds tensors of the names `stored`."""
    names = _names(config)
    encoder = FAMILIES[config.architecture].encoder
    if encoder is not None:
        return _encoder_decoder(config, encoder(config), names, stored)
    root = _root(names, stored)
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
        parts = _layer(config, names, source)
        sparse = config.moe is not None and layer in config.moe.layers
        parts |= _sparse(config, names, source, stored) if sparse else _mlp(config, names, source)
        plan |= {f"{layer}.{name}": part for name, part in parts.items()}
    return plan


def unused_names(config: ModelConfig) -> tuple[str, ...]:
    """Starts of names that a checkpoint may hold and that nothing is read from."""
    names = _names(config)
    return (*names.unused, f"{names.head}.") if config.tie_word_embeddings else names.unused


def _encoder_decoder(
    config: ModelConfig, encoder: Names, decoder: Names, stored: Collection[str]
) -> dict[str, Part]:
    """Of both stacks of layers, the encoder's first; what belongs to a stack alone bears its name."""
    assert config.encoder is not None
    own, hidden, count = config.encoder, config.hidden_size, config.encoder.num_layers
    base = _root(encoder, stored).removesuffix(encoder.roots[-1])
    tables = [f"{base}shared.weight", *(f"{_root(n, stored)}{n.embed}.weight" for n in (encoder, decoder))]
    shared = next((name for name in tables if name in stored), tables[0])
    plan = {"embed": Part((_whole(shared, config.vocab_size),), hidden)}
    if f"{decoder.head}.weight" in stored:
        plan["head.weight"] = Part((_whole(f"{decoder.head}.weight", config.vocab_size),), hidden, True)
    if config.head_bias and "final_logits_bias" in stored:
        plan["head.bias"] = Part((_whole("final_logits_bias", 1),), config.vocab_size)
    layers = range(count), range(count, config.num_layers)
    for stack, names, numbers in zip(("encoder", "decoder"), (encoder, decoder), layers, strict=True):
        root = _root(names, stored)
        table = f"{root}{names.embed}.weight"
        if table in stored and table != shared:
            plan[f"{stack}.embed"] = Part((_whole(table, config.vocab_size),), hidden)
        if config.learned_positions:
            total = own.position_offset + config.max_position_embeddings
            piece = Piece(
                f"{root}{names.positions}.weight",
                own.position_offset,
                config.max_position_embeddings,
                total,
            )
            plan[f"{stack}.positions"] = Part((piece,), hidden)
        if own.relative_buckets:
            buckets = _whole(f"{root}{names.relative}.weight", own.relative_buckets)
            plan[f"{stack}.relative"] = Part((buckets,), config.num_heads)
        for ours, theirs in (("embedding_norm", names.embedding_norm), ("norm", names.norm)):
            plan |= _norm(f"{stack}.{ours}", root + theirs, hidden, config) if theirs else {}
        for number, layer in enumerate(numbers):
            source = f"{root}{names.layers}.{number}."
            parts = _layer(config, names, source) | _mlp(config, names, source)
            parts |= _cross(config, names, source) if names.cross else {}
            plan |= {f"{layer}.{name}": part for name, part in parts.items()}
    return plan


def _cross(config: ModelConfig, names: Names, source: str) -> dict[str, Part]:
    q, k, v, out = (source + name for name in names.cross)
    hidden, biased = config.hidden_size, config.attention_bias
    kv = (_whole(k, config.kv_size), _whole(v, config.kv_size))
    return {
        **_linear("cross_q", (_whole(q, config.q_size),), hidden, biased, config),
        **_linear("cross_kv", kv, hidden, biased, config),
        **_linear("cross_out", (_whole(out, hidden),), config.q_size, config.attention_out_bias, config),
    }


def _root(names: Names, stored: Collection[str]) -> str:
    """The first of the roots that the checkpoint has."""
    present = (root for root in names.roots if any(name.startswith(root) for name in stored))
    return next(present, names.roots[0])


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
    return parts


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


def _sparse(config: ModelConfig, names: Names, source: str, stored: Collection[str]) -> dict[str, Part]:
    """Experts by number, as they are released, or stacked in two tensors, as transformers holds them."""
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    inner, count = moe.intermediate_size, moe.num_experts
    stacked = f"{source}mlp.experts."
    is_stacked = f"{stacked}gate_up_proj" in stored
    block = source + ("mlp" if is_stacked else names.sparse)
    parts = {"router.weight": Part((_whole(f"{block}.gate.weight", count),), hidden, True)}
    for e in range(count):
        up_gate: tuple[Piece, ...]
        if is_stacked:
            fused = f"{stacked}gate_up_proj"
            up_gate = tuple(Piece(fused, start, inner, 2 * inner, e, count) for start in (inner, 0))
            down = Piece(f"{stacked}down_proj", 0, hidden, hidden, e, count)
        else:
            expert = f"{block}.experts.{e}."
            up_gate = tuple(_whole(f"{expert}{name}.weight", inner) for name in names.expert_up_gate)
            down = _whole(f"{expert}{names.expert_down}.weight", hidden)
        parts[f"expert.{e}.up_gate.weight"] = Part(up_gate, hidden, True)
        parts[f"expert.{e}.down.weight"] = Part((down,), inner, True)
    if moe.shared_intermediate_size:
        size, shared = moe.shared_intermediate_size, f"{block}.shared_expert."
        ups = tuple(_whole(f"{shared}{name}.weight", size) for name in names.expert_up_gate)
        parts["shared.up_gate.weight"] = Part(ups, hidden, True)
        parts["shared.down.weight"] = Part(
            (_whole(f"{shared}{names.expert_down}.weight", hidden),), size, True
        )
        parts["shared_gate.weight"] = Part((_whole(f"{block}.shared_expert_gate.weight", 1),), hidden, True)
    return parts


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

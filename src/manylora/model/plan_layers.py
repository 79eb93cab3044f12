"""Which rows of a checkpoint's tensors make up the weights of one layer, and the elements of such a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from manylora.config.blocks import (
    ConvConfig,
    DeltaConfig,
    LatentConfig,
    Mamba2Config,
)
from manylora.config.model import ModelConfig, MoeConfig
from manylora.model.families.family import TensorNames


@dataclass(frozen=True)
class RowSlice:
    """Rows [start, start + rows * step) of the checkpoint tensor `source`, which has `total` rows. experts >
    0: it stacks the matrices of this many experts; the rows are of number `expert`.
    """

    source: str
    start: int
    rows: int
    total: int
    expert: int = 0
    experts: int = 0
    step: int = 1

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.rows * self.step, self.step)


@dataclass(frozen=True)
class WeightSpec:
    """One of the model's tensors: slices of the checkpoint's, stacked. columns 0: a vector. all_columns: of
    which these begin at first_column; 0: no others. is_matrix: of a linear layer, so it is packed.
    transposed: stored as [in, out]. plus_one: add 1, in float32, as bfloat16 would round small weights away.
    wide: kept in float32. depthwise: stored as [N, 1, columns].
    """

    slices: tuple[RowSlice, ...]
    columns: int = 0
    is_matrix: bool = False
    transposed: bool = False
    plus_one: bool = False
    first_column: int = 0
    all_columns: int = 0
    wide: bool = False
    depthwise: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(piece.rows for piece in self.slices)
        return (rows, self.columns) if self.columns else (rows,)

    @property
    def column_range(self) -> range:
        return range(self.first_column, self.first_column + self.columns)

    def take_columns(self, columns: range) -> WeightSpec:
        """Some columns of a spec that has all of them."""
        return replace(self, columns=len(columns), first_column=columns.start, all_columns=self.columns)

    def take_rows(self, *runs: range) -> WeightSpec:
        """These rows of the fused tensor, one run after the other."""
        pieces = []
        for run in runs:
            first = 0
            for piece in self.slices:
                start, stop = max(run.start, first), min(run.stop, first + piece.rows)
                if start < stop:
                    at = piece.start + (start - first) * piece.step
                    pieces.append(replace(piece, start=at, rows=stop - start))
                first += piece.rows
        return replace(self, slices=tuple(pieces))

    def checkpoint_shape(self, piece: RowSlice) -> tuple[int, ...]:
        columns = self.all_columns or self.columns
        if not columns:
            return (piece.experts, piece.total) if piece.experts else (piece.total,)
        if self.depthwise:
            return (piece.total, 1, columns)
        shape = (columns, piece.total) if self.transposed else (piece.total, columns)
        return (piece.experts, *shape) if piece.experts else shape


Plan = dict[str, WeightSpec]
"""Our names of the model's weights, and their sources."""


def linear(name: str, pieces: Iterable[RowSlice], columns: int, biased: bool, config: ModelConfig) -> Plan:
    """A weight and, if there is one, its bias. pieces: slices whose source is the layer's name."""
    weight, bias = (
        tuple(replace(piece, source=piece.source + suffix) for piece in pieces)
        for suffix in (".weight", ".bias")
    )
    specs = {f"{name}.weight": WeightSpec(weight, columns, True, config.transposed_weights)}
    return specs | {f"{name}.bias": WeightSpec(bias)} if biased else specs


def norm(name: str, source: str, size: int, config: ModelConfig) -> Plan:
    exact = {"plus_one": config.norm.endswith("plus_one"), "wide": config.norm.endswith("wide")}
    weight = WeightSpec((whole(f"{source}.weight", size),), **exact)
    if config.norm.startswith("rms") or not config.norm_bias:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": WeightSpec((whole(f"{source}.bias", size),))}


def matrix(source: str, rows: int, columns: int) -> WeightSpec:
    return WeightSpec((whole(source, rows),), columns, is_matrix=True)


def whole(source: str, rows: int) -> RowSlice:
    return RowSlice(source, 0, rows, rows)


# Names of the tensors of all experts of a layer, in transformers and in Granite's released files.
STACKS = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("experts.up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)

# In layers with attention and a recurrent layer: names that both have, and the prefix for the latter.
RECURRENT, BOTH = "recurrent_", ("out.weight", "out.bias")


def layer_plan(
    config: ModelConfig, names: TensorNames, source: str, recurrent: bool = False, reads_kv: bool = False
) -> Plan:
    if recurrent:
        specs = _recurrent(config, names, source)
    else:
        specs = _attention(config, names, source)
        if reads_kv:  # it has only queries
            specs = {name: spec for name, spec in specs.items() if not name.startswith(("qkv", "k_norm"))}
            q = (whole(source + names.qkv[0], config.q_size),)
            specs |= linear("q", q, config.hidden_size, config.attention_bias, config)
    for ours, theirs in names.block_norms.items():
        specs |= norm(ours, source + theirs, config.hidden_size, config)
    hidden, own, inputs = config.hidden_size, config.altup, config.layer_inputs
    if own is not None:
        altup, laurel, count = f"{source}altup.", f"{source}laurel.", own.streams
        specs |= {
            "altup_router.weight": matrix(f"{altup}modality_router.weight", count, hidden),
            "altup_predict.weight": matrix(f"{altup}prediction_coefs.weight", count**2, count),
            "altup_correct.weight": matrix(f"{altup}correction_coefs.weight", count, count),
            "laurel_left.weight": matrix(f"{laurel}linear_left.weight", own.laurel_rank, hidden),
            "laurel_right.weight": matrix(f"{laurel}linear_right.weight", hidden, own.laurel_rank),
            **norm("altup_norm", f"{altup}router_norm", hidden, config),
            **norm("laurel_norm", f"{laurel}post_laurel_norm", hidden, config),
            "altup_scale": WeightSpec((whole(f"{altup}correct_output_scale", hidden),)),
        }
    if names.scalar:
        specs["scalar"] = WeightSpec((whole(source + names.scalar, 1),))
    if inputs is not None:
        specs |= {
            "input_gate.weight": matrix(f"{source}per_layer_input_gate.weight", inputs.dim, hidden),
            "input_project.weight": matrix(f"{source}per_layer_projection.weight", hidden, inputs.dim),
            **norm("input_norm", f"{source}post_per_layer_input_norm", hidden, config),
        }
    return specs


def mixer_plan(config: ModelConfig, names: TensorNames, source: str, layer: int) -> Plan:
    """All weights of a decoder layer except its MLP."""
    if layer in config.unmixed_layers:
        return norm("mlp_norm", source + names.block_norms["mlp_norm"], config.hidden_size, config)
    if layer in config.mlpless_layers:
        names = replace(names, block_norms={"attention_norm": names.block_norms["attention_norm"]})
    specs = layer_plan(config, names, source, layer in config.recurrent_layers, layer in config.kv_readers)
    if config.beside is None:
        return specs
    both = {f"{RECURRENT}{name}" if name in BOTH else name: spec for name, spec in specs.items()}
    return both | _attention(config, names, source)


def _attention(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    hidden, latent = config.hidden_size, config.latent
    out = (whole(source + names.out, hidden),)
    if latent is None:
        sizes = (config.q_rows, config.kv_size, config.kv_size)
        pieces = _grouped(source + names.qkv[0], sizes, config.qkv_groups)
        if len(names.qkv) == 3:
            pieces = tuple(whole(source + name, size) for name, size in zip(names.qkv, sizes, strict=True))
            pieces = pieces[:2] if config.keys_are_values else pieces
        specs = linear("qkv", pieces, hidden, config.attention_bias, config)
    else:
        specs = _latent(config, latent, names, source)
    attended = config.q_size if latent is None else config.num_heads * latent.value_dim
    specs |= linear("out", out, attended, config.attention_out_bias, config)
    if config.attention_sinks:
        specs["sinks"] = WeightSpec((whole(source + names.sinks, config.num_heads),))
    if config.qk_norm not in ("", "plain"):
        specs |= _qk_norm("q_norm", source + names.q_norm, config.num_heads, config)
        specs |= _qk_norm("k_norm", source + names.k_norm, config.num_kv_heads, config)
    return specs


def _latent(config: ModelConfig, latent: LatentConfig, names: TensorNames, source: str) -> Plan:
    q_up, kv_up = (source + name for name in names.latent)
    hidden, q_size = config.hidden_size, config.num_heads * latent.query_dim
    first = latent.q_rank or q_size
    rows = zip(names.qkv, (first, latent.kv_rank + latent.rope_dim), strict=True)
    pieces = tuple(whole(source + name, size) for name, size in rows)
    specs = linear("qkv", pieces, hidden, config.attention_bias, config)
    specs |= norm("k_norm", source + names.k_norm, latent.kv_rank, config)
    if latent.q_rank:
        specs |= norm("q_norm", source + names.q_norm, latent.q_rank, config)
        specs["q_b.weight"] = matrix(f"{q_up}.weight", q_size, latent.q_rank)
    values = config.num_heads * (latent.plain_dim + latent.value_dim)
    return specs | {"kv_b.weight": WeightSpec((whole(f"{kv_up}.weight", values),), latent.kv_rank)}


def _recurrent(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    own, hidden = config.recurrent, config.hidden_size
    block = f"{source}{names.recurrent}."
    matrices = [block + name for name in names.recurrent_in]
    out = (whole(block + names.recurrent_out, hidden),)

    def taps(name: str, channels: int, count: int) -> WeightSpec:
        return WeightSpec((whole(f"{block}{name}.weight", channels),), count, wide=True, depthwise=True)

    def vectors(rows: int, **named: str) -> Plan:
        return {ours: WeightSpec((whole(block + theirs, rows),), wide=True) for ours, theirs in named.items()}

    if isinstance(own, ConvConfig):
        return {
            **linear("in", (whole(matrices[0], 3 * own.channels),), hidden, False, config),
            **linear("out", out, own.channels, False, config),
            "taps": taps("conv", own.channels, own.taps),
        }
    if isinstance(own, Mamba2Config):
        specs = {
            **linear("in", (whole(matrices[0], own.in_size),), hidden, own.biased, config),
            **linear("out", out, own.value_size, own.out_biased, config),
            "taps": taps("conv1d", own.channels, own.taps),
            **vectors(own.heads, decay="A_log", shift="dt_bias", skip="D"),
        }
        if own.conv_bias:
            specs |= vectors(own.channels, taps_bias="conv1d.bias")
        return specs | (vectors(own.value_size, **{"inner_norm.weight": "norm.weight"}) if own.normed else {})
    assert isinstance(own, DeltaConfig)
    qkvz, ba = (own.key_size, own.key_size, own.value_size, own.value_size), (own.value_heads,) * 2
    if len(matrices) == 2:
        wide, narrow = _grouped(matrices[0], qkvz, own.key_heads), _grouped(matrices[1], ba, own.key_heads)
    else:
        qkv, z, b, a = matrices
        wide = (whole(qkv, own.channels), whole(z, own.value_size))
        narrow = (whole(b, own.value_heads), whole(a, own.value_heads))
    return {
        **linear("in", wide, hidden, False, config),
        **linear("gates", narrow, hidden, False, config),
        **linear("out", out, own.value_size, False, config),
        "taps": taps("conv1d", own.channels, own.taps),
        **vectors(own.value_dim, **{"norm.weight": "norm.weight"}),
        **vectors(own.value_heads, decay="A_log", shift="dt_bias"),
    }


def _qk_norm(name: str, source: str, heads: int, config: ModelConfig) -> Plan:
    dim = config.head_dim
    if config.qk_norm != "each":
        return norm(name, source, heads * dim if config.qk_norm == "all" else dim, config)
    if "{}" not in source:
        return {f"{name}.weight": WeightSpec((whole(f"{source}.weight", heads),), dim)}
    weights = tuple(whole(f"{source.format(head)}.weight", dim) for head in range(heads))
    return {f"{name}.weight": WeightSpec(weights)}


def mlp_plan(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    hidden, inner = config.hidden_size, config.intermediate_size
    if not config.gated_mlp:
        up: tuple[RowSlice, ...] = (whole(source + names.up_gate[0], inner),)
    elif len(names.up_gate) == 1:  # the checkpoint's [gate; up] becomes our [up; gate]
        fused = source + names.up_gate[0]
        up = (RowSlice(fused, inner, inner, 2 * inner), RowSlice(fused, 0, inner, 2 * inner))
    else:
        up = tuple(whole(source + name, inner) for name in names.up_gate)
    down = (whole(source + names.down, hidden),)
    specs = linear("up_gate", up, hidden, config.mlp_bias, config)
    return specs | linear("down", down, inner, config.mlp_bias, config)


def sparse_plan(config: ModelConfig, names: TensorNames, source: str, stored: Collection[str]) -> Plan:
    """Experts one by one, or stacked in two tensors, as in transformers."""
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    inner, count, seen = moe.intermediate_size, moe.num_experts, moe.latent_size or hidden
    own = source + names.sparse if names.sparse else source.removesuffix(".")
    both = [(one, *pair) for one in (f"{source}mlp", own) for pair in STACKS]
    block, *stacks = next((one for one in both if f"{one[0]}.{one[1]}" in stored), (own,))
    routers = [f"{block}.{name}.weight" for name in names.routers]
    router = next((name for name in routers if name in stored), routers[0])
    specs = {"router.weight": matrix(router, count, hidden)}
    if moe.routing.wide:
        specs = {"router.weight": WeightSpec((whole(router, count),), hidden, wide=True)}
    if moe.routing.corrected:
        known = [f"{block}.{name}" for name in names.corrections]
        found = next((name for name in known if name in stored), known[0])
        one = "moe_statics." in found  # stored as a matrix with one row
        rows = WeightSpec((whole(found, 1),), count, wide=True)
        specs["router.correction"] = rows if one else WeightSpec((whole(found, count),), wide=True)
    if moe.beside_mlp:
        scales = f"{block}.router.scale", f"{block}.router.per_expert_scale"
        specs["router.norm.weight"] = WeightSpec((whole(scales[0], hidden),), wide=True)
        specs["router.scales"] = WeightSpec((whole(scales[1], count),), wide=True)
    if moe.biased:
        specs["router.bias"] = WeightSpec((whole(router.removesuffix("weight") + "bias", count),))
    # Or all experts in one tensor, [in, out], with gate and up alternating.
    mixed = moe.interleaved and f"{block}.experts.0.down_proj.bias" not in stored
    for e in range(count):
        up_gate: tuple[RowSlice, ...]
        if mixed:
            fused = f"{block}.experts.gate_up_proj"
            up_gate = tuple(RowSlice(fused, start, inner, 2 * inner, e, count, 2) for start in (1, 0))
            down = RowSlice(f"{block}.experts.down_proj", 0, hidden, hidden, e, count)
        elif stacks:
            fused, lower = (f"{block}.{name}" for name in stacks)
            up_gate = tuple(RowSlice(fused, start, inner, 2 * inner, e, count) for start in (inner, 0))
            if not moe.gated:
                up_gate = (RowSlice(fused, 0, inner, inner, e, count),)
            down = RowSlice(lower, 0, seen, seen, e, count)
        else:
            expert = f"{block}.experts.{e}."
            parts = names.expert_up_gate if moe.gated else names.expert_up_gate[:1]
            up_gate = tuple(whole(f"{expert}{name}.weight", inner) for name in parts)
            down = whole(f"{expert}{names.expert_down}.weight", seen)
        turned = mixed or (moe.transposed and bool(stacks))
        for name, pieces, columns in (("up_gate", up_gate, seen), ("down", (down,), inner)):
            specs[f"expert.{e}.{name}.weight"] = WeightSpec(pieces, columns, True, turned)
            if moe.biased:
                biases = (p.source + "_bias" if mixed else p.source[:-6] + "bias" for p in pieces)
                slices = (replace(p, source=bias) for p, bias in zip(pieces, biases, strict=True))
                specs[f"expert.{e}.{name}.bias"] = WeightSpec(tuple(slices))
    if moe.latent_size:
        specs["latent_in.weight"] = matrix(f"{block}.fc1_latent_proj.weight", seen, hidden)
        specs["latent_out.weight"] = matrix(f"{block}.fc2_latent_proj.weight", hidden, seen)
    if moe.shared_intermediate_size:
        specs |= _shared(moe, hidden, names, source, block)
    return specs


def _shared(moe: MoeConfig, hidden: int, names: TensorNames, source: str, block: str) -> Plan:
    size = moe.shared_intermediate_size
    if names.shared:
        fused, down = (f"{source}{name}.weight" for name in names.shared)
        ups = tuple(RowSlice(fused, start, size, 2 * size) for start in (size, 0))
    else:
        shared = f"{block}.{names.shared_block}."
        parts = names.expert_up_gate if moe.gated else names.expert_up_gate[:1]
        ups = tuple(whole(f"{shared}{name}.weight", size) for name in parts)
        down = f"{shared}{names.expert_down}.weight"
    specs = {"shared.up_gate.weight": WeightSpec(ups, hidden, True)}
    specs["shared.down.weight"] = matrix(down, hidden, size)
    if moe.shared_gated:
        specs["shared_gate.weight"] = matrix(f"{block}.shared_expert_gate.weight", 1, hidden)
    return specs


def _grouped(fused: str, sizes: tuple[int, ...], groups: int) -> tuple[RowSlice, ...]:
    total = sum(sizes)
    pieces, first = [], 0
    for size in sizes:
        rows = size // groups
        pieces += [RowSlice(fused, g * (total // groups) + first, rows, total) for g in range(groups)]
        first += rows
    return tuple(pieces)


def cross_plan(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    q, k, v, out = (source + name for name in names.cross)
    hidden, biased = config.hidden_size, config.attention_bias
    kv = (whole(k, config.kv_size), whole(v, config.kv_size))
    return {
        **linear("cross_q", (whole(q, config.q_size),), hidden, biased, config),
        **linear("cross_kv", kv, hidden, biased, config),
        **linear("cross_out", (whole(out, hidden),), config.q_size, config.attention_out_bias, config),
    }

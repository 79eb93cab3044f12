"""Which rows of which checkpoint tensors make up each of the model's weights. Reads names, not tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from manylora.config.blocks import (
    AltUpConfig,
    ConvConfig,
    DeltaConfig,
    LatentConfig,
    LayerInputsConfig,
    Mamba2Config,
)
from manylora.config.engine import ModelConfig, MoeConfig
from manylora.model.families import FAMILIES
from manylora.model.families.family import TensorNames


@dataclass(frozen=True)
class RowSlice:
    """Rows [start, start + rows) of the checkpoint tensor `source`, which has `total` rows.

    experts > 0: the tensor stacks the matrices of that many experts; the rows are of number `expert`.
    step: from one of the rows to the next.
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
    """One of the model's tensors: slices of the checkpoint's, one below the other. columns 0: a vector.

    first_column, all_columns: where the columns begin in the checkpoint, and how many there are; 0: no more.
    is_matrix: of a linear layer, so it is packed. transposed: the checkpoint has it as [in, out]. plus_one: 1
    is added after loading, in float32, because bfloat16 would round small stored weights away. wide: kept in
    float32, as the arithmetic is that reads it. depthwise: the checkpoint has [N, 1, columns].
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

    def with_all_columns(self) -> WeightSpec:
        return replace(self, columns=self.all_columns or self.columns, first_column=0, all_columns=0)

    def take_columns(self, columns: range) -> WeightSpec:
        """Some columns, of a spec that has all."""
        return replace(self, columns=len(columns), first_column=columns.start, all_columns=self.columns)

    def take_rows(self, *runs: range) -> WeightSpec:
        """These rows of the fused tensor, one run below the other."""
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


# Names of the tensors of all experts of a layer: as transformers has them, and as Granite was released.
STACKS = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("experts.up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)

CLASSIFIERS = ("score", "classifier")

# Of layers with attention and a recurrent layer, the latter's matrices whose names both have.
RECURRENT, BOTH = "recurrent_", ("out.weight", "out.bias")

Plan = dict[str, WeightSpec]
"""Our names of the model's weights, and where they come from."""


def checkpoint_plan(config: ModelConfig, stored: Collection[str]) -> Plan:
    """Our names to specs. stored: the names of the checkpoint's tensors, as some layouts differ in these."""
    names = FAMILIES[config.architecture].names(config)
    encoder = FAMILIES[config.architecture].encoder
    if encoder is not None:
        return _encoder_decoder(config, encoder(config), names, stored)
    root = _root(names, stored)
    hidden, width = config.hidden_size, config.projected_size or config.hidden_size
    plan = {"embed": WeightSpec((_whole(f"{root}{names.embed}.weight", config.vocab_size),), width)}
    if config.projected_size:
        plan["0.project_in.weight"] = _matrix(f"{root}project_in.weight", hidden, width)
        plan["0.project_out.weight"] = _matrix(f"{root}project_out.weight", width, hidden)
    if config.learned_positions:
        plan["positions"] = _positions(f"{root}{names.positions}.weight", config)
    if config.bidirectional:
        plan |= _around_encoder(config, names, root, stored)
    if names.norm:
        plan |= _norm("norm", f"{root}{names.norm}", hidden, config)
    if not config.tie_word_embeddings:
        plan["head.weight"] = _matrix(f"{head_name(config, stored)}.weight", config.vocab_size, width)
    if config.score_tokens is not None:
        table = plan.get("head.weight", plan["embed"]).slices[0]
        for name, token in zip(("score.against", "score.for"), config.score_tokens, strict=True):
            plan[name] = WeightSpec((replace(table, start=token, rows=1),), hidden)
    elif config.num_labels:
        plan |= _classifier(config, stored)
    if config.head_bias:
        plan["head.bias"] = WeightSpec((_whole(f"{names.head}.bias", config.vocab_size),))
    if config.layer_inputs is not None:
        plan |= _layer_inputs(config, config.layer_inputs, root)
    if config.altup is not None:
        ends = {"enter": f"{root}altup_projections", "leave": f"{root}altup_unembed_projections"}
        for ours, theirs in ends.items():
            for n in range(config.altup.streams - 1):
                plan[f"altup.{ours}.{n}.weight"] = _matrix(f"{theirs}.{n}.weight", hidden, hidden)
    for layer in range(config.num_layers):
        source = f"{root}{names.layers}.{layer}."
        own = config.of_layer(layer)
        specs = _mixer(own, names, source, layer)
        if layer == 0 and not config.first_norm:
            specs = {name: spec for name, spec in specs.items() if not name.startswith("attention_norm.")}
        if config.moe is not None and layer in config.moe.layers:
            specs |= _sparse(own, names, source, stored)
        if layer in config.mlp_layers:
            specs |= _mlp(own, names, source)
        plan |= {f"{layer}.{name}": spec for name, spec in specs.items()}
    return plan


def _around_encoder(config: ModelConfig, names: TensorNames, root: str, stored: Collection[str]) -> Plan:
    hidden, table = config.hidden_size, f"{root}embeddings.token_type_embeddings.weight"
    plan: Plan = {}
    if names.embedding_norm:
        plan |= _norm("embedding_norm", root + names.embedding_norm, hidden, config)
    if config.token_types:
        plan["token_types"] = WeightSpec((_whole(table, config.token_types),), hidden)
    layer = next(
        (r + names.head_layer for r in (root, "") if f"{r}{names.head_layer}.weight" in stored), None
    )
    if config.head_layer is not None and layer is not None:
        plan |= _plain("head_layer", layer, hidden, hidden, config.head_layer.biased)
        if config.head_layer.norm:
            plan |= _norm("head_layer.norm", names.head_norm, hidden, config)
    return plan


def _plain(name: str, source: str, rows: int, columns: int, biased: bool = True) -> Plan:
    """A layer that is not packed."""
    plan = {f"{name}.weight": WeightSpec((_whole(f"{source}.weight", rows),), columns)}
    return plan | ({f"{name}.bias": WeightSpec((_whole(f"{source}.bias", rows),))} if biased else {})


def _classifier(config: ModelConfig, stored: Collection[str]) -> Plan:
    """The classification head: a single layer, or the two of RoBERTa."""
    hidden = config.hidden_size
    if "classifier.out_proj.weight" in stored:
        dense = _plain("score.dense", "classifier.dense", hidden, hidden)
        return dense | _plain("score", "classifier.out_proj", config.num_labels, hidden)
    name = next((one for one in CLASSIFIERS if f"{one}.weight" in stored), CLASSIFIERS[0])
    plan = {"score.weight": WeightSpec((_whole(f"{name}.weight", config.num_labels),), hidden)}
    if f"{name}.bias" in stored:
        plan["score.bias"] = WeightSpec((_whole(f"{name}.bias", config.num_labels),))
    return plan


def unused_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of tensors that a checkpoint may have and that are not loaded."""
    names = FAMILIES[config.architecture].names(config)
    heads = (f"{names.head}.", "lm_head.") if config.tie_word_embeddings else ()
    return (*names.unused, *heads, *_unused_kv(config, names))


def _unused_kv(config: ModelConfig, names: TensorNames) -> list[str]:
    """What released checkpoints have of the keys and values of layers that read another layer's."""
    parts = (*names.qkv[1:], names.k_norm, names.k_norm.replace("k_norm", "v_norm"))
    layers = [f"{root}{names.layers}.{layer}." for root in ("", *names.roots) for layer in config.kv_readers]
    return [f"{layer}{part}." for layer in layers for part in parts]


def head_name(config: ModelConfig, stored: Collection[str]) -> str:
    """Of the head's tensors in this checkpoint: transformers 5 keeps that of a text tower outside of it."""
    named = FAMILIES[config.architecture].names(config).head
    return "lm_head" if f"{named}.weight" not in stored and "lm_head.weight" in stored else named


def _encoder_decoder(
    config: ModelConfig, encoder: TensorNames, decoder: TensorNames, stored: Collection[str]
) -> Plan:
    """Layers are numbered through both stacks, the encoder's first. What belongs to one stack has its name as
    prefix."""
    assert config.encoder is not None
    hidden, count = config.hidden_size, config.encoder.num_layers
    base = _root(encoder, stored).removesuffix(encoder.roots[-1])
    tables = [f"{base}shared.weight", *(f"{_root(n, stored)}{n.embed}.weight" for n in (encoder, decoder))]
    shared = next((name for name in tables if name in stored), tables[0])
    plan = {"embed": WeightSpec((_whole(shared, config.vocab_size),), hidden)}
    if f"{decoder.head}.weight" in stored:
        plan["head.weight"] = _matrix(f"{decoder.head}.weight", config.vocab_size, hidden)
    if config.head_bias and "final_logits_bias" in stored:
        plan["head.bias"] = WeightSpec((_whole("final_logits_bias", 1),), config.vocab_size)
    layers = range(count), range(count, config.num_layers)
    for stack, names, numbers in zip(("encoder", "decoder"), (encoder, decoder), layers, strict=True):
        root = _root(names, stored)
        table = f"{root}{names.embed}.weight"
        if table in stored and table != shared:
            plan[f"{stack}.embed"] = WeightSpec((_whole(table, config.vocab_size),), hidden)
        plan |= {f"{stack}.{name}": spec for name, spec in _around_layers(config, names, root).items()}
        for number, layer in enumerate(numbers):
            source = f"{root}{names.layers}.{number}."
            specs = _layer(config, names, source) | _mlp(config, names, source)
            specs |= _cross(config, names, source) if names.cross else {}
            plan |= {f"{layer}.{name}": spec for name, spec in specs.items()}
    return plan


def _around_layers(config: ModelConfig, names: TensorNames, root: str) -> Plan:
    """Positions and norms of an encoder or a decoder outside its layers."""
    own, hidden, specs = config.encoder, config.hidden_size, {}
    assert own is not None
    if config.learned_positions:
        specs["positions"] = _positions(f"{root}{names.positions}.weight", config)
    if own.relative_buckets:
        buckets = _whole(f"{root}{names.relative}.weight", own.relative_buckets)
        specs["relative"] = WeightSpec((buckets,), config.num_heads)
    for ours, theirs in (("embedding_norm", names.embedding_norm), ("norm", names.norm)):
        specs |= _norm(ours, root + theirs, hidden, config) if theirs else {}
    return specs


def _positions(source: str, config: ModelConfig) -> WeightSpec:
    first = config.position_offset
    count = config.max_position_embeddings + (config.padding_id is not None)
    return WeightSpec((RowSlice(source, first, count, first + count),), config.hidden_size)


def _cross(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    q, k, v, out = (source + name for name in names.cross)
    hidden, biased = config.hidden_size, config.attention_bias
    kv = (_whole(k, config.kv_size), _whole(v, config.kv_size))
    return {
        **_linear("cross_q", (_whole(q, config.q_size),), hidden, biased, config),
        **_linear("cross_kv", kv, hidden, biased, config),
        **_linear("cross_out", (_whole(out, hidden),), config.q_size, config.attention_out_bias, config),
    }


def _root(names: TensorNames, stored: Collection[str]) -> str:
    """The root of the embedding, else the first that occurs in the checkpoint; none, where a bare model was
    saved."""
    for root in ("", *names.roots):
        if f"{root}{names.embed}.weight" in stored:
            return root
    present = (root for root in names.roots if any(name.startswith(root) for name in stored))
    return next(present, names.roots[0])


def _layer(
    config: ModelConfig, names: TensorNames, source: str, recurrent: bool = False, reads_kv: bool = False
) -> Plan:
    if recurrent:
        specs = _recurrent(config, names, source)
    else:
        specs = _attention(config, names, source)
        if reads_kv:  # it has queries alone
            specs = {name: spec for name, spec in specs.items() if not name.startswith(("qkv", "k_norm"))}
            q = (_whole(source + names.qkv[0], config.q_size),)
            specs |= _linear("q", q, config.hidden_size, config.attention_bias, config)
    for ours, theirs in names.block_norms.items():
        specs |= _norm(ours, source + theirs, config.hidden_size, config)
    if config.altup is not None:
        specs |= _altup(config, config.altup, source)
    if names.scalar:
        specs["scalar"] = WeightSpec((_whole(source + names.scalar, 1),))
    return specs if config.layer_inputs is None else specs | _layer_input(config, config.layer_inputs, source)


def _altup(config: ModelConfig, own: AltUpConfig, source: str) -> Plan:
    hidden, count = config.hidden_size, own.streams
    altup, laurel = f"{source}altup.", f"{source}laurel."
    return {
        "altup_router.weight": _matrix(f"{altup}modality_router.weight", count, hidden),
        "altup_predict.weight": _matrix(f"{altup}prediction_coefs.weight", count**2, count),
        "altup_correct.weight": _matrix(f"{altup}correction_coefs.weight", count, count),
        "laurel_left.weight": _matrix(f"{laurel}linear_left.weight", own.laurel_rank, hidden),
        "laurel_right.weight": _matrix(f"{laurel}linear_right.weight", hidden, own.laurel_rank),
        **_norm("altup_norm", f"{altup}router_norm", hidden, config),
        **_norm("laurel_norm", f"{laurel}post_laurel_norm", hidden, config),
        "altup_scale": WeightSpec((_whole(f"{altup}correct_output_scale", hidden),)),
    }


def _layer_inputs(config: ModelConfig, own: LayerInputsConfig, root: str) -> Plan:
    size = config.num_layers * own.dim
    table = _whole(f"{root}embed_tokens_per_layer.weight", own.vocab_size)
    project = _matrix(f"{root}per_layer_model_projection.weight", size, config.hidden_size)
    specs = {"layer_inputs.embed": WeightSpec((table,), size), "layer_inputs.project.weight": project}
    return specs | _norm("layer_inputs.norm", f"{root}per_layer_projection_norm", own.dim, config)


def _layer_input(config: ModelConfig, own: LayerInputsConfig, source: str) -> Plan:
    hidden = config.hidden_size
    return {
        "input_gate.weight": _matrix(f"{source}per_layer_input_gate.weight", own.dim, hidden),
        "input_project.weight": _matrix(f"{source}per_layer_projection.weight", hidden, own.dim),
        **_norm("input_norm", f"{source}post_per_layer_input_norm", hidden, config),
    }


def _mixer(config: ModelConfig, names: TensorNames, source: str, layer: int) -> Plan:
    """Of a decoder's layer all but its MLP."""
    if layer in config.unmixed_layers:
        return _norm("mlp_norm", source + names.block_norms["mlp_norm"], config.hidden_size, config)
    if layer in config.mlpless_layers:
        names = replace(names, block_norms={"attention_norm": names.block_norms["attention_norm"]})
    specs = _layer(config, names, source, layer in config.recurrent_layers, layer in config.kv_readers)
    if config.beside is None:
        return specs
    both = {f"{RECURRENT}{name}" if name in BOTH else name: spec for name, spec in specs.items()}
    return both | _attention(config, names, source)


def _attention(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    hidden, latent = config.hidden_size, config.latent
    out = (_whole(source + names.out, hidden),)
    if latent is None:
        specs = _linear("qkv", _qkv(config, names, source), hidden, config.attention_bias, config)
    else:
        specs = _latent(config, latent, names, source)
    attended = config.q_size if latent is None else config.num_heads * latent.value_dim
    specs |= _linear("out", out, attended, config.attention_out_bias, config)
    if config.attention_sinks:
        specs["sinks"] = WeightSpec((_whole(source + names.sinks, config.num_heads),))
    if config.qk_norm not in ("", "plain"):
        specs |= _qk_norm("q_norm", source + names.q_norm, config.num_heads, config)
        specs |= _qk_norm("k_norm", source + names.k_norm, config.num_kv_heads, config)
    return specs


def _latent(config: ModelConfig, latent: LatentConfig, names: TensorNames, source: str) -> Plan:
    q_up, kv_up = (source + name for name in names.latent)
    hidden, q_size = config.hidden_size, config.num_heads * latent.query_dim
    first = latent.q_rank or q_size
    rows = zip(names.qkv, (first, latent.kv_rank + latent.rope_dim), strict=True)
    pieces = tuple(_whole(source + name, size) for name, size in rows)
    specs = _linear("qkv", pieces, hidden, config.attention_bias, config)
    specs |= _norm("k_norm", source + names.k_norm, latent.kv_rank, config)
    if latent.q_rank:
        specs |= _norm("q_norm", source + names.q_norm, latent.q_rank, config)
        specs["q_b.weight"] = _matrix(f"{q_up}.weight", q_size, latent.q_rank)
    values = config.num_heads * (latent.plain_dim + latent.value_dim)
    return specs | {"kv_b.weight": WeightSpec((_whole(f"{kv_up}.weight", values),), latent.kv_rank)}


def _recurrent(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    own, hidden = config.recurrent, config.hidden_size
    block = f"{source}{names.recurrent}."
    if isinstance(own, ConvConfig):
        return _short_conv(own, names, block, config)
    if isinstance(own, Mamba2Config):
        return _mamba2(own, names, block, config)
    assert isinstance(own, DeltaConfig)
    matrices = [block + name for name in names.recurrent_in]
    qkvz, ba = (own.key_size, own.key_size, own.value_size, own.value_size), (own.value_heads,) * 2
    if len(matrices) == 2:
        wide, narrow = _grouped(matrices[0], qkvz, own.key_heads), _grouped(matrices[1], ba, own.key_heads)
    else:
        qkv, z, b, a = matrices
        wide = (_whole(qkv, own.channels), _whole(z, own.value_size))
        narrow = (_whole(b, own.value_heads), _whole(a, own.value_heads))
    out = (_whole(block + names.recurrent_out, hidden),)
    taps = _taps(f"{block}conv1d.weight", own.channels, own.taps)
    vectors = {"decay": "A_log", "shift": "dt_bias"}
    return {
        **_linear("in", wide, hidden, False, config),
        **_linear("gates", narrow, hidden, False, config),
        **_linear("out", out, own.value_size, False, config),
        "taps": taps,
        "norm.weight": WeightSpec((_whole(f"{block}norm.weight", own.value_dim),), wide=True),
        **{
            name: WeightSpec((_whole(block + theirs, own.value_heads),), wide=True)
            for name, theirs in vectors.items()
        },
    }


def _mamba2(own: Mamba2Config, names: TensorNames, block: str, config: ModelConfig) -> Plan:
    inside, out = (_whole(block + names.recurrent_in[0], own.in_size),), block + names.recurrent_out
    vectors = {name: WeightSpec((_whole(block + theirs, own.heads),), wide=True)
               for name, theirs in (("decay", "A_log"), ("shift", "dt_bias"), ("skip", "D"))}  # fmt: skip
    if own.conv_bias:
        vectors["taps_bias"] = WeightSpec((_whole(f"{block}conv1d.bias", own.channels),), wide=True)
    if own.normed:
        vectors["inner_norm.weight"] = WeightSpec((_whole(f"{block}norm.weight", own.value_size),), wide=True)
    return {
        **_linear("in", inside, config.hidden_size, own.biased, config),
        **_linear("out", (_whole(out, config.hidden_size),), own.value_size, own.out_biased, config),
        "taps": _taps(f"{block}conv1d.weight", own.channels, own.taps),
        **vectors,
    }


def _short_conv(own: ConvConfig, names: TensorNames, block: str, config: ModelConfig) -> Plan:
    inside, out = (_whole(block + names.recurrent_in[0], 3 * own.channels),), block + names.recurrent_out
    return {
        **_linear("in", inside, config.hidden_size, False, config),
        **_linear("out", (_whole(out, config.hidden_size),), own.channels, False, config),
        "taps": _taps(f"{block}conv.weight", own.channels, own.taps),
    }


def _taps(source: str, channels: int, taps: int) -> WeightSpec:
    return WeightSpec((_whole(source, channels),), taps, wide=True, depthwise=True)


def _qk_norm(name: str, source: str, heads: int, config: ModelConfig) -> Plan:
    dim = config.head_dim
    if config.qk_norm != "each":
        return _norm(name, source, heads * dim if config.qk_norm == "all" else dim, config)
    if "{}" not in source:
        return {f"{name}.weight": WeightSpec((_whole(f"{source}.weight", heads),), dim)}
    weights = tuple(_whole(f"{source.format(head)}.weight", dim) for head in range(heads))
    return {f"{name}.weight": WeightSpec(weights)}


def _mlp(config: ModelConfig, names: TensorNames, source: str) -> Plan:
    hidden, inner = config.hidden_size, config.intermediate_size
    if not config.gated_mlp:
        up: tuple[RowSlice, ...] = (_whole(source + names.up_gate[0], inner),)
    elif len(names.up_gate) == 1:  # the checkpoint's [gate; up] becomes our [up; gate]
        fused = source + names.up_gate[0]
        up = (RowSlice(fused, inner, inner, 2 * inner), RowSlice(fused, 0, inner, 2 * inner))
    else:
        up = tuple(_whole(source + name, inner) for name in names.up_gate)
    down = (_whole(source + names.down, hidden),)
    specs = _linear("up_gate", up, hidden, config.mlp_bias, config)
    return specs | _linear("down", down, inner, config.mlp_bias, config)


def _sparse(config: ModelConfig, names: TensorNames, source: str, stored: Collection[str]) -> Plan:
    """Experts one by one, as in released checkpoints, or stacked in two tensors, as transformers has them."""
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    inner, count = moe.intermediate_size, moe.num_experts
    block, stacks = _stacked(names, source, stored)
    routers = [f"{block}.{name}.weight" for name in names.routers]
    router = next((name for name in routers if name in stored), routers[0])
    specs = {"router.weight": _matrix(router, count, hidden)}
    if moe.routing.wide:
        specs = {"router.weight": WeightSpec((_whole(router, count),), hidden, wide=True)}
    if moe.routing.corrected:
        known = [f"{block}.{name}" for name in names.corrections]
        found = next((name for name in known if name in stored), known[0])
        one = "moe_statics." in found  # a matrix of one row
        rows = WeightSpec((_whole(found, 1),), count, wide=True)
        specs["router.correction"] = rows if one else WeightSpec((_whole(found, count),), wide=True)
    if moe.beside_mlp:
        scales = f"{block}.router.scale", f"{block}.router.per_expert_scale"
        specs["router.norm.weight"] = WeightSpec((_whole(scales[0], hidden),), wide=True)
        specs["router.scales"] = WeightSpec((_whole(scales[1], count),), wide=True)
    if moe.biased:
        specs["router.bias"] = WeightSpec((_whole(router.removesuffix("weight") + "bias", count),))
    if moe.interleaved:
        return specs | _interleaved(moe, hidden, f"{block}.experts.")
    for e in range(count):
        up_gate: tuple[RowSlice, ...]
        if stacks is not None:
            fused, lower = stacks
            up_gate = tuple(RowSlice(fused, start, inner, 2 * inner, e, count) for start in (inner, 0))
            if not moe.gated:
                up_gate = (RowSlice(fused, 0, inner, inner, e, count),)
            down = RowSlice(lower, 0, hidden, hidden, e, count)
        else:
            expert = f"{block}.experts.{e}."
            parts = names.expert_up_gate if moe.gated else names.expert_up_gate[:1]
            up_gate = tuple(_whole(f"{expert}{name}.weight", inner) for name in parts)
            down = _whole(f"{expert}{names.expert_down}.weight", hidden)
        turned = moe.transposed and stacks is not None
        specs[f"expert.{e}.up_gate.weight"] = WeightSpec(up_gate, hidden, True, turned)
        specs[f"expert.{e}.down.weight"] = WeightSpec((down,), inner, True, turned)
    if moe.shared_intermediate_size:
        specs |= _shared(moe, hidden, names, source, block)
    return specs


def _interleaved(moe: MoeConfig, hidden: int, block: str) -> Plan:
    """Of all experts in one tensor, [in, out], gate and up in turn."""
    inner, specs = moe.intermediate_size, {}
    for e in range(moe.num_experts):
        fused = RowSlice(f"{block}gate_up_proj", 1, inner, 2 * inner, e, moe.num_experts, 2)
        pieces = {
            "up_gate": ((fused, replace(fused, start=0)), hidden),
            "down": ((RowSlice(f"{block}down_proj", 0, hidden, hidden, e, moe.num_experts),), inner),
        }
        for name, (slices, columns) in pieces.items():
            biases = tuple(replace(piece, source=f"{piece.source}_bias") for piece in slices)
            specs[f"expert.{e}.{name}.weight"] = WeightSpec(slices, columns, True, transposed=True)
            specs[f"expert.{e}.{name}.bias"] = WeightSpec(biases)
    return specs


def _stacked(names: TensorNames, source: str, stored: Collection[str]) -> tuple[str, tuple[str, str] | None]:
    """The block of a layer's experts, and its tensors of all experts: gate and up, and down. None: each
    expert has its own."""
    own = source + names.sparse if names.sparse else source.removesuffix(".")
    for block in (f"{source}mlp", own):
        for first, second in STACKS:
            if f"{block}.{first}" in stored:
                return block, (f"{block}.{first}", f"{block}.{second}")
    return own, None


def _shared(moe: MoeConfig, hidden: int, names: TensorNames, source: str, block: str) -> Plan:
    """The expert that every token uses, and its gate if it has one."""
    size = moe.shared_intermediate_size
    if names.shared:
        fused, down = (f"{source}{name}.weight" for name in names.shared)
        ups = tuple(RowSlice(fused, start, size, 2 * size) for start in (size, 0))
    else:
        shared = f"{block}.{names.shared_block}."
        parts = names.expert_up_gate if moe.gated else names.expert_up_gate[:1]
        ups = tuple(_whole(f"{shared}{name}.weight", size) for name in parts)
        down = f"{shared}{names.expert_down}.weight"
    specs = {"shared.up_gate.weight": WeightSpec(ups, hidden, True)}
    specs["shared.down.weight"] = _matrix(down, hidden, size)
    if moe.shared_gated:
        specs["shared_gate.weight"] = _matrix(f"{block}.shared_expert_gate.weight", 1, hidden)
    return specs


def _qkv(config: ModelConfig, names: TensorNames, source: str) -> tuple[RowSlice, ...]:
    sizes = (config.q_rows, config.kv_size, config.kv_size)
    if len(names.qkv) == 3:
        pieces = tuple(_whole(source + name, size) for name, size in zip(names.qkv, sizes, strict=True))
        return pieces[:2] if config.keys_are_values else pieces
    return _grouped(source + names.qkv[0], sizes, config.qkv_groups)


def _grouped(fused: str, sizes: tuple[int, ...], groups: int) -> tuple[RowSlice, ...]:
    """Parts of these sizes, which the checkpoint has in groups, one after another."""
    total = sum(sizes)
    pieces, first = [], 0
    for size in sizes:
        rows = size // groups
        pieces += [RowSlice(fused, g * (total // groups) + first, rows, total) for g in range(groups)]
        first += rows
    return tuple(pieces)


def _linear(name: str, pieces: Iterable[RowSlice], columns: int, biased: bool, config: ModelConfig) -> Plan:
    """A weight and, if there is one, its bias. pieces: slices whose source is the layer's name."""
    weight, bias = (
        tuple(replace(piece, source=piece.source + suffix) for piece in pieces)
        for suffix in (".weight", ".bias")
    )
    specs = {f"{name}.weight": WeightSpec(weight, columns, True, config.transposed_weights)}
    return specs | {f"{name}.bias": WeightSpec(bias)} if biased else specs


def _norm(name: str, source: str, size: int, config: ModelConfig) -> Plan:
    exact = {"plus_one": config.norm.endswith("plus_one"), "wide": config.norm.endswith("wide")}
    weight = WeightSpec((_whole(f"{source}.weight", size),), **exact)
    if config.norm.startswith("rms") or not config.norm_bias:
        return {f"{name}.weight": weight}
    return {f"{name}.weight": weight, f"{name}.bias": WeightSpec((_whole(f"{source}.bias", size),))}


def _matrix(source: str, rows: int, columns: int) -> WeightSpec:
    return WeightSpec((_whole(source, rows),), columns, is_matrix=True)


def _whole(source: str, rows: int) -> RowSlice:
    return RowSlice(source, 0, rows, rows)

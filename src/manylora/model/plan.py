"""Which rows of which checkpoint tensors make up each of the model's weights. Uses names, not tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from manylora.config.model import ModelConfig
from manylora.model.families import FAMILIES
from manylora.model.families.family import TensorNames
from manylora.model.plan_layers import (
    Plan,
    RowSlice,
    WeightSpec,
    cross_plan,
    layer_plan,
    linear,
    matrix,
    mixer_plan,
    mlp_plan,
    norm,
    sparse_plan,
    whole,
)

CLASSIFIERS = ("score", "classifier")


def checkpoint_plan(config: ModelConfig, stored: Collection[str]) -> Plan:
    """Our names -> specs. stored: names of the checkpoint's tensors, on which some layouts depend."""
    names = FAMILIES[config.architecture].names(config)
    encoder = FAMILIES[config.architecture].encoder
    if encoder is not None:
        return _encoder_decoder(config, encoder(config), names, stored)
    root = _root(names, stored)
    hidden, width = config.hidden_size, config.projected_size or config.hidden_size
    plan = {"embed": WeightSpec((whole(f"{root}{names.embed}.weight", config.vocab_size),), width)}
    if config.projected_size and config.bidirectional:
        plan |= linear("0.project_in", (whole(f"{root}{names.project}", hidden),), width, True, config)
    elif config.projected_size:
        plan["0.project_in.weight"] = matrix(f"{root}project_in.weight", hidden, width)
        plan["0.project_out.weight"] = matrix(f"{root}project_out.weight", width, hidden)
    if config.learned_positions:
        plan["positions"] = _positions(f"{root}{names.positions}.weight", config)
    if config.relative_buckets:
        buckets = whole(f"{root}{names.relative}.weight", config.relative_buckets)
        plan["relative"] = WeightSpec((buckets,), config.num_heads)
    if config.bidirectional:
        if names.embedding_norm:
            plan |= norm("embedding_norm", root + names.embedding_norm, width, config)
        if config.token_types:
            types = f"{root}embeddings.token_type_embeddings.weight"
            plan["token_types"] = WeightSpec((whole(types, config.token_types),), width)
        pooler = next(
            (r + names.head_layer for r in (root, "") if f"{r}{names.head_layer}.weight" in stored), None
        )
        if config.head_layer is not None and pooler is not None:
            plan |= _plain("head_layer", pooler, hidden, hidden, config.head_layer.biased)
            if config.head_layer.norm:
                plan |= norm("head_layer.norm", names.head_norm, hidden, config)
    if names.norm:
        plan |= norm("norm", f"{root}{names.norm}", hidden, config)
    if not config.tie_word_embeddings:
        plan["head.weight"] = matrix(f"{head_name(config, stored)}.weight", config.vocab_size, width)
    if config.score_tokens is not None:
        table = plan.get("head.weight", plan["embed"]).slices[0]
        for name, token in zip(("score.against", "score.for"), config.score_tokens, strict=True):
            plan[name] = WeightSpec((replace(table, start=token, rows=1),), hidden)
    elif config.num_labels:
        plan |= _classifier(config, stored)
    if config.head_bias:
        plan["head.bias"] = WeightSpec((whole(f"{names.head}.bias", config.vocab_size),))
    inputs = config.layer_inputs
    if inputs is not None:
        size = inputs.layers * inputs.dim
        table = whole(f"{root}embed_tokens_per_layer.weight", inputs.vocab_size)
        plan["layer_inputs.embed"] = WeightSpec((table,), size)
        project = f"{root}per_layer_model_projection.weight"
        plan["layer_inputs.project.weight"] = matrix(project, size, hidden)
        plan |= norm("layer_inputs.norm", f"{root}per_layer_projection_norm", inputs.dim, config)
    if config.altup is not None:
        ends = {"enter": f"{root}altup_projections", "leave": f"{root}altup_unembed_projections"}
        for ours, theirs in ends.items():
            for n in range(config.altup.streams - 1):
                plan[f"altup.{ours}.{n}.weight"] = matrix(f"{theirs}.{n}.weight", hidden, hidden)
    for layer in range(config.num_layers):
        source = f"{root}{names.layers}.{layer}."
        own = config.of_layer(layer)
        specs = mixer_plan(own, names, source, layer)
        if layer == 0 and not config.first_norm:
            specs = {name: spec for name, spec in specs.items() if not name.startswith("attention_norm.")}
        if config.moe is not None and layer in config.moe.layers:
            specs |= sparse_plan(own, names, source, stored)
        if layer in config.mlp_layers:
            specs |= mlp_plan(own, names, source)
        plan |= {f"{layer}.{name}": spec for name, spec in specs.items()}
    return plan


def _plain(name: str, source: str, rows: int, columns: int, biased: bool = True) -> Plan:
    plan = {f"{name}.weight": WeightSpec((whole(f"{source}.weight", rows),), columns)}
    return plan | ({f"{name}.bias": WeightSpec((whole(f"{source}.bias", rows),))} if biased else {})


def _classifier(config: ModelConfig, stored: Collection[str]) -> Plan:
    hidden = config.hidden_size
    if "classifier.out_proj.weight" in stored:
        dense = _plain("score.dense", "classifier.dense", hidden, hidden)
        return dense | _plain("score", "classifier.out_proj", config.num_labels, hidden)
    name = next((one for one in CLASSIFIERS if f"{one}.weight" in stored), CLASSIFIERS[0])
    plan = {"score.weight": WeightSpec((whole(f"{name}.weight", config.num_labels),), hidden)}
    if f"{name}.bias" in stored:
        plan["score.bias"] = WeightSpec((whole(f"{name}.bias", config.num_labels),))
    return plan


def unused_prefixes(config: ModelConfig) -> tuple[str, ...]:
    names = FAMILIES[config.architecture].names(config)
    heads = (f"{names.head}.", "lm_head.") if config.tie_word_embeddings else ()
    # Unused keys and values of layers that read another layer's, in released checkpoints.
    parts = (*names.qkv[1:], names.k_norm, names.k_norm.replace("k_norm", "v_norm"))
    layers = [f"{root}{names.layers}.{layer}." for root in ("", *names.roots) for layer in config.kv_readers]
    return (*names.unused, *heads, *(f"{layer}{part}." for layer in layers for part in parts))


def head_name(config: ModelConfig, stored: Collection[str]) -> str:
    """The head's name in this checkpoint: transformers 5 stores a text tower's head outside of it."""
    named = FAMILIES[config.architecture].names(config).head
    return "lm_head" if f"{named}.weight" not in stored and "lm_head.weight" in stored else named


def _encoder_decoder(
    config: ModelConfig, encoder: TensorNames, decoder: TensorNames, stored: Collection[str]
) -> Plan:
    """Layers are numbered through both stacks, the encoder's first."""
    assert config.encoder is not None
    hidden, count = config.hidden_size, config.encoder.num_layers
    base = _root(encoder, stored).removesuffix(encoder.roots[-1])
    tables = [f"{base}shared.weight", *(f"{_root(n, stored)}{n.embed}.weight" for n in (encoder, decoder))]
    shared = next((name for name in tables if name in stored), tables[0])
    plan = {"embed": WeightSpec((whole(shared, config.vocab_size),), hidden)}
    if f"{decoder.head}.weight" in stored:
        plan["head.weight"] = matrix(f"{decoder.head}.weight", config.vocab_size, hidden)
    if config.head_bias and "final_logits_bias" in stored:
        plan["head.bias"] = WeightSpec((whole("final_logits_bias", 1),), config.vocab_size)
    layers = range(count), range(count, config.num_layers)
    for stack, names, numbers in zip(("encoder", "decoder"), (encoder, decoder), layers, strict=True):
        root = _root(names, stored)
        table = f"{root}{names.embed}.weight"
        if table in stored and table != shared:
            plan[f"{stack}.embed"] = WeightSpec((whole(table, config.vocab_size),), hidden)
        plan |= {f"{stack}.{name}": spec for name, spec in _around_layers(config, names, root).items()}
        for number, layer in enumerate(numbers):
            source = f"{root}{names.layers}.{number}."
            specs = layer_plan(config, names, source) | mlp_plan(config, names, source)
            specs |= cross_plan(config, names, source) if names.cross else {}
            plan |= {f"{layer}.{name}": spec for name, spec in specs.items()}
    return plan


def _around_layers(config: ModelConfig, names: TensorNames, root: str) -> Plan:
    own, hidden, specs = config.encoder, config.hidden_size, {}
    assert own is not None
    if config.learned_positions:
        specs["positions"] = _positions(f"{root}{names.positions}.weight", config)
    if own.relative_buckets:
        buckets = whole(f"{root}{names.relative}.weight", own.relative_buckets)
        specs["relative"] = WeightSpec((buckets,), config.num_heads)
    for ours, theirs in (("embedding_norm", names.embedding_norm), ("norm", names.norm)):
        specs |= norm(ours, root + theirs, hidden, config) if theirs else {}
    return specs


def _positions(source: str, config: ModelConfig) -> WeightSpec:
    first = config.position_offset
    count = config.max_position_embeddings + (config.padding_id is not None)
    width = config.hidden_size
    if config.bidirectional:  # an encoder's projection comes after its positions
        width = config.projected_size or width
    return WeightSpec((RowSlice(source, first, count, first + count),), width)


def _root(names: TensorNames, stored: Collection[str]) -> str:
    """The root of the embedding, or the first one in the checkpoint. Empty if a bare model was saved."""
    for root in ("", *names.roots):
        if any(name.startswith(f"{root}{names.embed}.") for name in stored):  # .weight, or parts of it
            return root
    present = (root for root in names.roots if any(name.startswith(root) for name in stored))
    return next(present, names.roots[0])

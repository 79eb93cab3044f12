"""rank_plan: the part of each of a model's weights that one rank reads.

Column-parallel matrices (qkv, up and gate) keep some of their outputs, row-parallel ones (out, down) some of
their inputs, embedding and head some tokens. The result of a row-parallel matrix is a partial sum, so only
the first rank has its bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from manylora.config.blocks import ConvConfig, DeltaConfig, Mamba2Config, RecurrentConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.plan_layers import Plan, WeightSpec
from manylora.ranks.mapping import Mapping, layers_of_stage

LAYER = re.compile(r"(\d+)\.(.+)")
EXPERT = re.compile(r"expert\.(\d+)\.(.+)")
STACK = re.compile(r"(?:encoder|decoder)\.(.+)")
# Weights of a layer that are equal on all ranks of a stage, including a norm that all heads of a recurrent
# layer share, and matrices so small that communication would cost more than computing them on each rank.
# latent_out has no bias, so its results on partial sums can be summed.
WHOLE = (
    "router.weight", "router.bias", "router.correction", "router.norm.weight", "router.scales",
    "shared_gate.weight", "norm.weight", "scalar", "input_gate.weight", "input_project.weight",
    "altup_router.weight", "altup_predict.weight", "altup_correct.weight", "altup_scale",
    "laurel_left.weight", "laurel_right.weight", "latent_in.weight", "latent_out.weight",
)  # fmt: skip
NORMS = (
    "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "cross_norm", "mlp_own_post_norm",
    "experts_norm", "experts_post_norm", "input_norm", "altup_norm", "laurel_norm",
)  # fmt: skip
VECTORS = ("decay", "shift", "skip")  # per head of Mamba-2
# Weights outside of the layers, complete on the ranks of the first stage, and of the last one.
BEFORE = ("positions", "token_types", "embedding_norm.", "layer_inputs.", "altup.enter.", "0.project_in.")
BEHIND = ("altup.leave.", "0.project_out.")


def rank_plan(plan: Plan, model: ModelConfig, mapping: Mapping) -> Plan:
    """The part of the whole model's plan, with layers and experts numbered from this rank's first. head.bias
    is complete, because adapters on the head need it. Raises ConfigError for a weight that cannot be shared.
    """
    layers = layers_of_stage(model, mapping)
    found: Plan = {}
    for name, spec in plan.items():
        layer = LAYER.fullmatch(name)
        if layer is not None and not name.startswith((*BEFORE, *BEHIND)):
            number = int(layer[1])
            if number in layers:
                part = _of_layer(layer[2], spec, model, mapping, number)
                found |= {f"{layers.index(number)}.{own}": one for own, one in part.items()}
            continue
        one = _around_layers(name, spec, model, mapping)
        if one is not None:
            found[name] = one
    tied = "head.weight" not in plan and not model.bidirectional
    if tied and mapping.is_last_stage and not mapping.is_first_stage:
        table = plan["embed"].take_rows(mapping.vocabulary(model.vocab_size))
        found["head.weight"] = WeightSpec(table.slices, table.columns, is_matrix=True)
    return found


def _around_layers(name: str, spec: WeightSpec, model: ModelConfig, mapping: Mapping) -> WeightSpec | None:
    """None: this stage does not have it."""
    own, inputs = of_stack(name), model.layer_inputs
    tokens = mapping.vocabulary(model.vocab_size)
    if own in ("norm.weight", "norm.bias") or name.startswith(("score.", "head_layer.")):
        return spec
    if own == "relative":  # a bias per head
        return spec.take_columns(query_heads(model, mapping))
    if name == "layer_inputs.embed" and inputs is not None:  # some tokens, and the columns of these layers
        layers = mapping.stage_layers(inputs.layers)
        spec = spec.take_rows(mapping.vocabulary(inputs.vocab_size))
        return spec if len(layers) == inputs.layers else spec.take_columns(_rows(layers, inputs.dim))
    part = spec.take_rows(tokens) if own in ("embed", "head.weight") else spec
    if own == "embed" or own.startswith(BEFORE):
        return part if mapping.is_first_stage else None
    if name.startswith((*BEHIND, "head.")):
        return part if mapping.is_last_stage else None
    raise _unknown(name, model)


def of_stack(name: str) -> str:
    """The name without the prefix of encoder or decoder, for weights outside of their layers."""
    stack = STACK.fullmatch(name)
    return name if stack is None else stack[1]


def _of_layer(name: str, spec: WeightSpec, model: ModelConfig, mapping: Mapping, number: int) -> Plan:
    tp, rank = mapping.tp_size, mapping.tp_rank
    model = model.of_layer(number)
    expert = EXPERT.fullmatch(name)
    if expert is not None:
        experts = mapping.experts(model.moe.num_experts if model.moe else 0)
        if int(expert[1]) not in experts:
            return {}
        index = experts.index(int(expert[1]))
        part = _of_mlp(expert[2], spec, mapping.moe_tp_size, mapping.moe_tp_rank)
        return {f"expert.{index}.{own}": one for own, one in part.items()}
    block, _, kind = name.rpartition(".")
    if name in WHOLE or block in NORMS:
        return {name: spec}
    if block in ("q_norm", "k_norm"):  # one weight for all heads, or one per head
        if model.qk_norm == "head" or model.latent is not None:
            return {name: spec}
        heads, total = query_heads(model, mapping), model.num_heads
        if block == "k_norm":
            heads, total = key_heads(model, mapping), model.num_kv_heads
        return {name: spec.take_rows(_rows(heads, spec.shape[0] // total))}
    if block in ("out", "cross_out", "recurrent_out"):
        return _of_sum(name, kind, spec, tp, rank)
    if block in ("up_gate", "down", "shared.up_gate", "shared.down"):
        return _of_mlp(name, spec, tp, rank)
    runs = _runs_of_heads(block or name, model, mapping, number)
    if runs is None:
        raise _unknown(name, model)
    return {name: spec.take_rows(*runs)}


def _runs_of_heads(block: str, model: ModelConfig, mapping: Mapping, number: int) -> list[range] | None:
    """This rank's rows of weights with rows per head, or per recurrent channel. None: unknown weight."""
    tp, rank, latent = mapping.tp_size, mapping.tp_rank, model.latent
    if number in model.recurrent_layers and model.recurrent is not None:
        found = _recurrent_runs(model.recurrent, tp, rank).get(block)
        if found is not None or model.beside is None:
            return found
    if latent is not None:
        heads, cached = model.num_heads, latent.cached_dim
        queries = heads * latent.query_dim
        if block == "qkv":  # parts that all heads share are complete
            first = range(latent.q_rank) if latent.q_rank else _share(queries, tp, rank)
            size = latent.q_rank or queries
            return [first, range(size, size + cached)]
        values = heads * (latent.plain_dim + latent.value_dim)
        sizes = {"q_b": (queries,), "kv_b": (values,)}.get(block)
    elif block in ("qkv", "q", "cross_q", "cross_kv"):
        # Each query has its gate beside it.
        q = model.q_rows, _rows(query_heads(model, mapping), model.q_rows // model.num_heads)
        k = model.kv_size, _rows(key_heads(model, mapping), model.kv_size // model.num_kv_heads)
        fused = [q, k] if model.keys_are_values else [q, k, k]
        return _below({"qkv": fused, "q": [q], "cross_q": [q], "cross_kv": [k, k]}[block])
    else:
        sizes = (model.num_heads,) if block == "sinks" else None
    return None if sizes is None else _shares_of_parts(sizes, tp, rank)


def _recurrent_runs(own: RecurrentConfig, tp: int, rank: int) -> dict[str, list[range]]:
    if isinstance(own, Mamba2Config):  # neighbouring ranks share groups if there are fewer than ranks
        values = own.value_size, _share(own.value_size, tp, rank)
        heads = own.heads, _share(own.heads, tp, rank)
        keys = own.groups * own.state_dim, _rows(_heads(own.groups, tp, rank), own.state_dim)
        mixed = (values, keys, keys)
        rows = {"in": (values, *mixed, heads), "taps": mixed, "taps_bias": mixed, "inner_norm": (values,)}
        return {block: _below(each) for block, each in (rows | dict.fromkeys(VECTORS, (heads,))).items()}
    if isinstance(own, ConvConfig):
        parts = {"in": (own.channels,) * 3, "taps": (own.channels,)}
    else:
        assert isinstance(own, DeltaConfig)
        qkv, gates = (own.key_size, own.key_size, own.value_size), (own.value_heads,)
        parts = {
            "in": (*qkv, own.value_size),
            "taps": qkv,
            "gates": gates * 2,
            "decay": gates,
            "shift": gates,
        }
    return {block: _shares_of_parts(sizes, tp, rank) for block, sizes in parts.items()}


def _below(parts: Iterable[tuple[int, range]]) -> list[range]:
    runs, first = [], 0
    for size, run in parts:
        runs.append(range(run.start + first, run.stop + first))
        first += size
    return runs


def _shares_of_parts(sizes: Iterable[int], count: int, number: int) -> list[range]:
    return _below((size, _share(size, count, number)) for size in sizes)


def _of_mlp(name: str, spec: WeightSpec, count: int, number: int) -> Plan:
    """up_gate is [up; gate], or [up] without a gate."""
    block, _, kind = name.rpartition(".")
    if block.endswith("down"):
        return _of_sum(name, kind, spec, count, number)
    sizes = [piece.rows for piece in spec.slices]  # of up and of gate
    return {name: spec.take_rows(*_shares_of_parts(sizes, count, number))}


def _of_sum(name: str, kind: str, spec: WeightSpec, count: int, number: int) -> Plan:
    if kind == "bias":
        return {name: spec} if number == 0 else {}
    return {name: spec.take_columns(_share(spec.columns, count, number))}


def query_heads(model: ModelConfig, mapping: Mapping) -> range:
    return _share(model.num_heads, mapping.tp_size, mapping.tp_rank)


def key_heads(model: ModelConfig, mapping: Mapping) -> range:
    """Those that its query heads read; neighbouring ranks share one if there are fewer than ranks."""
    return _heads(model.num_kv_heads, mapping.tp_size, mapping.tp_rank)


def _heads(total: int, tp: int, rank: int) -> range:
    first = rank * total // tp
    return range(first, first + max(1, total // tp))


def _share(size: int, count: int, number: int) -> range:
    return range(number * size // count, (number + 1) * size // count)


def _rows(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _unknown(name: str, model: ModelConfig) -> ConfigError:
    return ConfigError(
        f"{model.architecture} has weights that ranks cannot share ({name}): tp_size and pp_size must be 1"
    )

"""rank_plan: which part of each of a model's weights one rank reads.

Column-parallel matrices (qkv, up and gate) keep some of their outputs, row-parallel ones (out, down) some of
their inputs, embedding and head some tokens. What a rank makes of a row-parallel matrix is a part of a sum,
so its bias is with the first rank alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from manylora.config.engine import ModelConfig
from manylora.errors import ConfigError
from manylora.model.plan import Plan, WeightSpec
from manylora.parallel.mapping import Mapping

LAYER = re.compile(r"(\d+)\.(.+)")
EXPERT = re.compile(r"expert\.(\d+)\.(.+)")
# Of a layer, the same on every rank of a stage.
WHOLE = ("router.weight", "shared_gate.weight")
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


def rank_plan(plan: Plan, model: ModelConfig, mapping: Mapping) -> Plan:
    """The part of the whole model's plan; layers and experts are numbered from the first of this rank.

    head.bias is whole, as adapters on the head need it so. Raises ConfigError for a weight that nobody knows
    how to share.
    """
    tokens, layers = mapping.vocabulary(model.vocab_size), mapping.stage_layers(model.num_layers)
    found: Plan = {}
    for name, spec in plan.items():
        layer = LAYER.fullmatch(name)
        if layer is not None:
            number = int(layer[1])
            if number in layers:
                part = _of_layer(layer[2], spec, model, mapping)
                found |= {f"{number - layers.start}.{own}": one for own, one in part.items()}
        elif name in ("norm.weight", "norm.bias") or name.startswith("score."):
            found[name] = spec
        elif name in ("embed", "positions"):
            if mapping.is_first_stage:
                found[name] = spec.take_rows(tokens) if name == "embed" else spec
        elif name in ("head.weight", "head.bias"):
            if mapping.is_last_stage:
                found[name] = spec.take_rows(tokens) if name == "head.weight" else spec
        else:
            raise _unknown(name, model)
    if "head.weight" not in plan and mapping.is_last_stage and not mapping.is_first_stage:
        found["head.weight"] = _as_matrix(plan["embed"].take_rows(tokens))
    return found


def _of_layer(name: str, spec: WeightSpec, model: ModelConfig, mapping: Mapping) -> Plan:
    """One of a layer's weights, or nothing where this rank has no part of it."""
    tp, rank = mapping.tp_size, mapping.tp_rank
    expert = EXPERT.fullmatch(name)
    if expert is not None:
        experts = mapping.experts(model.moe.num_experts if model.moe else 0)
        if int(expert[1]) not in experts:
            return {}
        number = experts.index(int(expert[1]))
        part = _of_mlp(expert[2], spec, mapping.moe_tp_size, mapping.moe_tp_rank)
        return {f"expert.{number}.{own}": one for own, one in part.items()}
    block, _, kind = name.rpartition(".")
    if name in WHOLE or block in NORMS:
        return {name: spec}
    if block in ("q_norm", "k_norm"):
        return {name: _of_qk_norm(block, spec, model, mapping)}
    if block == "qkv":
        return {name: spec.take_rows(*_qkv_rows(model, mapping))}
    if block == "out":
        return _of_sum(name, kind, spec, tp, rank)
    if block in ("up_gate", "down", "shared.up_gate", "shared.down"):
        return _of_mlp(name, spec, tp, rank)
    raise _unknown(name, model)


def _of_mlp(name: str, spec: WeightSpec, count: int, number: int) -> Plan:
    """up_gate is [up; gate], or [up] without a gate."""
    block, _, kind = name.rpartition(".")
    if block.endswith("down"):
        return _of_sum(name, kind, spec, count, number)
    sizes = _runs_of_sources(spec)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return {
        name: spec.take_rows(
            *(_shift(_share(size, count, number), at) for size, at in zip(sizes, firsts, strict=True))
        )
    }


def _runs_of_sources(spec: WeightSpec) -> Sequence[int]:
    """Rows of up and of gate: one slice each."""
    return [piece.rows for piece in spec.slices]


def _of_sum(name: str, kind: str, spec: WeightSpec, count: int, number: int) -> Plan:
    if kind == "bias":
        return {name: spec} if number == 0 else {}
    return {name: spec.take_columns(_share(spec.columns, count, number))}


def _of_qk_norm(block: str, spec: WeightSpec, model: ModelConfig, mapping: Mapping) -> WeightSpec:
    """One weight for all heads, or one for each."""
    if model.qk_norm == "head":
        return spec
    queries = block == "q_norm"
    heads = query_heads(model, mapping) if queries else key_heads(model, mapping)
    total = model.num_heads if queries else model.num_kv_heads
    size = spec.shape[0] // total
    return spec.take_rows(range(heads.start * size, heads.stop * size))


def _qkv_rows(model: ModelConfig, mapping: Mapping) -> list[range]:
    queries, keys, dim = query_heads(model, mapping), key_heads(model, mapping), model.head_dim
    runs, first = [], 0
    for heads, size in ((queries, model.q_size), (keys, model.kv_size), (keys, model.kv_size)):
        runs.append(range(first + heads.start * dim, first + heads.stop * dim))
        first += size
    return runs


def query_heads(model: ModelConfig, mapping: Mapping) -> range:
    """Of this rank."""
    return _share(model.num_heads, mapping.tp_size, mapping.tp_rank)


def key_heads(model: ModelConfig, mapping: Mapping) -> range:
    """Of this rank: those that its query heads read. Neighbours have the same one where there are fewer key
    heads than ranks."""
    count = max(1, model.num_kv_heads // mapping.tp_size)
    first = mapping.tp_rank * model.num_kv_heads // mapping.tp_size
    return range(first, first + count)


def _share(size: int, count: int, number: int) -> range:
    return range(number * size // count, (number + 1) * size // count)


def _shift(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def _as_matrix(spec: WeightSpec) -> WeightSpec:
    return WeightSpec(spec.slices, spec.columns, is_matrix=True)


def _unknown(name: str, model: ModelConfig) -> ConfigError:
    return ConfigError(
        f"{model.architecture} has weights that ranks cannot share ({name}): tp_size and pp_size must be 1"
    )

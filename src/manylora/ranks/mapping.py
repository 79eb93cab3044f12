"""Mapping: how ranks share layers, matrices and experts. rank_config: the model that one rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from manylora.adapters.slicing import pipeline_layers
from manylora.config.blocks import ConvConfig, DeltaConfig, Mamba2Config
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError

MOST_TRIED = 64  # maximum ranks per stage that errors suggest


@dataclass(frozen=True)
class Mapping:
    """One of `world_size` ranks, in TensorRT-LLM's terms: rank = pp_rank * tp_size + tp_rank. tp_size: ranks
    that share each matrix of a layer. pp_size: stages, which divide the layers. moe_ep_size: groups of a
    layer's ranks that divide whole experts; the ranks of a group share matrices. Raises ConfigError.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    moe_ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp_size", "pp_size", "moe_ep_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tp_size * self.pp_size != self.world_size:
            raise ConfigError(
                f"world_size must be tp_size * pp_size = {self.tp_size * self.pp_size}, got {self.world_size}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be 0 to {self.world_size - 1}, got {self.rank}")
        if self.tp_size % self.moe_ep_size:
            raise ConfigError(f"moe_ep_size must divide tp_size ({self.tp_size}), got {self.moe_ep_size}")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def moe_tp_size(self) -> int:
        return self.tp_size // self.moe_ep_size

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // self.moe_ep_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_group(self) -> tuple[int, ...]:
        first = self.pp_rank * self.tp_size
        return tuple(range(first, first + self.tp_size))

    def at(self, rank: int) -> Mapping:
        """The same sizes, seen from another rank."""
        return replace(self, rank=rank)

    def stage_layers(self, num_layers: int) -> range:
        """Layers of this stage: equal shares; the first stages get one of the remaining layers each."""
        return pipeline_layers(num_layers, self.pp_size, self.pp_rank)

    def experts(self, num_experts: int) -> range:
        """Experts whose matrices, or parts of them, this rank has."""
        share = num_experts // self.moe_ep_size
        return range(self.moe_ep_rank * share, (self.moe_ep_rank + 1) * share)

    def vocabulary(self, size: int) -> range:
        """Tokens whose rows of embedding and head this rank has: equal shares, the first ones rounded up."""
        return pipeline_layers(size, self.tp_size, self.tp_rank)


def layers_of_stage(model: ModelConfig, mapping: Mapping) -> Sequence[int]:
    """Numbered as in the whole model. For an encoder-decoder model, some of each stack."""
    encoded = encoder_layers(model)
    decoded = mapping.stage_layers(model.num_layers - encoded)
    if not encoded:
        return decoded
    return (*mapping.stage_layers(encoded), *(encoded + number for number in decoded))


def encoder_layers(model: ModelConfig) -> int:
    """Number of encoder layers, which precede the decoder's. 0 for other models."""
    return model.encoder.num_layers if model.encoder is not None else 0


def check_mapping(model: ModelConfig, mapping: Mapping) -> None:
    """Raises ConfigError that names what cannot be shared, and numbers of ranks that would work."""
    error = _problem(model, mapping)
    if error is None:
        return
    pp, ep = mapping.pp_size, mapping.moe_ep_size
    for stages, groups in ((pp, ep), (pp, 1), (1, 1)):
        sizes = range(groups, MOST_TRIED + 1, groups)
        fit = [n for n in sizes if _problem(model, Mapping(n * stages, 0, n, stages, groups)) is None]
        if fit:
            with_stages = f" with pp_size {stages}" if stages > 1 or pp > 1 else ""
            with_groups = f" and moe_ep_size {groups}" if groups > 1 or ep > 1 else ""
            does = ", ".join(map(str, fit))
            raise ConfigError(f"{error}; tp_size {does} would do{with_stages}{with_groups}")
    raise error


def _problem(model: ModelConfig, mapping: Mapping) -> ConfigError | None:
    try:
        _check(model, mapping)
    except ConfigError as error:
        return error
    return None


def _check(model: ModelConfig, mapping: Mapping) -> None:
    if mapping.world_size == 1:
        return
    tp, pp = mapping.tp_size, mapping.pp_size
    encoded, decoded = encoder_layers(model), model.num_layers - encoder_layers(model)
    if encoded and pp > min(encoded, decoded):
        raise ConfigError(
            f"each stage must have one of the encoder's {encoded} layers and one of the decoder's {decoded}: "
            f"pp_size must be at most {min(encoded, decoded)}, got {pp}"
        )
    if pp > model.num_layers:
        raise ConfigError(f"pp_size must be at most the model's {model.num_layers} layers, got {pp}")
    if mapping.moe_ep_size > 1 and model.moe is None:
        raise ConfigError(f"moe_ep_size must be 1: {model.architecture} has no experts")
    if model.num_heads % tp:
        raise ConfigError(f"tp_size must divide the model's {model.num_heads} attention heads, got {tp}")
    if model.encoder is not None and model.encoder.head_dim:
        _check_share("the heads of the encoder", model.q_size // model.encoder.head_dim, "tp_size", tp)
    if isinstance(model.recurrent, DeltaConfig):
        _check_share("the key heads of the recurrent layers", model.recurrent.key_heads, "tp_size", tp)
    if isinstance(model.recurrent, ConvConfig):
        _check_share("the channels of the recurrent layers", model.recurrent.channels, "tp_size", tp)
    if isinstance(model.recurrent, Mamba2Config):
        _check_share("the heads of the recurrent layers", model.recurrent.heads, "tp_size", tp)
        _check_heads("the {} groups of the recurrent layers", model.recurrent.groups, tp)
    # All ranks have the same caches, so each stage must have layers of both kinds.
    for stage in range(pp) if model.recurrent is not None else ():
        layers = mapping.at(stage * tp).stage_layers(model.num_layers)
        kinds = {"recurrent": model.recurrent_layers, "attention": model.attention_layers}
        missing = [kind for kind, those in kinds.items() if those and not those.intersection(layers)]
        if missing:
            raise ConfigError(
                f"each stage must have a recurrent layer and one with attention: with pp_size {pp}, "
                f"layers {layers.start} to {layers.stop - 1} have no {missing[0]} layer"
            )
    # Adapters store rows of the matrices that create streams in the first layers of a stage.
    streams = 0 if model.altup is None else model.altup.streams
    if model.num_layers // pp < streams - 1:
        raise ConfigError(
            f"each stage must have at least {streams - 1} layers, one for each residual stream but the first"
        )
    for shape in model.layer_shapes or (model,):
        _check_heads("the model's {} key-value heads", shape.num_kv_heads, tp)
    if tp > 1 and model.qk_norm == "all" and model.norm.startswith("layer"):
        raise ConfigError(f"{model.architecture} norms all heads at once: tp_size must be 1, got {tp}")
    if tp > model.vocab_size:
        raise ConfigError(f"tp_size must be at most the model's {model.vocab_size} tokens, got {tp}")
    moe = model.moe
    for shape in (model.layer_shapes or (model,)) if model.mlp_layers else ():
        _check_share("the model's MLP width", shape.intermediate_size, "tp_size", tp)
    if moe is not None:
        _check_share("the number of experts", moe.num_experts, "moe_ep_size", mapping.moe_ep_size)
        _check_share("an expert's width", moe.intermediate_size, "tp_size / moe_ep_size", mapping.moe_tp_size)
        _check_share("the shared expert's width", moe.shared_intermediate_size, "tp_size", tp)


def _check_heads(what: str, count: int, tp: int) -> None:
    """For parts of which several ranks may have the same."""
    if count % tp and tp % count:
        raise ConfigError(f"tp_size must divide {what.format(count)}, or they it; got {tp}")


def _check_share(what: str, size: int, name: str, count: int) -> None:
    if size % count:
        raise ConfigError(f"{name} must divide {what}, {size}, got {count}")


T = TypeVar("T")


def rank_config(model: ModelConfig, mapping: Mapping) -> ModelConfig:
    """Sizes of this rank's part, with layers numbered from 0. Vocabulary and hidden size are the model's."""
    check_mapping(model, mapping)
    if mapping.world_size == 1:
        return model
    tp, layers, moe = mapping.tp_size, layers_of_stage(model, mapping), model.moe
    encoder = model.encoder
    if encoder is not None:
        encoder = replace(encoder, num_layers=len(mapping.stage_layers(encoder.num_layers)))
    if moe is not None:
        moe = replace(
            moe,
            num_experts=len(mapping.experts(moe.num_experts)),
            intermediate_size=moe.intermediate_size // mapping.moe_tp_size,
            shared_intermediate_size=moe.shared_intermediate_size // tp,
            layers=_of_stage(moe.layers, layers),
        )
    recurrent = model.recurrent  # a share of the heads or channels, and so of every state
    if recurrent is not None:
        recurrent = replace(recurrent, layers=_of_stage(recurrent.layers, layers))
    if isinstance(recurrent, ConvConfig):
        recurrent = replace(recurrent, channels=recurrent.channels // tp)
    elif isinstance(recurrent, Mamba2Config):
        recurrent = replace(recurrent, heads=recurrent.heads // tp, groups=max(1, recurrent.groups // tp))
    elif isinstance(recurrent, DeltaConfig):
        recurrent = replace(
            recurrent, key_heads=recurrent.key_heads // tp, value_heads=recurrent.value_heads // tp
        )
    return replace(
        model,
        num_layers=len(layers),
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        # A width that no layer uses need not be divisible.
        intermediate_size=model.intermediate_size // tp if model.mlp_layers else model.intermediate_size,
        layer_shapes=tuple(
            replace(
                one,
                num_kv_heads=max(1, one.num_kv_heads // tp),
                intermediate_size=one.intermediate_size // tp,
            )
            for one in _those(model.layer_shapes, layers)
        ),
        sliding_windows=_those(model.sliding_windows, layers),
        kv_sources=tuple(one - layers[0] for one in _those(model.kv_sources, layers)),
        sparsity=_those(model.sparsity, layers),
        unmixed_layers=_of_stage(model.unmixed_layers, layers),
        mlpless_layers=_of_stage(model.mlpless_layers, layers),
        unrotated_layers=_of_stage(model.unrotated_layers, layers),
        attention_scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
        moe=moe,
        encoder=encoder,
        recurrent=recurrent,
    )


def _of_stage(numbers: frozenset[int], layers: Sequence[int]) -> frozenset[int]:
    return frozenset(layers.index(number) for number in numbers if number in layers)


def _those(each: tuple[T, ...], layers: Sequence[int]) -> tuple[T, ...]:
    return tuple(each[number] for number in layers) if each else ()

"""EngineConfig (settings of the user) and ModelConfig (the shape of the checkpoint). Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manylora.config.blocks import (
    AltUpConfig,
    BesideConfig,
    HeadLayerConfig,
    LatentConfig,
    LayerInputsConfig,
    LayerShape,
    RecurrentConfig,
    RoutingConfig,
)
from manylora.config.values import at_least, between, fraction, one_of
from manylora.errors import ConfigError
from manylora.quant.checkpoint import CheckpointQuant
from manylora.quant.config import QuantConfig

GIB = 2**30
MAX_CHUNK = 512
MAX_DRAFT, MAX_NGRAM = 64, 16
POLICIES = ("guaranteed_no_evict", "max_utilization")
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LoraCacheConfig:
    """The two-level adapter cache. Sizes follow TensorRT-LLM's PeftCacheConfig and Triton parameters."""

    optimal_adapter_size: int = 8  # rank for which one adapter fills about one page
    max_adapter_size: int = 64  # a page must hold at least one module's row of this rank
    gpu_memory_fraction: float = 0.05  # device level, of the memory left after weights and KV cache
    gpu_memory_bytes: int | None = None  # device level in bytes; overrides the fraction
    host_memory_bytes: int = GIB
    num_device_module_layer: int = 0  # > 0: device level in (layer, module) rows of rank 1, overrides bytes
    num_host_module_layer: int = 0
    max_loras: int | None = None  # device level in adapters of the rank limit with every target module;
    max_cpu_loras: int | None = None  # the host's likewise. Each overrides the other sizes of its level
    max_lora_rank: int | None = None  # larger ranks are refused; None: max_adapter_size
    target_modules: tuple[str, ...] = ()  # names as attn_q; empty: every module the model has
    prefetch_dir: Path | None = None
    catalog_dir: Path | None = None  # adapters by name, <dir>/<name>/
    names_file: Path | None = None  # JSON: more names, and the folder of each
    allowed_paths: tuple[Path, ...] = ()  # folders beside these two that links in them may lead to
    lora_adapter_dtype: str = "auto"  # in memory; auto: the checkpoint's where kernels widen it, else `dtype`
    text_only: bool = False  # of a vision model's adapter the text part is served; else such are refused
    disk_cache_dir: Path | None = None  # copies of adapters on disk, by digest; None: no disk level
    disk_cache_bytes: int = 4 * GIB

    def __post_init__(self) -> None:
        ranks = ("optimal_adapter_size", "max_adapter_size", "max_lora_rank")
        at_least(1, self, *ranks, "max_loras", "max_cpu_loras")
        at_least(0, self, "gpu_memory_bytes", "host_memory_bytes", "disk_cache_bytes")
        at_least(0, self, "num_device_module_layer", "num_host_module_layer")
        fraction(lora_cache_gpu_memory_fraction=self.gpu_memory_fraction)
        one_of(DTYPES, lora_adapter_dtype=self.lora_adapter_dtype)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Where files of adapters that are not sent along may lie."""
        return (*filter(None, (self.prefetch_dir, self.catalog_dir)), *self.allowed_paths)

    @property
    def sizes_device(self) -> bool:
        """Whether a size of the device level was chosen."""
        fraction = self.gpu_memory_fraction != LoraCacheConfig.gpu_memory_fraction
        return fraction or bool(self.gpu_memory_bytes or self.num_device_module_layer or self.max_loras)

    @property
    def sizes_host(self) -> bool:
        """Whether a size of the host level was chosen."""
        size = self.host_memory_bytes != LoraCacheConfig.host_memory_bytes
        return size or bool(self.num_host_module_layer or self.max_cpu_loras)

    @property
    def rank_limit(self) -> int:
        """The largest rank an adapter may have."""
        return self.max_adapter_size if self.max_lora_rank is None else self.max_lora_rank


@dataclass(frozen=True)
class EngineConfig:
    """Everything a user may choose about one engine. Raises ConfigError when a value cannot work."""

    model_dir: Path
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # the checkpoint's; float32 where a CPU does not compute that itself
    max_batch_size: int = 64  # sequences in one step; each beam counts
    max_beam_width: int = 1
    tokenizer_dir: Path | None = None  # for guided decoding; None: such requests are refused
    max_num_tokens: int = 2048  # token rows in one step
    max_seq_len: int | None = None  # prompt + output; None: what the model allows
    tokens_per_block: int = 32
    kv_cache_free_gpu_mem_fraction: float = 0.9
    gpu_memory_utilization: float | None = None  # of the device's memory, for all we take; None: no limit
    max_tokens_in_paged_kv_cache: int | None = None
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    batch_scheduler_policy: str = "guaranteed_no_evict"
    max_queue_size: int = 0  # waiting requests; 0: no limit
    quant: QuantConfig | None = None  # weights in fewer bits; None: as the model directory has them
    stream_interval: int = 1  # new tokens of a stream in one event; the first one is told at once
    wrap_input_ids: bool = False  # ids beyond the vocabulary are taken modulo its size instead of refused
    enable_cuda_graph: bool | None = None  # decode steps as recorded graphs; None: where the device has them
    cuda_graph_cache_size: int = 0  # graphs kept; 0: 128
    enable_overlap: bool | None = None  # a step is scheduled while the one before runs; None: on a GPU
    tensor_parallel_size: int = 1  # ranks that share each layer
    pipeline_parallel_size: int = 1  # groups of these, each with a part of the layers
    moe_expert_parallel_size: int = 1  # of the ranks that share a layer, those that divide experts by number
    max_draft_len: int = 0  # tokens of a draft by n-grams of the sequence's own tokens; 0: there are none
    max_matching_ngram_size: int = 4  # tokens at a sequence's end that are looked for in it, at most
    min_matching_ngram_size: int = 2  # and at least
    ngram_use_oldest: bool = True  # what followed their first occurrence; False: their last
    max_draft_concurrency: int = 0  # with more running sequences nothing is drafted; 0: any number
    lora: LoraCacheConfig = field(default_factory=LoraCacheConfig)

    def __post_init__(self) -> None:
        at_least(1, self, "max_batch_size", "max_num_tokens", "max_beam_width", "max_seq_len")
        at_least(1, self, "tokens_per_block", "max_tokens_in_paged_kv_cache", "stream_interval")
        at_least(0, self, "max_queue_size", "cuda_graph_cache_size", "max_draft_concurrency")
        between(0, MAX_DRAFT, self, "max_draft_len")
        between(1, MAX_NGRAM, self, "max_matching_ngram_size", "min_matching_ngram_size")
        at_least(1, self, "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
        fraction(kv_cache_free_gpu_mem_fraction=self.kv_cache_free_gpu_mem_fraction)
        if self.gpu_memory_utilization is not None:
            fraction(gpu_memory_utilization=self.gpu_memory_utilization)
        one_of(POLICIES, batch_scheduler_policy=self.batch_scheduler_policy)
        one_of(DTYPES, dtype=self.dtype)
        if self.max_beam_width > self.max_batch_size:
            raise ConfigError(
                f"max_beam_width must be at most max_batch_size ({self.max_batch_size}), "
                f"got {self.max_beam_width}"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens must be at least max_batch_size ({self.max_batch_size}), "
                f"got {self.max_num_tokens}"
            )

    @property
    def world_size(self) -> int:
        """Ranks: processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chunk_tokens(self) -> int:
        """A prompt that does not fit a step is divided at multiples of this alone, a power of two, so that
        its parts do not depend on what else is in a step. Beside all other sequences one such part fits."""
        fits = self.max_num_tokens - self.max_batch_size + 1
        return 1 << min(MAX_CHUNK, fits).bit_length() - 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of a step that decodes: one of each sequence, and those of drafts."""
        drafted = max(self.max_draft_len, self.max_batch_size) if self.max_draft_len else 0
        return min(self.max_num_tokens, self.max_batch_size + drafted)


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts in some layers of a decoder."""

    num_experts: int
    top_k: int  # experts of each token
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts add up to 1
    layers: frozenset[int]  # that have experts; the others have a plain MLP
    shared_intermediate_size: int = 0  # of the expert that every token takes; 0: none
    shared_gated: bool = True  # that one has a gate of its own
    latent_size: int = (
        0  # of what routed experts read and give, between two linear layers; 0: the hidden size
    )
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    transposed: bool = False  # a checkpoint's matrices of all experts are [in, out]
    either_way: bool = False  # but some checkpoints have them [out, in]: the shape says which
    biased: bool = False  # the router and the experts' matrices have biases
    gated: bool = True  # up is multiplied with the activation of a gate; else the activation is on up
    # The experts' matrices are kept [in, out], columns of gate and up in turn; PEFT's rows are in that order.
    interleaved: bool = False
    beside_mlp: bool = (
        False  # those layers have a plain MLP too; each has norms of its own, and they are added
    )
    swiglu: tuple[float, float] | None = None  # alpha and limit of a clamped one; None: the activation


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder-decoder model, and how its decoder begins. Both have the same sizes."""

    num_layers: int  # of the encoder; they come before the decoder's
    decoder_start_id: int  # the decoder's prompt, when a request brings none
    forced_bos_id: int | None = None  # the only token that may follow a decoder prompt of one token
    post_norm: bool = False  # norms are on the sums, not on what attention and MLP get
    relative_buckets: int = 0  # > 0: a bias by the distance of query and key, in place of any positions
    relative_max_distance: int = 128  # tokens; all that are farther share a bucket


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, from its config.json. Sizes in elements, global (not per rank)."""

    architecture: str  # e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # of an encoder-decoder model, of both
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    dtype: str  # of the checkpoint: float32, float16, bfloat16
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    layer_shapes: tuple[LayerShape, ...] = ()  # per layer, in place of the fields above; empty: all are alike
    # positions
    learned_positions: bool = False  # a table added to the embedding, in place of rotary ones
    position_offset: int = 0  # rows of that table before the one of position 0
    rope_scaling: Mapping[str, Any] | None = None
    rope_local_theta: float | None = None  # of layers with a window, unscaled; None: as the other layers
    rope_restarts: bool = False  # when a sequence outgrows rope_limit, all of it is computed again
    partial_rotary_factor: float = 1.0  # the share of head_dim that is rotated, from its start
    rope_interleaved: bool = False  # neighbours are rotated together, not the two halves' elements
    unrotated_layers: frozenset[int] = frozenset()  # that know no positions
    # norms
    # rms, layer; with _plus_one, its weight is 1 + the stored one; with _wide, it is multiplied in float32
    norm: str = "rms"
    norm_bias: bool = True  # of LayerNorm
    first_norm: bool = True  # before the attention of the first layer
    # of q and k before rotary: head (over head_dim), each (so, with weights for each head and no biases), all
    # (over all heads at once), plain (over head_dim, without weights, where they are rotated), or none
    qk_norm: str = ""
    v_norm: bool = False  # values of each head are normalised too, without weights
    # attention
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each head has one more score, which is learned
    qkv_clip: float | None = None  # the largest magnitude in q, k and v, after their norms
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    # Per layer, the one whose keys and values it reads; below 0: one before the first, whose keys and values
    # the cache has too; empty: its own.
    kv_sources: tuple[int, ...] = ()
    # Then num_kv_heads is 1 and head_dim what the cache has of a token.
    latent: LatentConfig | None = None
    attention_chunk: int | None = None  # layers that are rotated see keys of a query's own chunk of so many
    unrotated_growth: tuple[float, int] | None = (
        None  # (b, n): as query_growth, from p + 1, where not rotated
    )
    attention_gated: bool = False  # q's matrix gives each head a gate of its output too, after its query
    keys_are_values: bool = False  # there is no v: what k gives, before its norm, is the values too
    qkv_groups: int = 1  # a fused matrix of the checkpoint is so many [q; k; v], one after another
    # MLP
    activation: str = "silu"  # silu, gelu, gelu_tanh, relu, relu2 (its square)
    gated_mlp: bool = True
    sparsity: tuple[float, ...] = ()  # per layer, the share of the gate that is cut to 0; empty: none
    mlp_bias: bool = False
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # on what the activation of the gate gets, and on the output
    moe: MoeConfig | None = None
    recurrent: RecurrentConfig | None = None  # None: every layer has attention
    beside: BesideConfig | None = None  # recurrent layers have attention too
    unmixed_layers: frozenset[int] = frozenset()  # that have neither, but an MLP or experts alone
    mlpless_layers: frozenset[int] = frozenset()  # that have attention or a recurrent layer alone
    encoder: EncoderConfig | None = None  # None: a decoder alone
    layer_inputs: LayerInputsConfig | None = None  # None: layers get the residual stream alone
    altup: AltUpConfig | None = None  # None: there is one residual stream
    # how the parts are put together
    parallel_blocks: bool = False  # attention and MLP read the same input, their outputs are added
    shared_norm: bool = False  # of parallel blocks: one norm for both
    scales_vectors: bool = False  # whether embedding_scale is for vectors in place of tokens too
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what attention and MLP add
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    num_labels: int = 0  # of the checkpoint's classification head; 0: it has none
    # Of a model for text that gives a score: the tokens against and for, whose logits' difference it is.
    score_tokens: tuple[int, int] | None = None
    makes_text: bool = True  # the checkpoint has a head for text
    bidirectional: bool = False  # an encoder alone: its tokens see each other
    head_layer: HeadLayerConfig | None = None  # of an encoder
    padding_id: int | None = None  # such tokens share the position before the first, and are not counted
    token_types: int = 0  # rows of a table by which the tokens of two texts differ
    post_norm: bool = False  # a block's norms are on the sums with its input, not on what its parts get
    projected_size: int | None = None  # of the embedding and the head, which linear layers lead from and to
    transposed_weights: bool = False  # the checkpoint's matrices are [in, out]
    quant: CheckpointQuant | None = None  # how its weights are quantised; None: plain, or built here

    def of_layer(self, layer: int) -> ModelConfig:
        """The model as if all layers were as this one."""
        if not self.layer_shapes:
            return self
        return replace(self, layer_shapes=(), **vars(self.layer_shapes[layer]))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Of q's matrix."""
        return self.q_size * (2 if self.attention_gated else 1)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_planes(self) -> int:
        """Keys and values; of latent attention there is one vector for both."""
        return 2 if self.latent is None else 1

    @property
    def recurrent_layers(self) -> frozenset[int]:
        return frozenset() if self.recurrent is None else self.recurrent.layers

    @property
    def kv_readers(self) -> frozenset[int]:
        """Layers that have no keys and values of their own: they read those of an earlier layer."""
        return frozenset(layer for layer, source in enumerate(self.kv_sources) if source != layer)

    @property
    def attention_layers(self) -> frozenset[int]:
        others = frozenset() if self.beside else self.recurrent_layers
        return frozenset(range(self.num_layers)) - others - self.unmixed_layers

    @property
    def mlp_layers(self) -> frozenset[int]:
        """That have a plain MLP."""
        sparse = frozenset() if self.moe is None or self.moe.beside_mlp else self.moe.layers
        return frozenset(range(self.num_layers)) - self.mlpless_layers - sparse

    @property
    def kv_layers(self) -> int:
        """Layers whose keys and values are in the cache: those of the decoder that have some."""
        if self.bidirectional:
            return 1  # which nothing is written to
        if self.encoder:
            return self.num_layers - self.encoder.num_layers
        return len(self.attention_layers - self.kv_readers) + len(self.kv_before)

    @property
    def kv_before(self) -> tuple[int, ...]:
        """Layers before the first whose keys and values are in the cache, behind those of these layers."""
        return tuple(sorted({source for source in self.kv_sources if source < 0}))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of a token in the cache, (planes, heads, elements of a head) for each of `kv_layers`."""
        if not self.layer_shapes:
            return ((self.kv_planes, self.num_kv_heads, self.head_dim),) * self.kv_layers
        layers = [layer for layer in range(self.num_layers) if layer not in self.kv_readers]
        layers += [self.kv_sources.index(source) for source in self.kv_before]  # whose readers are alike
        own = (self.layer_shapes[layer] for layer in layers)
        return tuple((self.kv_planes, one.num_kv_heads, one.head_dim) for one in own)

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """(b, n): queries at position p are multiplied by 1 + b * log(1 + p // n). None: they are not."""
        scaling = self.rope_scaling or {}
        if not scaling.get("llama_4_scaling_beta"):
            return None
        return float(scaling["llama_4_scaling_beta"]), int(scaling["original_max_position_embeddings"])

    @property
    def rope_limit(self) -> int | None:
        """Tokens beyond which the length of a sequence decides how its tokens are rotated; None: it never
        does."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") == "longrope":
            return int(scaling["original_max_position_embeddings"])
        return self.max_position_embeddings if scaling.get("rope_type") == "dynamic" else None

    def rope_length(self, num_prompt: int) -> int:
        """The length that rotates all tokens of such a prompt; 0: each token's own position does."""
        limit = self.rope_limit
        if limit is None or num_prompt <= limit:
            return 0
        return num_prompt if (self.rope_scaling or {})["rope_type"] == "dynamic" else limit + 1

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence: positions, stretched by the rotary scalings that say so."""
        return stretched(self.max_position_embeddings, self.rope_scaling or {})


def stretched(positions: int, scaling: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence under a rotary scaling of config.json."""
    kind, factor = scaling.get("rope_type") or scaling.get("type"), float(scaling.get("factor") or 1.0)
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    original = scaling.get("original_max_position_embeddings") or positions
    return max(positions, int(original * factor)) if kind == "yarn" else positions

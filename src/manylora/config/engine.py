"""EngineConfig (what the user sets) and ModelConfig (the shape of the checkpoint). Both are frozen."""

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
    """The two-level adapter cache. Sizes follow TensorRT-LLM's PeftCacheConfig and its Triton parameters."""

    optimal_adapter_size: int = 8  # rank at which an adapter fills about one page
    max_adapter_size: int = 64  # a page must hold at least one module's row of this rank
    gpu_memory_fraction: float = 0.05  # device level: share of the memory left after weights and KV cache
    gpu_memory_bytes: int | None = None  # device level in bytes; overrides the fraction
    host_memory_bytes: int = GIB
    num_device_module_layer: int = 0  # > 0: device level in (layer, module) rows of rank 1; overrides bytes
    num_host_module_layer: int = 0
    max_loras: int | None = None  # device level: adapters at the rank limit, with every target module
    max_cpu_loras: int | None = None  # host level: the same. Each overrides the other sizes of its level
    max_lora_rank: int | None = None  # adapters of a larger rank are refused; None: max_adapter_size
    target_modules: tuple[str, ...] = ()  # names such as attn_q; empty: all modules of the model
    prefetch_dir: Path | None = None
    catalog_dir: Path | None = None  # adapters by name: <dir>/<name>/
    names_file: Path | None = None  # JSON file with further names and their folders
    allowed_paths: tuple[Path, ...] = ()  # further folders that links in these two may point to
    lora_adapter_dtype: str = "auto"  # auto: the checkpoint's if the kernels can read it, else `dtype`
    text_only: bool = False  # serve only the text part of a vision adapter; else it is refused
    disk_cache_dir: Path | None = None  # copies of adapters, by digest; None: no disk level
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
        """Folders that may hold adapter files. Adapters sent with a request need none."""
        return (*filter(None, (self.prefetch_dir, self.catalog_dir)), *self.allowed_paths)

    @property
    def sizes_device(self) -> bool:
        """Whether the user chose a size for the device level."""
        fraction = self.gpu_memory_fraction != LoraCacheConfig.gpu_memory_fraction
        return fraction or bool(self.gpu_memory_bytes or self.num_device_module_layer or self.max_loras)

    @property
    def sizes_host(self) -> bool:
        """Whether the user chose a size for the host level."""
        size = self.host_memory_bytes != LoraCacheConfig.host_memory_bytes
        return size or bool(self.num_host_module_layer or self.max_cpu_loras)

    @property
    def rank_limit(self) -> int:
        """The largest rank an adapter may have."""
        return self.max_adapter_size if self.max_lora_rank is None else self.max_lora_rank


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. Raises ConfigError for a value that cannot work."""

    model_dir: Path
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: the checkpoint's; float32 on a CPU without native support for it
    max_batch_size: int = 64  # sequences in one step; each beam counts as one
    max_beam_width: int = 1
    tokenizer_dir: Path | None = None  # for guided decoding; None: such requests are refused
    max_num_tokens: int = 2048  # tokens in one step
    max_seq_len: int | None = None  # prompt + output tokens; None: what the model allows
    tokens_per_block: int = 32
    kv_cache_free_gpu_mem_fraction: float = 0.9
    gpu_memory_utilization: float | None = None  # share of the device's memory for everything; None: no limit
    max_tokens_in_paged_kv_cache: int | None = None
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    batch_scheduler_policy: str = "guaranteed_no_evict"
    max_queue_size: int = 0  # waiting requests; 0: no limit
    quant: QuantConfig | None = None  # quantise the weights; None: leave them as stored
    stream_interval: int = 1  # new tokens per streamed event; the first is sent at once
    wrap_input_ids: bool = False  # wrap ids beyond the vocabulary (modulo) instead of refusing them
    enable_cuda_graph: bool | None = None  # replay decode steps as CUDA graphs; None: if supported
    cuda_graph_cache_size: int = 0  # number of graphs kept; 0: 128
    enable_overlap: bool | None = None  # schedule a step while the previous one runs; None: on a GPU
    tensor_parallel_size: int = 1  # ranks that share each layer
    pipeline_parallel_size: int = 1  # groups of such ranks, each with a part of the layers
    moe_expert_parallel_size: int = 1  # tensor-parallel ranks among which whole experts are divided
    max_draft_len: int = 0  # longest n-gram draft, in tokens; 0: no drafts
    max_matching_ngram_size: int = 4  # longest n-gram at a sequence's end to look up
    min_matching_ngram_size: int = 2  # shortest n-gram
    ngram_use_oldest: bool = True  # draft from the n-gram's first occurrence; False: its last
    max_draft_concurrency: int = 0  # no drafts with more running sequences than this; 0: no limit
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
        """Ranks: the processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chunk_tokens(self) -> int:
        """Where a prompt that does not fit one step is split: at multiples of this, a power of two.

        A prompt's chunks therefore do not depend on the other sequences in a step. One chunk always fits a
        step beside all other sequences.
        """
        fits = self.max_num_tokens - self.max_batch_size + 1
        return 1 << min(MAX_CHUNK, fits).bit_length() - 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of a decode step: one per sequence, plus the draft tokens."""
        drafted = max(self.max_draft_len, self.max_batch_size) if self.max_draft_len else 0
        return min(self.max_num_tokens, self.max_batch_size + drafted)


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts in some or all layers of a decoder."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # size of one expert
    norm_topk_prob: bool  # normalise the weights of a token's experts to sum to 1
    layers: frozenset[int]  # layers with experts; the others have a dense MLP
    shared_intermediate_size: int = 0  # size of the shared expert; 0: none
    shared_gated: bool = True  # whether the shared expert has a gate
    latent_size: int = 0  # width of routed experts, between a down and an up projection; 0: hidden size
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    transposed: bool = False  # the checkpoint stores expert matrices as [in, out]
    either_way: bool = False  # the checkpoint may store either; the shape decides
    biased: bool = False  # the router and the experts' matrices have biases
    gated: bool = True  # the activated gate multiplies up; else up itself is activated
    # Expert matrices are stored [in, out], with columns of gate and up alternating; PEFT's rows are in that
    # order.
    interleaved: bool = False
    beside_mlp: bool = (
        False  # layers with experts also have a dense MLP, with its own norms; outputs are added
    )
    swiglu: tuple[float, float] | None = None  # alpha and limit of a clamped SwiGLU; None: `activation`


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder-decoder model, and how decoding starts. Encoder and decoder have the same
    sizes.
    """

    num_layers: int  # encoder layers; they are numbered before the decoder's
    decoder_start_id: int  # decoder prompt of a request without one
    forced_bos_id: int | None = None  # forced first token after a one-token decoder prompt
    post_norm: bool = False  # norms follow the residual additions instead of preceding the blocks
    relative_buckets: int = 0  # > 0: relative position bias instead of positions
    relative_max_distance: int = 128  # tokens; larger distances share a bucket


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, from its config.json. Sizes in elements, for the whole model (not per rank)."""

    architecture: str  # e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # encoder and decoder layers together
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    dtype: str  # the checkpoint's: float32, float16, bfloat16
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    layer_shapes: tuple[LayerShape, ...] = ()  # per layer, overrides the fields above; empty: all equal
    # positions
    learned_positions: bool = False  # learned position embeddings instead of rotary ones
    position_offset: int = 0  # row of position 0 in that table
    rope_scaling: Mapping[str, Any] | None = None
    rope_local_theta: float | None = None  # theta of sliding-window layers, unscaled; None: as others
    rope_restarts: bool = False  # recompute the whole sequence when it outgrows rope_limit
    partial_rotary_factor: float = 1.0  # share of head_dim that is rotated, from its start
    rope_interleaved: bool = False  # rotate pairs of neighbours, not pairs across the two halves
    unrotated_layers: frozenset[int] = frozenset()  # layers without rotary positions
    # norms
    # rms or layer. _plus_one: the weight is 1 + the stored one. _wide: the weight is multiplied in float32.
    norm: str = "rms"
    norm_bias: bool = True  # whether LayerNorm has a bias
    first_norm: bool = True  # whether the first layer has a norm before attention
    # Norm of q and k before rotary: head (over head_dim), each (over head_dim, with weights per head and no
    # biases), all (over all heads at once), plain (over head_dim, without weights, in layers with rotary), or
    # none.
    qk_norm: str = ""
    v_norm: bool = False  # also normalise the values of each head, without weights
    # attention
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each head has one additional learned score
    qkv_clip: float | None = None  # clamp q, k and v to this magnitude, after their norms
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    # Per layer, the layer whose keys and values it reads. Below 0: one before the first layer, whose keys and
    # values are in the cache, too. Empty: each layer reads its own.
    kv_sources: tuple[int, ...] = ()
    # If set, num_kv_heads is 1 and head_dim is the size of a token in the cache.
    latent: LatentConfig | None = None
    attention_chunk: int | None = None  # rotary layers attend within chunks of this many
    unrotated_growth: tuple[float, int] | None = (
        None  # (b, n): as query_growth, from p + 1, where not rotated
    )
    attention_gated: bool = False  # q's matrix also gives an output gate per head
    keys_are_values: bool = False  # there is no v: values are k's output before its norm
    qkv_groups: int = 1  # [q; k; v] groups stacked in the checkpoint's fused matrix
    # MLP
    activation: str = "silu"  # silu, gelu, gelu_tanh, relu, relu2 (its square)
    gated_mlp: bool = True
    sparsity: tuple[float, ...] = ()  # per layer, share of the gate that is set to 0; empty: none
    mlp_bias: bool = False
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # factors on the gate before activation, and on the output
    moe: MoeConfig | None = None
    recurrent: RecurrentConfig | None = None  # None: every layer has attention
    beside: BesideConfig | None = None  # recurrent layers also have attention
    unmixed_layers: frozenset[int] = frozenset()  # layers with neither, only an MLP or experts
    mlpless_layers: frozenset[int] = frozenset()  # layers without an MLP
    encoder: EncoderConfig | None = None  # None: decoder only
    layer_inputs: LayerInputsConfig | None = None  # None: layers get only the residual stream
    altup: AltUpConfig | None = None  # None: one residual stream
    # how the parts are put together
    parallel_blocks: bool = False  # attention and MLP read the same input; their outputs are added
    shared_norm: bool = False  # parallel blocks share one norm
    scales_vectors: bool = False  # embedding_scale also applies to vectors that replace tokens
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    num_labels: int = 0  # labels of the checkpoint's classification head; 0: no head
    # For a text model that scores: tokens against and for. The score is the difference of their logits.
    score_tokens: tuple[int, int] | None = None
    makes_text: bool = True  # whether the checkpoint has a language-model head
    bidirectional: bool = False  # encoder only: all tokens attend to each other
    head_layer: HeadLayerConfig | None = None  # of an encoder-only model
    padding_id: int | None = None  # these tokens share the position before the first and are not counted
    token_types: int = 0  # rows of the token-type table, which tells two texts apart
    post_norm: bool = False  # norms follow the residual additions
    projected_size: int | None = None  # width of embedding and head; linear layers project from and to it
    transposed_weights: bool = False  # the checkpoint stores matrices as [in, out]
    quant: CheckpointQuant | None = None  # how the checkpoint is quantised; None: not, or by manylora build

    def of_layer(self, layer: int) -> ModelConfig:
        """The model with this layer's overrides applied to all layers."""
        if not self.layer_shapes:
            return self
        return replace(self, layer_shapes=(), **vars(self.layer_shapes[layer]))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q's matrix."""
        return self.q_size * (2 if self.attention_gated else 1)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_planes(self) -> int:
        """2: keys and values. 1 with latent attention, which has one vector for both."""
        return 2 if self.latent is None else 1

    @property
    def recurrent_layers(self) -> frozenset[int]:
        return frozenset() if self.recurrent is None else self.recurrent.layers

    @property
    def kv_readers(self) -> frozenset[int]:
        """Layers without keys and values of their own: they read those of an earlier layer."""
        return frozenset(layer for layer, source in enumerate(self.kv_sources) if source != layer)

    @property
    def attention_layers(self) -> frozenset[int]:
        others = frozenset() if self.beside else self.recurrent_layers
        return frozenset(range(self.num_layers)) - others - self.unmixed_layers

    @property
    def mlp_layers(self) -> frozenset[int]:
        """Layers with a dense MLP."""
        sparse = frozenset() if self.moe is None or self.moe.beside_mlp else self.moe.layers
        return frozenset(range(self.num_layers)) - self.mlpless_layers - sparse

    @property
    def kv_layers(self) -> int:
        """Number of decoder layers whose keys and values are in the cache."""
        if self.bidirectional:
            return 1  # nothing is written to it
        if self.encoder:
            return self.num_layers - self.encoder.num_layers
        return len(self.attention_layers - self.kv_readers) + len(self.kv_before)

    @property
    def kv_before(self) -> tuple[int, ...]:
        """Layers before the first that are in the cache, after the model's own."""
        return tuple(sorted({source for source in self.kv_sources if source < 0}))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(planes, heads, elements per head) of a token in the cache, for each of `kv_layers`."""
        if not self.layer_shapes:
            return ((self.kv_planes, self.num_kv_heads, self.head_dim),) * self.kv_layers
        layers = [layer for layer in range(self.num_layers) if layer not in self.kv_readers]
        layers += [self.kv_sources.index(source) for source in self.kv_before]  # a reader has the same shape
        own = (self.layer_shapes[layer] for layer in layers)
        return tuple((self.kv_planes, one.num_kv_heads, one.head_dim) for one in own)

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """(b, n): queries at position p are multiplied by 1 + b * log(1 + p // n). None: no such factor."""
        scaling = self.rope_scaling or {}
        if not scaling.get("llama_4_scaling_beta"):
            return None
        return float(scaling["llama_4_scaling_beta"]), int(scaling["original_max_position_embeddings"])

    @property
    def rope_limit(self) -> int | None:
        """Length in tokens beyond which a sequence's length changes how its tokens are rotated. None: it
        never does.
        """
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") == "longrope":
            return int(scaling["original_max_position_embeddings"])
        return self.max_position_embeddings if scaling.get("rope_type") == "dynamic" else None

    def rope_length(self, num_prompt: int) -> int:
        """The length that determines the rotation of all tokens of such a prompt. 0: only each token's
        position does.
        """
        limit = self.rope_limit
        if limit is None or num_prompt <= limit:
            return 0
        return num_prompt if (self.rope_scaling or {})["rope_type"] == "dynamic" else limit + 1

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens: the model's positions, extended by rotary scaling if it has one."""
        return stretched(self.max_position_embeddings, self.rope_scaling or {})


def stretched(positions: int, scaling: Mapping[str, Any]) -> int:
    """Longest sequence in tokens under a rotary scaling of config.json."""
    kind, factor = scaling.get("rope_type") or scaling.get("type"), float(scaling.get("factor") or 1.0)
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    original = scaling.get("original_max_position_embeddings") or positions
    return max(positions, int(original * factor)) if kind == "yarn" else positions

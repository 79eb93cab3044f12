"""Decoder: one transformer for all models with one stack of layers, which differ in their ModelConfig. If
`bidirectional`, it is an encoder: tokens attend to each other, and nothing is cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.adapters.modules import LoraModuleId
from manylora.config.model import ModelConfig
from manylora.kernels.compiled import GATES
from manylora.kernels.decode_step import DecoderParts, LayerParts, LinearParts
from manylora.kernels.panels import Panels
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, LoraBatch, Weight
from manylora.model.altup import AltUpBlock, Streams
from manylora.model.attend import RelativeBias
from manylora.model.batch import ForwardBatch, HiddenRows, KvTensors, passing_states
from manylora.model.decoder_layers import DecoderLayers
from manylora.model.extras import adapt_head, adapt_prompt
from manylora.model.families import FAMILIES
from manylora.model.layers import (
    Attention,
    Block,
    LayerInputs,
    LogitRows,
    Mlp,
    Norm,
    Rotation,
    side_by_side,
)
from manylora.model.rope import RotaryTable, make_rope

MAX_DISTANCE = 128  # tokens; larger distances share a bucket of an encoder's relative bias


def in_chunks(batch: AttentionBatch, size: int, kv: Tensor) -> tuple[AttentionBatch, Tensor]:
    """Split each sequence into chunks of `size` tokens that attend separately, as if they were sequences. The
    cache [layers, planes, blocks, tokens, heads, dim] returned with them has blocks that do not span chunks.
    """
    if max(batch.kv_lens) <= size:
        return batch, kv
    starts, lengths, sequences, firsts = [0], [], [], []
    for s, kv_len in enumerate(batch.kv_lens):
        row, stop = batch.query_starts[s], batch.query_starts[s + 1]
        position = kv_len - (stop - row)
        while row < stop:
            first = position // size * size
            end = min(first + size, kv_len)
            row, position = row + end - position, end
            starts.append(row)
            lengths.append(end - first)
            sequences.append(s)
            firsts.append(first)
    tokens = math.gcd(size, kv.shape[3])
    parts = kv.shape[3] // tokens
    device = batch.block_table.device
    table = (batch.block_table.unsqueeze(-1) * parts + torch.arange(parts, device=device)).flatten(1)
    columns = torch.tensor(firsts).unsqueeze(1) // tokens + torch.arange(size // tokens)
    columns = columns.clamp_(max=table.shape[1] - 1).to(device)  # nothing is read past the end
    rows = torch.tensor(sequences, device=device).unsqueeze(1)
    chunks = AttentionBatch(starts, lengths, table[rows, columns].int(), batch.slots)
    return chunks, kv.view(*kv.shape[:2], -1, tokens, *kv.shape[4:])


def decoder_parts(
    config: ModelConfig,
    blocks: Sequence[Block | AltUpBlock],
    norm: Norm,
    head: Weight,
    head_bias: Tensor | None,
    embedding: Tensor | Panels | None,
) -> DecoderParts | None:
    """None if not all layers are attention and gated MLP with RMS norms. embedding: as `_plain_embedding`."""
    more = (config.qkv_clip, config.recurrent, config.layer_inputs, norm.bias)
    flags = (
        config.parallel_blocks, config.attention_chunk, config.unrotated_growth, config.attention_gated,
        config.layer_shapes, config.residual_scale != 1, config.qk_norm == "plain",
    )  # fmt: skip
    plain = [layer for layer in map(_layer, blocks) if layer is not None]
    if any(flags) or any(one is not None for one in more) or len(plain) < len(blocks):
        return None
    return DecoderParts(
        embedding=embedding,
        embedding_scale=config.embedding_scale,
        layers=tuple(plain),
        norm=norm.weight,
        head=LinearParts(head, head_bias),
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        inner=config.intermediate_size,
        norm_heads=config.qk_norm == "head",
        pairs=config.rope_interleaved,
        activation=GATES.index(config.activation),
        eps=config.norm_eps,
    )


def _layer(block: Block | AltUpBlock) -> LayerParts | None:
    attention, mlp = block.attention, block.mlp
    if isinstance(block, AltUpBlock) or not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        return None
    if attention.shares or not mlp.gated or mlp.activation not in GATES:
        return None
    if any(one is not None for one in (mlp.cutoff, attention.params.sinks, attention.v_norm)):
        return None
    norms = {
        "attention_norm": block.attention_norm,
        "attention_post_norm": block.attention_post_norm,
        "mlp_norm": block.mlp_norm,
        "mlp_post_norm": block.mlp_post_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
    }
    if any(norm is not None and norm.bias is not None for norm in norms.values()):
        return None
    weights = {name: None if norm is None else norm.weight for name, norm in norms.items()}
    linears = (attention.qkv, attention.out, mlp.up_gate, mlp.down)
    qkv, out, up_gate, down = (LinearParts(one.weight, one.bias, one.targets) for one in linears)
    return LayerParts(weights, (qkv, out, up_gate, down), attention.params, attention.rotary)


class Decoder(DecoderLayers):
    """Takes the arguments of Transformer."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Any], dtype: torch.dtype, ops: ReferenceOps
    ) -> None:
        super().__init__(config, weights, dtype, ops)
        self._names = FAMILIES[config.architecture].names(config)
        norm = self._norm("norm", "norm")
        if config.post_norm:
            norm = self._layer_norm(config.num_layers - 1, "mlp_norm")
        assert norm is not None
        self._final_norm = norm
        self._project_in = self._project_out = None
        if size := config.projected_size:
            self._project_in = self._one(0, "project_in", LoraModuleId.PROJECT_IN)
        if size and not config.bidirectional:
            self._project_out = self._one(0, "project_out", LoraModuleId.PROJECT_OUT, size)
        self._embedding_norm = self._norm("embedding_norm", "embedding_norm")
        self._relative_bias: RelativeBias | None = None
        if config.relative_buckets:
            longest = config.max_position_embeddings
            self._relative_bias = RelativeBias(weights["relative"], MAX_DISTANCE, longest, both_ways=True)
        self._recurrent = {layer: self._recurrent_layer(layer) for layer in sorted(config.recurrent_layers)}
        self._blocks = [self._block(layer) for layer in range(config.num_layers)]
        if config.bidirectional:  # nothing is cached
            self._places = dict.fromkeys(config.attention_layers, 0)
        else:  # of each layer's keys and values in the cache
            own = [*sorted(config.attention_layers - config.kv_readers), *config.kv_before]
            self._places = {layer: place for place, layer in enumerate(own)}
            self._places |= {layer: self._places[config.kv_sources[layer]] for layer in config.kv_readers}
        self._state_places = {layer: place for place, layer in enumerate(self._recurrent)}
        self._layer_inputs = self._make_layer_inputs(config.layer_inputs)
        self._streams: Streams | None = None
        if config.altup is not None:
            others, linear, module = range(config.altup.streams - 1), self._outer_linear, LoraModuleId
            enter = (linear(n, f"altup.enter.{n}", module.ALTUP_PROJECTIONS) for n in others)
            leave = (linear(n, f"altup.leave.{n}", module.ALTUP_UNEMBED_PROJECTIONS) for n in others)
            self._streams = Streams(tuple(enter), tuple(leave))
        self._rotary: list[RotaryTable] = []
        if not config.learned_positions:
            ropes = [make_rope(self._rotated(0), self._device)]
            if config.rope_local_theta is not None:
                ropes.append(make_rope(self._rotated(1), self._device, local=True))
            self._rotary = [RotaryTable(rope, dtype, self._device) for rope in ropes]

        self._decode_step = None
        self._last: tuple[ForwardBatch, KvTensors] | None = None  # of the last compiled step
        parts = decoder_parts(
            config, self._blocks, norm, self._head, self._head_bias, self._plain_embedding()
        )
        if parts is not None and dtype == torch.float32 and not config.bidirectional:
            self._decode_step = ops.decode_step(parts)

    def forward(self, batch: ForwardBatch, kv: KvTensors, states: RecurrentState | None = None) -> Tensor:
        """Logits [L, vocab] float32 of `batch.logits_rows`. Writes keys and values to kv. On a CPU, passing
        the last call's batch again, with new contents, is much faster, and may overwrite the previous logits.
        """
        found = self._in_one_call(batch, kv)
        logits, best = found or (self._in_layers(batch, kv, states), None)
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        if scale == 1 and cap is None:
            batch.best.tokens = best
            return logits
        batch.best.tokens = None
        with torch.inference_mode():
            logits = logits * scale if scale != 1 else logits
            return logits if cap is None else torch.tanh(logits / cap) * cap

    def forget(self) -> None:
        """Hold no tensors of earlier batches any more, the KV cache among them."""
        self._last = None
        if self._decode_step is not None:
            self._decode_step.forget()

    def _in_one_call(self, batch: ForwardBatch, kv: KvTensors) -> tuple[Tensor, Tensor] | None:
        """None if the layers must be called one by one."""
        step, last = self._decode_step, self._last
        if step is None or not isinstance(kv, Tensor) or batch.pooled is not None:
            return None
        if self._growth(batch) is not None:
            return None
        if last is not None and last[0] is batch and last[1] is kv:
            found = step.again()
            if found is not None:
                return found
        self._last = (batch, kv) if step.embeds and batch.embeddings is None else None
        x = self._embed(batch) if self._last is None else batch.input_ids
        rotary = [table.placed(batch.positions, batch.rope_lengths) for table in self._rotary]
        return step(x, rotary, batch.attention, batch.lora, kv, batch.logits_rows)

    @torch.inference_mode()
    def _in_layers(self, batch: ForwardBatch, kv: KvTensors, states: RecurrentState | None) -> Tensor:
        x, growth = self._embed(batch), self._growth(batch)
        rotary = [table(batch.positions, batch.rope_lengths) for table in self._rotary]
        unrotated_growth = growth
        if self.config.unrotated_growth is not None:
            rate, length = self.config.unrotated_growth
            grown = 1 + rate * torch.log1p(torch.floor((batch.positions + 1) / length))
            unrotated_growth = grown.to(self.dtype).view(-1, 1, 1)
        bias = None
        if self._relative_bias is not None:  # for the longest prompt
            longest = max(stop - start for start, stop in pairwise(batch.attention.query_starts))
            places = torch.arange(longest, device=self._device)
            bias = self._relative_bias(places - places.unsqueeze(1)).to(self.dtype)
        rotations = [Rotation(None, unrotated_growth, bias), *(Rotation(one, growth) for one in rotary)]
        own = None if self._layer_inputs is None else self._vectors(self._layer_inputs, x, batch)
        return self._layers(x, rotations, batch, kv, states, own)

    def _layers(
        self,
        x: Tensor,
        rotations: list[Rotation],
        batch: ForwardBatch,
        kv: KvTensors,
        states: RecurrentState | None,
        inputs: Tensor | None,
    ) -> Tensor:
        """rotations: none, then each of the model's. inputs: for layers with vectors of their own."""
        delta: Tensor | None = None  # the last block's output, not added to x yet
        x = self._enter(x, batch, kv)
        whole, chunk = batch.attention, self.config.attention_chunk
        within, kv_within = whole, kv
        if chunk is not None:
            assert isinstance(kv, Tensor), "layers that attend in chunks are alike"
            within, kv_within = in_chunks(whole, chunk, kv)
        own, rows, lora = self.config.recurrent, batch.state, batch.lora
        if own is not None and (rows is None or states is None):
            states, rows = passing_states(own, whole.query_starts, self._device)
        wanted = self._wanted(batch)
        for layer, block in enumerate(self._blocks):
            attention, recurrent = block.attention, self._recurrent.get(layer)
            mix: Callable[[Tensor], Tensor] | None = None
            if attention is not None:
                rotary, place = attention.rotary, self._places[layer]
                seen, cache = (within, kv_within) if rotary >= 0 else (whole, kv)
                mix = partial(
                    attention, rotation=rotations[rotary + 1], batch=seen, lora=lora, kv=cache[place]
                )
            if recurrent is not None:
                assert states is not None and rows is not None
                state = states.layer(self._state_places[layer])
                own_mix = partial(recurrent, lora=lora, state=state, batch=rows)
                mix = own_mix if mix is None else side_by_side(self.config.beside, mix, own_mix)
            vectors = None if inputs is None else inputs[layer]
            x, delta = block(x, delta, mix, lora, vectors, wanted if block is self._blocks[-1] else None)
        if wanted is not None:
            return self._apply_head(self._hidden(x, delta, torch.arange(len(x)), wanted.lora), None)
        return self._leave(x, delta, batch, kv, inputs)

    def _vectors(self, made_by: LayerInputs, x: Tensor, batch: ForwardBatch) -> Tensor:
        return made_by(ids_of(batch), x, batch.lora)

    def _enter(self, x: Tensor, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        return x if self._streams is None else self._streams.split(x, batch.lora)

    def _leave(
        self, x: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: KvTensors, inputs: Tensor | None
    ) -> Tensor:
        if self._streams is not None:
            x = self._streams.merge(x, batch.lora)
        if batch.pooled is not None:
            self._pool(x, delta, batch.pooled, batch.lora)
        return self._logits(x, delta, batch)

    def _wanted(self, batch: ForwardBatch) -> LogitRows | None:
        """Those that the last layer computes after its attention. None: all, as extras may need them."""
        rows, lora = batch.logits_rows, batch.lora
        if self._device.type != "cpu" or batch.pooled is not None or self._streams is not None:
            return None
        if not 0 < len(rows) < len(batch.input_ids) or (lora is not None and lora.extras):
            return None
        if lora is None:
            return LogitRows(rows, None)
        few = lora.among(rows.tolist())
        return None if few is None else LogitRows(rows, few if few.segments else None)

    def _pool(self, x: Tensor, delta: Tensor | None, pooled: HiddenRows, lora: LoraBatch | None) -> None:
        pooled.hidden = self._hidden(x, delta, pooled.rows, lora)

    def _hidden(self, x: Tensor, delta: Tensor | None, rows: Tensor, lora: LoraBatch | None) -> Tensor:
        """After the final norm and optional projection: [P, hidden or projected_size] of rows [P]."""
        if self._project_out is not None:  # its adapters apply to all rows
            assert delta is not None
            return self._project_out(self._final_norm.add(x, delta, lora)[1], lora)[rows]
        if delta is None:
            adapted = lora is not None and bool(lora.extras)
            return self._final_norm(x, lora)[rows] if adapted else self._final_norm(x[rows])
        if lora is None or not lora.extras:
            return self._final_norm.add(x[rows], delta[rows])[1]
        return self._final_norm.add(x, delta, lora)[1][rows]

    def _growth(self, batch: ForwardBatch) -> Tensor | None:
        """Factors on queries, [T, 1, 1]. On a CPU None if no position is large enough to matter."""
        config = self.config
        if config.query_growth is None:
            return None
        rate, length = config.query_growth
        if self._device.type == "cpu" and max(batch.attention.kv_lens) <= length:
            return None
        growth = 1 + rate * torch.log(1 + torch.floor(batch.positions / length))
        return growth.to(self.dtype).view(-1, 1, 1)

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        lora = batch.lora
        if not len(batch.logits_rows):  # as for an encoder, which has no language-model head
            return torch.empty((0, self.config.vocab_size), device=self._device)
        return self._apply_head(self._hidden(x, delta, batch.logits_rows, lora), lora)

    def _apply_head(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """Logits of rows after the final norm. x [L, hidden] -> [L, vocab] float32."""
        logits = self._head_rows(x, self._head_bias)
        if logits is None:
            return torch.empty((0, self.config.vocab_size), device=self._device)
        if lora is not None and lora.extras:
            adapt_head(logits, x, lora.extras, self._head_bias, self.config.tie_word_embeddings)
        return logits

    def _plain_embedding(self) -> Tensor | Panels | None:
        """The table whose rows, only scaled, are the first layer's input. None: it is not as simple."""
        table = self._weights["embed"]
        more = (self._project_in, self._embedding_norm, self._streams, self._weights.get("positions"))
        if any(one is not None for one in more):
            return None
        if isinstance(table, Panels):
            return table
        plain = table.is_contiguous() and table.dtype in (torch.float32, torch.bfloat16)
        return table if plain else None

    @torch.inference_mode()
    def _embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding scale applies to tokens only: a request's own vectors are used unchanged."""
        x = self._embed_tokens(batch, self._weights["embed"], "embed")
        if batch.embeddings is not None:
            x[batch.embeddings[0]] = batch.embeddings[1]
        if batch.lora is not None and batch.lora.extras:
            scale = self._embedding_scale if self.config.scales_vectors else None
            adapt_prompt(x, batch.lora.extras, scale)
        project, is_encoder = self._project_in, self.config.bidirectional
        x = x if project is None or is_encoder else project(x, batch.lora)
        if self.config.token_types:  # they tell two texts of a prompt apart
            types = torch.zeros_like(batch.input_ids) if batch.token_types is None else batch.token_types
            types = types.clamp(max=self.config.token_types - 1)
            x = x + F.embedding(types, self._weights["token_types"])
        positions = self._weights.get("positions")
        if positions is not None:
            rows, padding = batch.positions, self.config.padding_id
            if padding is not None:  # in an encoder, a padding token uses the first row
                counted = batch.input_ids != padding
                spans = pairwise(batch.attention.query_starts)
                rows = torch.cat([counted[start:stop].cumsum(0) for start, stop in spans]) * counted
            x = x + F.embedding(rows, positions)
        x = x if self._embedding_norm is None else self._embedding_norm(x, batch.lora)
        return project(x, batch.lora) if project is not None and is_encoder else x

    def _rotated(self, rotary: int) -> ModelConfig:
        blocks = enumerate(self._blocks)
        layers = (
            n for n, block in blocks if block.attention is not None and block.attention.rotary == rotary
        )
        return self.config.of_layer(next(layers, 0))


def ids_of(batch: ForwardBatch) -> Tensor:
    """Token ids of the rows. 0 for a row whose token is replaced by a vector."""
    if batch.embeddings is None:
        return batch.input_ids
    return batch.input_ids.index_fill(0, batch.embeddings[0], 0)

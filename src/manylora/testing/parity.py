"""Parity: the decoder beside transformers + PEFT, for every family, kind of adapter and source.

`python -m manylora.testing.parity` prints what agrees and what is refused as the tables of docs/models.md.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.config.engine import ModelConfig
from manylora.errors import ManyloraError
from manylora.kernels.device import open_device
from manylora.kernels.extras import Extra, ExtraSegment
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraRow, LoraSegment
from manylora.lora.convert_nemo import write_runtime_tensors
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.llgtrt import write_llgtrt
from manylora.lora.formats.npy import write_npy
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.library.reader import read_adapter_folder
from manylora.lora.modules import lora_modules
from manylora.model.batch import ForwardBatch
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.effective_weights import HeldWeights
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.weights import load_decoder
from manylora.quant.config import SERVED, QuantConfig
from manylora.request import LoraExtra, LoraInput
from manylora.testing.tiny_models import (
    ENCODER_DECODER_FAMILIES,
    FAMILIES,
    make_adapter,
    make_model,
    make_nemo,
    make_wide,
    reference_logits,
)

__all__ = ["KINDS", "Driver", "agree", "linear_names", "main", "make_kind", "read_from", "read_nemo_from"]

BLOCK, BLOCKS = 8, 128
LONGEST = 60
TEXT = 37  # tokens that an encoder reads
Tensors = tuple[np.ndarray, np.ndarray]  # weights and config, as a request carries them
Given = Tensors | LoraInput | None  # an adapter, whole where it has extras; None: the base model
Shape = tuple[tuple[str, ...], str]  # names of the linear layers, attention's first; name of the layer list
# As the families call them; PEFT passes over names that a model does not have.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
NORMS = (
    "norm", "layernorm", "ln_1", "ln_2", "ln_attn", "ln_mlp", "ln_f", "layer_norm", "layernorm_embedding",
)  # fmt: skip
# What an adapter of PEFT is like, for a model of some shape.
KINDS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "LoRA": lambda _: {"rank": 5},
    "rank 1": lambda _: {"rank": 1},
    "rank 64": lambda shape: {"rank": 64, "modules": (shape[0][0], shape[0][-1])},
    "patterns": lambda shape: {"rank": 4, **_patterns(shape)},
    "some layers": lambda shape: {"rank": 6, "layers_to_transform": [1], "layers_pattern": shape[1]},
    "rsLoRA": lambda shape: {"rank": 9, "use_rslora": True, "rank_pattern": {shape[0][-1]: 2}},
    "DoRA": lambda _: {"rank": 6, "use_dora": True},
    "DoRA + rsLoRA + patterns": lambda shape: {
        "rank": 3,
        "use_dora": True,
        "use_rslora": True,
        **_patterns(shape),
    },
    "bias": lambda shape: {"rank": 4, "bias": "all", "modules": shape[0][1:]},
    "lora_bias": lambda _: {"rank": 4, "lora_bias": True},
    "DoRA + bias": lambda _: {"rank": 4, "bias": "lora_only", "use_dora": True},
    "embedding": lambda shape: {"rank": 4, "modules": (shape[0][0], *EMBEDDINGS)},
    "lm_head": lambda shape: {"rank": 4, "modules": (shape[0][0], "lm_head")},
    "both + DoRA": lambda shape: {
        "rank": 4,
        "modules": (shape[0][0], *EMBEDDINGS, "lm_head"),
        "use_dora": True,
    },
    "modules_to_save": lambda _: {"rank": 4, "modules_to_save": [*EMBEDDINGS, "lm_head"]},
    "norms saved": lambda _: {"rank": 4, "modules_to_save": list(NORMS)},
    "token indices": lambda _: {"rank": 4, "trainable_token_indices": list(range(248, 0, -3))},
}
REFUSED = "refused: "
SOURCES = ("peft", "npy", "llgtrt")
# Families whose linear layers are rounded at start. The reference has the rounded values.
QUANTISED = {f"llama {algo}": ("llama", QuantConfig(algo)) for algo in SERVED}
NEMO = "NeMo"  # its kind of adapter and its own sources: the archive, and what nemo_lora_convert makes of it
NEMO_SOURCES = ("nemo", "converted nemo")


def _patterns(shape: Shape) -> dict[str, Any]:
    names, layers = shape
    return {
        "rank_pattern": {names[0]: 3, f"{layers}.1.mlp.{names[-1]}": 17},
        "alpha_pattern": {names[-1]: 1, f"{layers}.0.*{names[0]}": 30},
    }


def linear_names(model: ModelConfig) -> Shape:
    """The last part of the name of each linear layer in PEFT, and the name of the list of layers."""
    names = ARCHITECTURES[model.architecture].names(model)
    linears = (*names.qkv, names.out, *names.up_gate, names.down)
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in linears)), names.layers


def make_kind(path: Path, model_dir: Path, kind: str, seed: int) -> Path:
    """An adapter of PEFT of one of KINDS, on all linear layers unless the kind says which."""
    shape = linear_names(read_model_config(model_dir))
    return make_adapter(path, model_dir, seed, **{"modules": shape[0], **KINDS[kind](shape)})


def read_from(source: str, adapter: Path, model_dir: Path, quant: QuantConfig | None = None) -> Tensors:
    """A PEFT adapter's tensors, through a source of SOURCES. quant: what the base is rounded to.

    Raises AdapterInvalidError."""
    config = read_model_config(model_dir)
    base = BaseWeights(model_dir, HeldWeights(config, quant))
    tensors = read_adapter_folder(adapter, base, lora_modules(config))
    if source == "peft":
        return tensors
    copy = adapter.with_name(f"{adapter.name}-{source}")
    if source == "npy":
        write_npy(copy, *tensors)
    else:
        write_llgtrt(copy / "adapter.safetensors", *tensors)
    return read_adapter_folder(copy)


def read_nemo_from(source: str, archive: Path, model_dir: Path) -> Tensors:
    """A NeMo archive's tensors, through a source of NEMO_SOURCES. Raises AdapterInvalidError."""
    modules = lora_modules(read_model_config(model_dir))
    if source == "nemo":
        return read_adapter_folder(archive, modules=modules)
    copy = archive.with_suffix(".npy")
    write_runtime_tensors(archive, copy, "float32")
    return read_adapter_folder(copy)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Within 1e-4 of the largest logit, and the same greedy token at each position."""
    near = (found - expected).abs().max() / expected.abs().max() < 1e-4
    return bool(near) and torch.equal(found.argmax(-1), expected.argmax(-1))


class Driver:
    """Feeds several sequences to a decoder in packed steps, blocks scattered, and keeps all logits. texts:
    what its encoder, if there is one, reads for each of them."""

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Given],
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        config = decoder.config
        shape = (config.kv_layers, 2, BLOCKS, BLOCK, config.num_kv_heads, config.head_dim)
        self._kv = torch.full(shape, float("nan"), dtype=decoder.dtype)
        self._decoder, self._sequences = decoder, sequences
        blocks = list(range(BLOCKS))
        random.Random(5).shuffle(blocks)
        self._blocks = [[blocks.pop() for _ in range(-(-len(s) // BLOCK))] for s in sequences]
        pool, self._rows = _lay_out(adapters, config)
        self._pool = pool.to(decoder.dtype)
        self._extras = [
            {e.name: _scatter(e, decoder.dtype) for e in one.extras} if isinstance(one, LoraInput) else {}
            for one in adapters
        ]
        self._texts = [list(text) for text in texts]
        self._text_blocks = [[blocks.pop() for _ in range(-(-len(t) // BLOCK))] for t in texts]
        if isinstance(decoder, EncoderDecoder):
            self._encode(decoder)
        self._done = [0] * len(sequences)
        self._logits: list[list[Tensor]] = [[] for _ in sequences]

    def run(self) -> list[Tensor]:
        """Logits [len, vocab] of each sequence: unequal chunks first, then the rest token by token, all of
        them packed together."""
        plans = [[max(len(s) // part, 1) for part in (2, 4, 8)] for s in self._sequences]
        while any(d < len(s) for d, s in zip(self._done, self._sequences, strict=True)):
            counts = []
            for s, plan in enumerate(plans):
                left = len(self._sequences[s]) - self._done[s]
                counts.append(min(plan.pop(0) if plan else 1, left))
            self._step(counts)
        return [torch.cat(parts) for parts in self._logits]

    def _encode(self, model: EncoderDecoder) -> None:
        lens = [len(text) for text in self._texts]
        starts = [0, *accumulate(lens)]
        spans = list(zip(pairwise(starts), self._rows, self._extras, strict=True))
        segments = tuple(LoraSegment(*span, rows) for span, rows, extras in spans if rows or extras)
        extras = tuple(ExtraSegment(*span, extras) for span, _, extras in spans if extras)
        slots = [
            b[p // BLOCK] * BLOCK + p % BLOCK
            for b, n in zip(self._text_blocks, lens, strict=True)
            for p in range(n)
        ]
        batch = ForwardBatch(
            torch.tensor([token for text in self._texts for token in text]),
            torch.tensor([p for n in lens for p in range(n)]),
            AttentionBatch(starts, lens, _table(self._text_blocks), torch.tensor(slots)),
            LoraBatch(self._pool, segments, extras=extras) if segments else None,
            torch.tensor([], dtype=torch.long),
        )
        model.encode(batch, self._kv)

    def _step(self, counts: list[int]) -> None:
        live = [(s, n) for s, n in enumerate(counts) if n]
        starts, segments = [0], []
        extras: list[ExtraSegment] = []
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lens: list[int] = []
        table: list[list[int]] = []
        for s, n in live:
            span = range(self._done[s], self._done[s] + n)
            ids += [self._sequences[s][p] for p in span]
            positions += span
            slots += [self._blocks[s][p // BLOCK] * BLOCK + p % BLOCK for p in span]
            if self._rows[s] or self._extras[s]:
                segments.append(LoraSegment(starts[-1], starts[-1] + n, self._rows[s]))
            if self._extras[s]:
                extras.append(ExtraSegment(starts[-1], starts[-1] + n, self._extras[s]))
            starts.append(starts[-1] + n)
            lens.append(self._done[s] + n)
            table.append(self._blocks[s])
        batch = ForwardBatch(
            torch.tensor(ids),
            torch.tensor(positions),
            AttentionBatch(starts, lens, _table(table), torch.tensor(slots)),
            LoraBatch(self._pool, tuple(segments), extras=tuple(extras)) if segments else None,
            torch.arange(len(ids)),
            cross=self._cross([s for s, _ in live], starts),
        )
        logits = self._decoder.forward(batch, self._kv)
        for (s, n), start in zip(live, starts, strict=False):
            self._logits[s].append(logits[start : start + n])
            self._done[s] += n

    def _cross(self, live: list[int], starts: list[int]) -> AttentionBatch | None:
        if not self._texts:
            return None
        table, lens = _table([self._text_blocks[s] for s in live]), [len(self._texts[s]) for s in live]
        return AttentionBatch(starts, lens, table, torch.tensor([], dtype=torch.long))


def _table(blocks: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, blocks))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in blocks], dtype=torch.int32)


def _scatter(extra: LoraExtra, dtype: torch.dtype) -> Extra:
    """In three pieces of a pool of its own, the first the last, NaN between them."""
    values = torch.from_numpy(extra.values).to(dtype)
    values = values if values.ndim == 2 else values.unsqueeze(1)
    parts = values.split(-(-len(values) // 3))[::-1]
    gap = torch.full((7,), float("nan"), dtype=dtype)
    pool = torch.cat([piece for part in parts for piece in (gap, part.reshape(-1))])
    starts, views, used = [], [], 0
    for part in parts:
        starts.append(used + 7)
        used += 7 + part.numel()
        views.append(pool[starts[-1] : used].view(part.shape))
    ids = torch.tensor(extra.token_ids) if extra.token_ids else None
    return Extra(pool, tuple(views[::-1]), torch.tensor(starts[::-1]), ids)


def _lay_out(
    adapters: Sequence[Given], model: ModelConfig
) -> tuple[Tensor, list[dict[tuple[int, int], LoraRow]]]:
    """Adapters in one flat pool, each row at an odd place and NaN between them."""
    modules = lora_modules(model)
    pieces, places, used = [np.full(13, np.nan, np.float32)], [], 13
    for given in adapters:
        rows: dict[tuple[int, int], LoraRow] = {}
        for payload, row in zip(*_tensors(given), strict=True) if given else ():
            module_id, layer, rank, dora = (*row.tolist(), 0)[:4]  # the fourth column may be absent
            module = modules[module_id]
            middle = rank * module.in_dim
            end = middle + rank * module.out_dim
            b = payload[middle:end].reshape(module.out_dim, rank)
            rest = payload[end : end + module.out_dim * dora]
            rows[layer, module_id] = LoraRow(used, rank, bool(dora))
            pieces += [payload[:middle], b.T.ravel(), rest, np.full(5, np.nan, np.float32)]
            used += end + len(rest) + 5
        places.append(rows)
    return torch.from_numpy(np.concatenate(pieces)), places


def _tensors(given: Tensors | LoraInput) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, W] and config [rows, 3 or 4]."""
    weights, config = (given.weights, given.config) if isinstance(given, LoraInput) else given
    assert weights is not None and config is not None
    return weights[0], config[0]


def _verdicts(folder: Path, family: str) -> dict[str, str]:
    """Kind of adapter, and `base`, to `pass`, `differs`, or why it is refused; sources apart if unequal."""
    kind_of_model, quant = QUANTISED.get(family, (family, None))
    model_dir = made = make_model(folder / family, kind_of_model, seed=3)
    config = read_model_config(model_dir)
    if quant is not None:
        made = make_wide(folder / f"{family}-wide", model_dir, quant, linear_names(config)[0])
    decoder = load_decoder(model_dir, config, torch.float32, open_device("cpu"), LONGEST, quant)
    picks = random.Random(len(family))
    ids = [picks.randrange(250) for _ in range(LONGEST)]
    text = [picks.randrange(250) for _ in range(TEXT)] if config.encoder else []
    verdicts: dict[str, str] = {}
    modules, base = lora_modules(config), BaseWeights(model_dir, HeldWeights(config, quant))
    adapters: list[Given] = [None]
    labels = [("base", "")]
    folders: dict[str, Path | None] = {"base": None}
    for seed, kind in enumerate(KINDS):
        try:
            folders[kind] = adapter = make_kind(folder / f"{family}-{seed}", made, kind, seed)
            whole = read_lora(find_source(adapter), 0, modules=modules, base=base)
            for source in SOURCES[:1] if whole.extras else SOURCES:
                adapters.append(whole if whole.extras else read_from(source, adapter, model_dir, quant))
                labels.append((kind, source))
        except ManyloraError as error:
            verdicts[kind] = REFUSED + str(error).partition(": ")[2]
    if config.encoder is None:
        archive, folders[NEMO] = make_nemo(folder / f"{family}-nemo", made)
        for source in NEMO_SOURCES:
            adapters.append(read_nemo_from(source, archive, model_dir))
            labels.append((NEMO, source))
    else:
        verdicts[NEMO] = "none"
    found = []
    for first in range(0, len(adapters), 8):
        part = adapters[first : first + 8]
        found += Driver(decoder, [ids] * len(part), part, [text] * len(part) if text else ()).run()
    for (kind, source), logits in zip(labels, found, strict=True):
        expected = reference_logits(made, folders[kind], ids, encoder_ids=text)
        verdict = "pass" if agree(logits, expected) else f"differs {source}".strip()
        if verdicts.setdefault(kind, verdict) != verdict:
            verdicts[kind] = f"{verdicts[kind]}, {verdict}"
    return verdicts


def main(families: Sequence[str] = ()) -> int:
    """Print the tables, of all families or of those named. Returns 1 when something differs."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the matrices are so small that threads only wait for each other
    reasons: list[str] = []
    kinds = ("base", *KINDS, NEMO)
    print("| model | " + " | ".join(kinds) + " |\n|" + "---|" * (len(kinds) + 1))
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for family in families or (*FAMILIES, *ENCODER_DECODER_FAMILIES, *QUANTISED):
            verdicts = _verdicts(Path(folder), family)
            cells = []
            for kind in kinds:
                verdict = verdicts[kind]
                good = good and "differs" not in verdict
                if verdict.startswith(REFUSED):
                    reason = verdict.removeprefix(REFUSED)
                    if reason not in reasons:
                        reasons.append(reason)
                    verdict = f"refused ({reasons.index(reason) + 1})"
                cells.append(verdict)
            print(f"| {family} | " + " | ".join(cells) + " |", flush=True)
    print(
        f"\nSources, each of them in each cell: {', '.join(SOURCES)}; with extras peft alone; of {NEMO}: "
        f"{', '.join(NEMO_SOURCES)}.\n"
    )
    for number, reason in enumerate(reasons, 1):
        print(f"({number}) {reason}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

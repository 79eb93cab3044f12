"""One rank of the group that test_parallel_model.py starts: runs its cases, and writes what they give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driver import Driver
from torch import Tensor

from manylora.adapters.modules import FUSED, lora_modules
from manylora.adapters.tensors import Adapter, AdapterRow, adapter_from_rows, lora_input
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.model import ModelConfig
from manylora.errors import ManyloraError
from manylora.kernels.device import open_device
from manylora.kernels.row_format import RowFormat
from manylora.model.batch import ForwardBatch
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES
from manylora.model.safetensors_file import SafetensorsFile
from manylora.ranks.adapters import AdapterSlicer
from manylora.ranks.channel import Collectives
from manylora.ranks.mapping import Mapping
from manylora.ranks.model import RankDecoder, RankEncoderDecoder, load_rank
from manylora.request import LoraExtra

LIMIT = timedelta(seconds=200)
STACKS = ("encoder", "decoder")
FUSED_PARTS = {part for parts in FUSED.values() for part in parts}


@dataclass(frozen=True)
class Case:
    """A model on so many ranks, and the kinds of adapters of its sequences."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    kinds: tuple[str, ...] = ()
    quant: str | None = None

    @property
    def quant_config(self) -> QuantConfig | None:
        return None if self.quant is None else QuantConfig(self.quant)

    def texts(self, model: ModelConfig) -> list[list[int]]:
        """Prompts of the encoder, where there is one."""
        count = len(self.kinds) if model.encoder is not None else 0
        return [[(11 * s + 5 * i + i * i) % 250 for i in range(15 + s)] for s in range(count)]

    def sequences(self) -> list[list[int]]:
        count = len(self.kinds)
        return [[(7 * s + 13 * i + i * i) % 250 for i in range(24 + s)] for s in range(count)]


def write_cases(path: Path, cases: list[Case]) -> None:
    path.write_text(json.dumps([asdict(case) for case in cases]))


def random_adapter(model: ModelConfig, kind: str, seed: int) -> Adapter | None:
    """kind: lora, dora, fused (q, k and v; up and gate), extras (beside LoRA), or base."""
    values = np.random.default_rng(seed)
    rank = {"base": 0, "lora": 5, "dora": 3, "fused": 40, "extras": 2}[kind]
    rows = []
    for module_id, module in lora_modules(model).items() if rank else ():
        fused, has_parts = not module.counted, module.name in FUSED_PARTS
        if module.name == "cross_attn_qkv" or fused != (kind == "fused" and (fused or has_parts)):
            continue
        row = RowFormat(rank, dora=kind == "dora" and module.experts == 1)
        for layer in filter(module.is_on, range(model.num_layers)):
            sizes = module.at(layer).row_sizes(row)
            pair = values.normal(scale=0.3 / rank**0.25, size=sizes[0] + sizes[1])
            payload = np.concatenate((pair, values.normal(1, 0.2, sizes[2]))).astype(np.float32)
            rows.append(AdapterRow(module_id, layer, row, payload))
    extras = _random_extras(model, values) if kind == "extras" else ()
    return adapter_from_rows(rows, extras=extras) if rank else None


def _random_extras(model: ModelConfig, values: np.random.Generator) -> list[LoraExtra]:
    names, last = FAMILIES[model.architecture].names(model), model.num_layers - 1
    vocab, hidden, width = model.vocab_size, model.hidden_size, model.projected_size or model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        **{f"layers.{layer}.{module.name}.bias": (module.at(layer).out_dim,) for layer in (0, last)
           for module in lora_modules(model).values()
           if module.experts == 1 and module.counted and module.is_on(layer)},
        **{f"layers.{last}.{norm}.weight": (hidden,) for norm in names.block_norms.values()},
        "norm.weight": (hidden,), "norm.bias": (hidden,), "embed.tokens": (3, width),
        "embed.lora_A": (vocab, 2), "embed.lora_B": (width, 2), "embed.magnitude": (width,),
        "head.lora_A": (2, width), "head.lora_B": (vocab, 2), "head.bias": (vocab,),
    }  # fmt: skip
    if model.encoder is not None:  # what is outside of layers is of one stack, but for these
        both = ("layers.", "head.", "embed.tokens")
        own = {name: shape for name, shape in shapes.items() if not name.startswith(both)}
        own |= {"embedding_norm.weight": (hidden,), "embedding_norm.bias": (hidden,)}
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(both)}
        shapes |= {f"{stack}.{name}": shape for stack in STACKS for name, shape in own.items()}
    return [
        LoraExtra(name, values.normal(1, 0.3, shape).astype(np.float32), (5, 100, 200) * ("tokens" in name))
        for name, shape in shapes.items()
    ]


def adapters_of(case: Case, model: ModelConfig) -> list[Adapter | None]:
    return [random_adapter(model, kind, seed) for seed, kind in enumerate(case.kinds)]


def with_full_rows(decoder: RankDecoder | RankEncoderDecoder) -> RankDecoder | RankEncoderDecoder:
    """Its logits have all rows on every rank, as the driver wants them."""
    forward = decoder.forward

    def full(batch: ForwardBatch, *caches: Any) -> Tensor:
        logits = forward(batch, *caches)
        return logits if len(logits) else torch.zeros(len(batch.logits_rows), decoder.config.vocab_size)

    decoder.forward = full  # type: ignore[method-assign]
    return decoder


def run(case: Case, rank: int, world: int) -> dict[str, Any]:
    device, dtype = open_device("cpu"), torch.float32
    mapping = Mapping(world, rank, case.tp, case.pp, case.ep)
    collectives = Collectives(mapping, device.torch)
    model = read_model_config(Path(case.model))
    read, whole = 0, SafetensorsFile.read

    def count(file: SafetensorsFile, offset: int, out: Tensor) -> None:
        nonlocal read
        read += out.nbytes
        whole(file, offset, out)

    SafetensorsFile.read = count  # type: ignore[method-assign]
    decoder = load_rank(Path(case.model), model, dtype, device, collectives, case.quant_config)
    SafetensorsFile.read = whole  # type: ignore[method-assign]
    slicer = AdapterSlicer(model, mapping)
    parts = [a and slicer.slice(a) for a in adapters_of(case, model)]
    inputs = [
        None if p is None or not (p.rows or p.extras) else lora_input(1, p.rows, p.extras) for p in parts
    ]
    given = case.sequences(), inputs, case.texts(model)
    driver = Driver(with_full_rows(decoder), *given, modules=slicer.held)
    return {"logits": driver.run(), "held": decoder.weight_bytes, "read": read}


def main(arguments: Sequence[str]) -> None:
    """rank, number of ranks, a file for the rendezvous, the cases (JSON), a folder for the results"""
    rank, world, meeting, given, results = int(arguments[0]), int(arguments[1]), *arguments[2:]
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    cases = [Case(**values) for values in json.loads(Path(given).read_text())]
    for case in cases:
        try:
            found = run(case, rank, world)
        except ManyloraError as error:
            found = {"error": str(error)}
        torch.save(found, Path(results) / f"{case.name}.{rank}.pt")
    dist.destroy_process_group()

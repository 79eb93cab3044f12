"""One rank of the group that test_parallel_model.py starts: runs its cases, and rank 0 writes what they give.

Arguments: rank, number of ranks, a file for the rendezvous, the cases (JSON), a folder for the results.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manylora.config.engine import ModelConfig
from manylora.errors import ManyloraError
from manylora.kernels.device import open_device
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.lora.rules import AdapterRules
from manylora.lora.tensors import Adapter, lora_input
from manylora.model.batch import ForwardBatch
from manylora.model.checkpoint import read_model_config
from manylora.model.effective_weights import EffectiveWeights
from manylora.parallel.adapters import AdapterSlicer
from manylora.parallel.build import load_rank
from manylora.parallel.collectives import TorchCollectives
from manylora.parallel.decoder import RankDecoder
from manylora.parallel.mapping import Mapping
from manylora.quant.config import QuantConfig
from manylora.testing.driver import Driver

LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Case:
    """A model on so many ranks, and the adapters of its sequences: folders, empty for the base."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    adapters: tuple[str, ...] = ()
    quant: str | None = None

    @property
    def quant_config(self) -> QuantConfig | None:
        return None if self.quant is None else QuantConfig(self.quant)

    def sequences(self) -> list[list[int]]:
        count = len(self.adapters)
        return [[(7 * s + 13 * i + i * i) % 250 for i in range(24 + s)] for s in range(count)]


def write_cases(path: Path, cases: list[Case]) -> None:
    path.write_text(json.dumps([asdict(case) for case in cases]))


def read_adapters(case: Case, model: ModelConfig) -> list[Adapter | None]:
    modules, base = lora_modules(model), BaseWeights(Path(case.model), _effective(case, model))
    rules = AdapterRules(modules, model.num_layers, 512, half=False)
    options = ReadOptions(modules, base)
    return [rules.check(read_lora(find_source(Path(f)), 1, options)) if f else None for f in case.adapters]


def _effective(case: Case, model: ModelConfig) -> EffectiveWeights:
    return EffectiveWeights(model, case.quant_config)


class FullRows:
    """A decoder whose logits have all rows on every rank, as the driver wants them."""

    def __init__(self, decoder: RankDecoder) -> None:
        self._decoder, self.config, self.dtype = decoder, decoder.config, decoder.dtype

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        logits = self._decoder.forward(batch, kv)
        return logits if len(logits) else torch.zeros(len(batch.logits_rows), self.config.vocab_size)


def run(case: Case, rank: int, world: int) -> dict[str, Any]:
    device, dtype = open_device("cpu"), torch.float32
    mapping = Mapping(world, rank, case.tp, case.pp, case.ep)
    collectives = TorchCollectives(mapping, device.torch)
    model = read_model_config(Path(case.model))
    decoder = load_rank(Path(case.model), model, dtype, device, mapping, collectives, case.quant_config)
    slicer = AdapterSlicer(model, mapping)
    parts = [a and slicer.slice(a) for a in read_adapters(case, model)]
    inputs = [
        None if p is None or not (p.rows or p.extras) else lora_input(1, p.rows, p.extras) for p in parts
    ]
    driver = Driver(FullRows(decoder), case.sequences(), inputs, modules=slicer.modules)  # type: ignore
    return {"logits": driver.run(), "bytes": decoder.weight_bytes}


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[3], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    cases = [Case(**values) for values in json.loads(Path(sys.argv[4]).read_text())]
    for case in cases:
        try:
            found = run(case, rank, world)
        except ManyloraError as error:
            found = {"error": str(error)}
        torch.save(found, Path(sys.argv[5]) / f"{case.name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Protects the decoder: logits equal transformers (+ PEFT), chunked, packed, adapters mixed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manylora.device import open_device
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraRow, LoraSegment
from manylora.model.batch import ForwardBatch
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.weights import load_decoder
from manylora.testing import FAMILIES, make_adapter, make_model, reference_logits

BLOCK, BLOCKS = 8, 64
IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}


def lay_out(adapters: list[Path | None]) -> tuple[torch.Tensor, list[dict]]:
    """Adapters of PEFT in one flat pool, each row at an odd place."""
    pieces, places, used = [torch.full((13,), float("nan"))], [], 13
    for adapter in adapters:
        rows: dict[tuple[int, int], LoraRow] = {}
        tensors = load_file(adapter / "adapter_model.safetensors") if adapter else {}
        scale = 0.0
        if adapter:
            config = json.loads((adapter / "adapter_config.json").read_text())
            scale = config["lora_alpha"] / config["r"]
        for key, a in tensors.items():
            if not key.endswith("lora_A.weight"):
                continue
            b = tensors[key.replace("lora_A", "lora_B")] * scale
            parts = key.split(".")
            layer, name = int(parts[parts.index("layers") + 1]), parts[-3]
            rows[layer, IDS[name]] = LoraRow(used, a.shape[0])
            pieces += [a.flatten(), b.T.flatten(), torch.full((5,), float("nan"))]
            used += a.numel() + b.numel() + 5
        places.append(rows)
    return torch.cat(pieces), places


class Driver:
    """Feeds several sequences to a decoder in packed steps, blocks scattered, and keeps all logits."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]], adapters: list[Path | None]) -> None:
        config = decoder.config
        shape = (config.num_layers, 2, BLOCKS, BLOCK, config.num_kv_heads, config.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=decoder.dtype)
        self.decoder, self.sequences = decoder, sequences
        blocks = list(range(BLOCKS))
        random.Random(5).shuffle(blocks)
        self.blocks = [[blocks.pop() for _ in range(-(-len(s) // BLOCK))] for s in sequences]
        pool, self.rows = lay_out(adapters)
        self.pool = pool.to(decoder.dtype)
        self.done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, counts: list[int]) -> None:
        live = [(s, n) for s, n in enumerate(counts) if n]
        starts, ids, positions, slots, lens, table, segments = [0], [], [], [], [], [], []
        width = max(len(b) for b in self.blocks)
        for s, n in live:
            span = range(self.done[s], self.done[s] + n)
            ids += [self.sequences[s][p] for p in span]
            positions += span
            slots += [self.blocks[s][p // BLOCK] * BLOCK + p % BLOCK for p in span]
            if self.rows[s]:
                segments.append(LoraSegment(starts[-1], starts[-1] + n, self.rows[s]))
            starts.append(starts[-1] + n)
            lens.append(self.done[s] + n)
            table.append(self.blocks[s] + [0] * (width - len(self.blocks[s])))
        batch = ForwardBatch(
            torch.tensor(ids),
            torch.tensor(positions),
            AttentionBatch(starts, lens, torch.tensor(table, dtype=torch.int32), torch.tensor(slots)),
            LoraBatch(self.pool, tuple(segments)) if segments else None,
            torch.arange(len(ids)),
        )
        logits = self.decoder.forward(batch, self.kv)
        for (s, n), start in zip(live, starts, strict=False):
            self.logits[s].append(logits[start : start + n])
            self.done[s] += n

    def run(self) -> list[torch.Tensor]:
        """Unequal chunks first, then a few tokens one by one, everything packed together."""
        plans = [[max(len(s) // 2, 1), max(len(s) // 4, 1)] for s in self.sequences]
        while any(d < len(s) for d, s in zip(self.done, self.sequences, strict=True)):
            counts = []
            for s, plan in enumerate(plans):
                left = len(self.sequences[s]) - self.done[s]
                counts.append(min(plan.pop(0) if plan else 1, left))
            self.step(counts)
        return [torch.cat(parts) for parts in self.logits]


def sequences(count: int = 4) -> list[list[int]]:
    picks = random.Random(2)
    return [[picks.randrange(250) for _ in range(length)] for length in (1, 37, 18, 60)[:count]]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_the_reference(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3, sharded=family == "llama")
    adapters: list[Path | None] = [
        None,
        make_adapter(workshop / f"{family}-a", model, 1, rank=1, modules=tuple(IDS)),
        make_adapter(workshop / f"{family}-b", model, 2, rank=64, modules=("v_proj", "down_proj")),
        make_adapter(workshop / f"{family}-c", model, 3, rank=6, modules=("q_proj", "o_proj", "up_proj")),
    ]
    device = open_device("cpu")
    decoder = load_decoder(model, read_model_config(model), torch.float32, device)
    found = Driver(decoder, sequences(), adapters).run()
    for ids, adapter, logits in zip(sequences(), adapters, found, strict=True):
        expected = reference_logits(model, adapter, ids)
        scale = expected.abs().max()
        assert (logits - expected).abs().max() / scale < 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_the_reference_ops_agree(workshop: Path) -> None:
    model = make_model(workshop / "ops", "mistral-sliding", seed=4)
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    fast = Driver(decoder, sequences(), [None] * 4).run()
    for block in decoder._blocks:
        object.__setattr__(block.attention, "ops", ReferenceOps())
    slow = Driver(decoder, sequences(), [None] * 4).run()
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_no_farther_from_the_truth_than_transformers(workshop: Path) -> None:
    model = make_model(workshop / "bf16", "llama", seed=6)
    adapter = make_adapter(workshop / "bf16-a", model, 6, rank=8, modules=tuple(IDS))
    decoder = load_decoder(model, read_model_config(model), torch.bfloat16, open_device("cpu"))
    ids = sequences()[3]
    [found] = Driver(decoder, [ids], [adapter]).run()
    truth = reference_logits(model, adapter, ids)
    theirs = (reference_logits(model, adapter, ids, torch.bfloat16) - truth).square().mean().sqrt()
    ours = (found - truth).square().mean().sqrt()
    assert ours <= 1.3 * theirs

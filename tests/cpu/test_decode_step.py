"""Protects decode steps as one call: the bits of the layers one by one, for all layers and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from driver import Driver, decoder_of
from parity import make_kind, read_from
from running import tokens
from tiny_models import make_model
from torch import Tensor

from manylora.checkpoints.quant.config import QuantConfig
from manylora.checkpoints.quant.layouts import halves_to_bytes
from manylora.kernels import native
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.decode_step import DecodeStep
from manylora.kernels.device import open_device
from manylora.kernels.panels import Panels, WeightRows, look_up
from manylora.kernels.quantised import FLOAT4, QuantisedWeight, StackedWeight
from manylora.kernels.spec import AttentionBatch
from manylora.model.batch import ForwardBatch
from manylora.model.decoder import Decoder
from manylora.model.quant import quantise

pack, pack_table = CompiledOps.pack, CompiledOps.pack_table
KINDS = (None, "patterns", "rank 64", "DoRA + rsLoRA + patterns", "some layers", None, "patterns")
FAMILIES = ("llama-biases", "qwen3", "olmo2", "gemma2", "gemma3", "phi3-partial-rotary", "mistral-sliding")
FAMILIES += ("smollm3", "olmo3", "glm4", "ernie4.5")
QUANTISED = (("llama-biases", "W8A8"), ("qwen3", "W4A8"), ("gemma3", "W8A16"), ("gemma3", "W4A16"))


def load(model: Path, quant: str | None = None) -> Decoder:
    config = QuantConfig(quant) if quant else None
    return decoder_of(model, quant=config)


def pack_quantised(
    ops: CompiledOps, made: Callable[[Tensor], QuantisedWeight], table: WeightRows, is_head: bool
):
    """In place of `pack_table`: an embedding's table as some GGUF files have it."""
    return pack_table(ops, made(table.whole()), is_head)


def in_eight(table: Tensor) -> QuantisedWeight:
    return quantise(table, QuantConfig("W8A16"))


def in_four(table: Tensor) -> QuantisedWeight:
    """As Q4_1: values from 0, with zeros."""
    made = quantise(table, QuantConfig("W4A16", group_size=32))
    assert made.offsets is not None
    offsets = made.offsets - 8 * made.scales
    return replace(made, offsets=offsets, zeros=torch.full_like(offsets, -8, dtype=torch.int8))


def in_floats(table: Tensor) -> QuantisedWeight:
    eight = quantise(table, QuantConfig("W8A16"))
    codes = (eight.values.int() & 15).to(torch.uint8)
    return QuantisedWeight(
        halves_to_bytes(codes), eight.scales, codebook=torch.tensor(FLOAT4, dtype=torch.float32)
    )


def pack_in_parts(ops: CompiledOps, weight: Tensor | QuantisedWeight, routed: bool = False):
    """In place of `pack`: a fused layer whose parts have different types, as in Q4_K_M."""
    if not isinstance(weight, QuantisedWeight):
        return pack(ops, weight, routed)
    half, rows = weight.shape[0] // 2, weight.shape[0]
    parts = weight.rows(slice(0, half)), in_eight(weight.wide(half))
    return StackedWeight(tuple(pack(ops, part) for part in parts), (half, rows - half))


TABLES = {"W8A8": in_eight, "W4A8": in_four, "W8A16": in_floats, "W4A16": in_four}


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("made", [in_eight, in_four, in_floats])
def test_rows_of_a_quantised_table_are_its_values(made: Callable[[Tensor], QuantisedWeight]) -> None:
    table, ids = made(torch.randn(50, 96)), torch.tensor([0, 49, 7, 16, 7])
    packed = open_device("cpu").ops.pack_table(table, is_head=True)
    assert isinstance(packed, Panels)
    assert torch.equal(look_up(ids, packed), table.wide()[ids])


@pytest.fixture
def _compiled() -> None:
    if native.load() is None:
        pytest.skip("no compiled kernels")


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(("num_sequences", "most_rows"), [(1, 1024), (3, 1024), (7, 1024), (7, 11)])
@pytest.mark.parametrize(
    ("family", "quant", "kept"),
    [
        *((family, None, torch.float32) for family in FAMILIES),
        *((family, quant, torch.float32) for family, quant in QUANTISED),
        *((family, None, torch.bfloat16) for family in ("llama-biases", "gemma3", "phi3-partial-rotary")),
    ],
)
def test_a_step_as_one_call_gives_the_same_bits(
    family: str,
    quant: str | None,
    kept: torch.dtype,
    num_sequences: int,
    most_rows: int,
    tmp_path: Path,
    monkeypatch,
) -> None:
    """Of all rows together, or of some after others, which end within a sequence."""
    monkeypatch.setattr("manylora.kernels.decode_step.MOST_ROWS", most_rows)
    if quant in TABLES:
        monkeypatch.setattr(CompiledOps, "pack_table", partialmethod(pack_quantised, TABLES[quant]))
    if quant == "W4A16":
        monkeypatch.setattr(CompiledOps, "pack", pack_in_parts)
    model = make_model(tmp_path / "model", family, seed=4)
    kinds = KINDS[:num_sequences]
    adapters = [
        read_from(make_kind(tmp_path / str(seed), model, kind, seed), model) if kind else None
        for seed, kind in enumerate(kinds)
    ]
    sequences = [tokens(5 + 4 * n, n) for n in range(num_sequences)]
    decoder, calls = load(model, quant), 0
    assert decoder._decode_step is not None
    call = DecodeStep.__call__

    def count(*arguments):
        nonlocal calls
        found = call(*arguments)
        calls += found is not None
        return found

    monkeypatch.setattr(DecodeStep, "__call__", count)
    whole = Driver(decoder, sequences, adapters, kv_dtype=kept).run()
    assert calls >= 2
    monkeypatch.setattr(decoder, "_decode_step", None)
    single = Driver(decoder, sequences, adapters, kv_dtype=kept).run()
    for found, expected in zip(whole, single, strict=True):
        assert torch.equal(found, expected)
    if kept != torch.float32:
        wide = Driver(decoder, sequences, adapters).run()
        assert not all(map(torch.equal, whole, wide)), "nothing was rounded"


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "gemma3", "phi3-partial-rotary"])
def test_a_batch_that_is_given_again_is_read_anew(family: str, tmp_path: Path, monkeypatch) -> None:
    """Its arrays move on in place, beyond the cosines and sines that were there first."""
    monkeypatch.setattr("manylora.model.rope.LEAST_KEPT", 4)
    model = make_model(tmp_path, family, seed=4)
    count, steps = 3, 12
    ids, first = np.zeros(count, np.int64), np.array([0, 3, 1])
    moving = np.stack((first, first + 1, first + 32 * np.arange(count)))  # positions, lengths, slots
    decoders = [load(model), load(model)]
    config, blocks = decoders[0].config, torch.arange(2 * count, dtype=torch.int32).view(count, 2)
    shape = config.num_layers, 2, 2 * count, 16, config.num_kv_heads, config.head_dim
    kv = [torch.zeros(shape), torch.zeros(shape)]

    def make(*arrays: np.ndarray) -> ForwardBatch:
        given, positions, lengths, slots = arrays
        attention = AttentionBatch(range(count + 1), lengths, blocks, torch.from_numpy(slots))
        rows = torch.arange(count)
        return ForwardBatch(torch.from_numpy(given), torch.from_numpy(positions), attention, None, rows)

    kept, calls, again = make(ids, *moving), 0, DecodeStep.again

    def count_calls(step: DecodeStep):
        nonlocal calls
        found = again(step)
        calls += found is not None
        return found

    monkeypatch.setattr(DecodeStep, "again", count_calls)
    for step in range(steps):
        ids[:] = tokens(count, step)
        found = decoders[0].forward(kept, kv[0])
        new = make(*(one.copy() for one in (ids, *moving)))
        assert torch.equal(found, decoders[1].forward(new, kv[1]))
        for batch in (kept, new):
            assert batch.best.tokens is None or torch.equal(batch.best.tokens, found.argmax(-1))
        moving += 1
    assert steps // 2 <= calls < steps - 1, "there were not enough cosines, once or more"


@pytest.mark.parametrize("most_rows", [1024, 5])
@pytest.mark.parametrize(
    ("family", "compiled"),
    [(one, True) for one in ("llama-biases", "olmo2", "gemma3")]
    + [(one, False) for one in ("llama-biases", "gpt-neox", "granite", "qwen3-next", "mixtral")],
)
def test_rows_without_logits_change_nothing(
    family: str, compiled: bool, most_rows: int, tmp_path: Path, monkeypatch
) -> None:
    """The last layer is computed for the wanted rows only; keys and values of all."""
    if not compiled and most_rows < 1024:
        pytest.skip("no compiled step to divide")
    monkeypatch.setattr("manylora.kernels.decode_step.MOST_ROWS", most_rows)
    model = make_model(tmp_path / "model", family, seed=4)
    kinds = (None, "rank 64", "patterns", None)
    adapters = [
        read_from(make_kind(tmp_path / str(seed), model, kind, seed), model) if kind else None
        for seed, kind in enumerate(kinds)
    ]
    sequences = [tokens(5, 1), tokens(8, 2), tokens(6, 3), tokens(7, 4)]
    decoder = load(model)
    if not compiled:
        monkeypatch.setattr(decoder, "_decode_step", None)
    elif decoder._decode_step is None:
        pytest.skip("no compiled kernels")
    whole = Driver(decoder, sequences, adapters)
    every = whole.prefill()
    for rows in ([0], [4, 12], [4, 5, 12, 25], []):
        narrow = Driver(decoder, sequences, adapters)
        few = narrow.prefill(rows)
        assert len(few) == len(rows)
        torch.testing.assert_close(few, every[rows], rtol=0, atol=0 if compiled else 1e-6)
        assert torch.equal(narrow._kv.nan_to_num(7), whole._kv.nan_to_num(7))

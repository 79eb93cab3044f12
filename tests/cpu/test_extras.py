"""Protects what adapters bring beside low-rank matrices of linear layers: biases, norms, embedding, head.
Logits and greedy tokens equal PEFT's, mixed with other adapters and the base model, through every way into
the engine; what cannot be served is refused with the reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import running
import torch
from driver import Driver, agree
from parity import make_kind
from running import check_greedy, read, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_logits

from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.convert import normalize_dora
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft_folder import read_peft_whole
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.number_types import narrow_to_bfloat16
from manylora.adapters.rules import AdapterRules
from manylora.adapters.tensors import Adapter, adapter_from_rows, lora_input
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.triton.engine_client import request_tensors
from manylora.engine.engine import Engine
from manylora.errors import AdapterCacheFullError, AdapterInvalidError, RequestError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device, open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraExtra, LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

EXTRA_KINDS = (
    "bias", "lora_bias", "DoRA + bias", "embedding", "lm_head", "both + DoRA", "modules_to_save",
    "norms saved", "token indices",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    """With biases on its linear layers, and a head that is the embedding."""
    return make_model(workshop / "model", "llama-biases", seed=7, tie_word_embeddings=True)


MOE_OPTIONS: dict[str, dict[str, Any]] = {
    "embedding": {"modules": ("q_proj", "embed_tokens")},
    "lm_head": {"modules": ("q_proj", "lm_head"), "use_dora": True},
    "all saved": {
        "modules": ("q_proj",),
        "modules_to_save": ["embed_tokens", "lm_head", "norm", "layernorm"],
    },
    "bias": {"modules": ("o_proj",), "bias": "all"},
}


def check_batch(model: Path, adapters: list[Path]) -> None:
    """Every adapter and the base in one batch; that each of their extras counts for something."""
    decoder = load_decoder(model, read_model_config(model), torch.float32, open_device("cpu"))
    loras = [read(path, model) for path in adapters]
    sequences = [tokens(40 + seed, seed) for seed in range(len(adapters) + 1)]
    found = Driver(decoder, sequences, [None, *loras]).run()
    for path, ids, logits in zip([None, *adapters], sequences, found, strict=True):
        assert agree(logits, reference_logits(model, path, ids)), path
    plain = Driver(decoder, sequences[1:], [replace(lora, extras=()) for lora in loras]).run()
    for lora, with_all, without in zip(loras, found[1:], plain, strict=True):
        assert bool(lora.extras) != agree(with_all, without)


@pytest.mark.parametrize("family", ["llama-mha-tied", "gpt2", "gemma3", "gpt-neox"])
def test_every_kind_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3)
    kinds = enumerate(("LoRA", *EXTRA_KINDS))
    check_batch(model, [make_kind(workshop / f"{family}-{seed}", model, kind, seed) for seed, kind in kinds])


def test_a_mixture_of_experts(workshop: Path) -> None:
    model = make_model(workshop / "moe", "qwen2-moe", seed=3)
    made = [
        make_adapter(workshop / f"moe-{seed}", model, seed, rank=4, **options)
        for seed, options in enumerate(MOE_OPTIONS.values())
    ]
    check_batch(model, made)


@pytest.mark.parametrize("kind", ["bias", "both + DoRA", "modules_to_save", "norms saved", "token indices"])
@pytest.mark.parametrize("family", ["llama-biases", "gemma2"])
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(
    kind: str, family: str, workshop: Path
) -> None:
    model = workshop / f"bf16-{family}"
    if not model.is_dir():
        make_model(model, family, seed=6)
    adapter = make_kind(workshop / f"bf16-{family}-{kind}", model, kind, 6)
    decoder = load_decoder(model, read_model_config(model), torch.bfloat16, open_device("cpu"))
    ids = tokens(60, 6)
    [found] = Driver(decoder, [ids], [read(adapter, model)]).run()
    truth = reference_logits(model, adapter, ids)
    theirs = (reference_logits(model, adapter, ids, torch.bfloat16) - truth).square().mean().sqrt()
    assert (found - truth).square().mean().sqrt() <= 1.3 * theirs


def answers(
    engine: Engine, cases: list[tuple[LoraInput | None, list[int]]], new: int = 12
) -> list[list[int]]:
    params = SamplingConfig(max_tokens=new)
    return running.answers(engine, *(Request(tuple(prompt), params, lora) for lora, prompt in cases))


@pytest.mark.parametrize("room", ["ample", "evicting"])
def test_greedy_tokens_of_the_engine(room: str, model: Path, workshop: Path) -> None:
    """From the prefetch directory, in chunks, with prefixes reused; evicted and read again without room."""
    kinds = {
        2: "bias",
        3: "both + DoRA",
        4: "modules_to_save",
        5: "token indices",
        6: "LoRA",
        7: "norms saved",
    }
    folder = workshop / "prefetch"
    if not folder.is_dir():
        for number, kind in kinds.items():
            make_kind(folder / str(number), model, kind, number)
    size = 2**22 if room == "ample" else 5 * 73728
    cache = LoraCacheConfig(
        gpu_memory_bytes=size, host_memory_bytes=size, prefetch_dir=folder, max_adapter_size=8
    )
    engine = Engine(
        EngineConfig(model, device="cpu", max_seq_len=64, max_num_tokens=48, max_batch_size=16, lora=cache)
    )
    cases = [(None, tokens(21, 1))] + [
        (LoraInput(n), tokens(20 + i % 3, 1)) for i, n in enumerate([*kinds] * 2)
    ]
    for (lora, prompt), got in zip(cases, answers(engine, cases), strict=True):
        adapter = folder / str(lora.task_id) if lora else None
        check_greedy(got, 12, model, adapter, prompt)
    stats = engine.stats().adapters
    assert (stats.host_evictions > 0 and stats.source_loads > 0) == (room == "evicting")
    engine.close()


def test_recorded_steps_leave_batches_with_extras_alone(
    model: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU's kernels, or their interpreter, with a recorder that runs the function again."""
    recorded: list[int] = []

    def record(function: Any) -> Any:
        recorded.append(1)
        function()
        return function

    device = Device(CPU, CudaOps(), "interpreted", record)
    monkeypatch.setattr("manylora.engine.build.open_device", lambda name: device)
    small = make_model(workshop / "small", "llama-mha-tied", seed=2, num_hidden_layers=1)
    adapter = make_kind(workshop / "small-a", small, "both + DoRA", 2)
    engine = Engine(EngineConfig(small, device="cpu", max_seq_len=32, max_batch_size=2, lora=LoraCacheConfig(
        gpu_memory_bytes=2**21, host_memory_bytes=2**22)))  # fmt: skip
    started = len(recorded)
    cases = [(read(adapter, small, 1), tokens(5, 1)), (None, tokens(6, 2))]
    found = answers(engine, cases, new=3)
    check_greedy(found[0], 3, small, adapter, cases[0][1])
    check_greedy(found[1], 3, small, None, cases[1][1])
    assert len(recorded) == started
    engine.close()


def test_copies_on_disk_keep_them_and_requests_of_the_wire_refuse_them(model: Path, workshop: Path) -> None:
    adapter = make_kind(workshop / "copied", model, "token indices", 3)
    config = read_model_config(model)
    modules = lora_modules(config)
    rules = AdapterRules(modules, config.num_layers, 8)
    read = AdapterReader(rules, ReadOptions(modules, BaseWeights(model))).read(adapter).adapter
    assert isinstance(read, Adapter)
    bits = narrow_to_bfloat16(read.extras[0].values)
    one = adapter_from_rows(read.rows, extras=(*read.extras, LoraExtra("head.weight", bits)))
    disk = DiskLevel(2**24, workshop / "copies")
    disk.put(one)
    again = disk.get(one.digest)
    assert again is not None and again.nbytes == one.nbytes
    for theirs, ours in zip(again.extras, one.extras, strict=True):
        assert (theirs.name, theirs.token_ids) == (ours.name, ours.token_ids)
        assert theirs.values.dtype == ours.values.dtype
        assert theirs.values.tobytes() == ours.values.tobytes()
    sent = lora_input(1, one.rows, one.extras)
    with pytest.raises(RequestError, match=r"has embed\.tokens, which tensors of a request cannot carry"):
        request_tensors(Request((1, 2), SamplingConfig(), lora=sent))


def test_the_digest_covers_them(model: Path, workshop: Path) -> None:
    adapter = make_kind(workshop / "digest", model, "token indices", 1)
    config = read_model_config(model)
    content = read_peft_whole(adapter, ReadOptions(lora_modules(config), BaseWeights(model)))
    rows, extras = content.rows, content.extras
    [extra] = extras
    changed = extra.values.copy()
    changed[0, 0] += 1
    others = [
        [], [replace(extra, values=changed)], [replace(extra, name="head.tokens")],
        [replace(extra, token_ids=(0, *extra.token_ids[1:]))],
    ]  # fmt: skip
    digests = {adapter_from_rows(rows, extras=given).digest for given in [extras, *others]}
    assert len(digests) == 5
    assert adapter_from_rows(rows, extras=list(extras)).digest in digests


def test_an_adapter_beyond_the_cache_is_refused_by_its_pages(model: Path, workshop: Path) -> None:
    adapter = make_kind(workshop / "large", model, "modules_to_save", 1)
    cache = LoraCacheConfig(gpu_memory_bytes=73728, host_memory_bytes=2**22, max_adapter_size=8)
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=32, lora=cache))
    request = Request((1, 2), SamplingConfig(max_tokens=2), lora=read(adapter, model, 1))
    with pytest.raises(AdapterCacheFullError, match="needs 3 pages, the host level has"):
        engine.submit(engine.prepare(request))
    engine.close()


def changed(folder: Path, source: Path, config: dict | None = None, **tensors: torch.Tensor | None) -> Path:
    shutil.copytree(source, folder)
    found = load_file(source / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return folder


PREFIX = "base_model.model."
REFUSED = [
    ({f"{PREFIX}lm_head.weight": torch.ones(275, 64)}, "a changed vocabulary is not supported"),
    ({f"{PREFIX}model.embed_tokens.weight": torch.ones(272, 64)}, "modules_to_save does not name it"),
    ({f"{PREFIX}lm_head.base_layer.weight": torch.ones(272, 64)}, "modules_to_save does not name it"),
    (
        {f"{PREFIX}model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)},
        "of modules_to_save the embedding, the",
    ),
    (
        {f"{PREFIX}model.layers.0.self_attn.q_proj.bias": torch.ones(60)},
        "attn_q of this model gives 64 values",
    ),
    (
        {
            f"{PREFIX}model.layers.0.self_attn.q_proj.bias": torch.ones(64),
            f"{PREFIX}model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(64),
        },
        "mean the same bias",
    ),
    (
        {f"{PREFIX}lm_head.bias": torch.ones(272), f"{PREFIX}lm_head.base_layer.bias": torch.ones(272)},
        "lm_head has two tensors for the same bias",
    ),
    ({f"{PREFIX}model.layers.7.input_layernorm.weight": torch.ones(64)}, "the base model has no such norm"),
    ({f"{PREFIX}model.layers.0.input_layernorm.bias": torch.ones(64)}, "the base model has no such norm"),
    ({f"{PREFIX}model.norm.weight": torch.ones(32)}, "made for another model"),
    ({f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 64)}, "must have lora_A.weight and lora_B.weight"),
    (
        {
            f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 60),
            f"{PREFIX}lm_head.lora_B.weight": torch.ones(272, 4),
        },
        "goes from 60 to 272 dimensions",
    ),
    (
        {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 64)},
        "the tokens of",
    ),
    ({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.bias": torch.full((64,), torch.inf)}, "an infinity"),
    ({f"{PREFIX}model.layers.0.self_attn.x_proj.bias": torch.ones(64)}, "biases of this module are not"),
]


@pytest.mark.parametrize(("tensors", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_served_is_refused(
    tensors: dict, reason: str, model: Path, workshop: Path, tmp_path: Path
) -> None:
    source = workshop / "plain"
    if not source.is_dir():
        make_adapter(source, model, 1, rank=2, modules=("q_proj",))
    folder = changed(tmp_path / "refused", source, **tensors)
    with pytest.raises(AdapterInvalidError, match=reason):
        read(folder, model)


@pytest.mark.parametrize("given", [[3, 3], ["a"], [300], {"embed_tokens": 3}, [1]])
def test_token_indices_must_fit(given: object, model: Path, workshop: Path) -> None:
    source = make_kind(workshop / f"ids-{given}", model, "token indices", 1)
    folder = changed(workshop / f"wrong-ids-{given}", source, {"trainable_token_indices": given})
    with pytest.raises(AdapterInvalidError, match="trainable_token_indices"):
        read(folder, model)


def test_a_copy_of_the_base_is_not_stored_and_tensors_have_no_place_for_the_rest(
    model: Path, workshop: Path
) -> None:
    base = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    source = make_adapter(workshop / "with-copy", model, 1, rank=2, modules=("q_proj",))
    folder = changed(workshop / "copy", source, **{f"{PREFIX}model.embed_tokens.weight": base.bfloat16()})
    assert read(folder, model).extras == ()
    with pytest.raises(AdapterInvalidError, match="have a place in the tensors of an adapter"):
        read_adapter_folder(folder, BaseWeights(model))


def test_a_bias_that_the_base_does_not_have_is_added_whole(workshop: Path) -> None:
    model = make_model(workshop / "no-bias", "llama", seed=3)
    source = make_adapter(workshop / "no-bias-a", model, 1, rank=2, modules=("q_proj",))
    bias = torch.randn(64)
    key = f"{PREFIX}model.layers.1.self_attn.q_proj.base_layer.bias"
    [extra] = read(changed(workshop / "no-bias-b", source, **{key: bias}), model).extras
    assert extra.name == "layers.1.attn_q.bias"
    np.testing.assert_array_equal(extra.values, bias.numpy())


def test_trained_tokens_of_a_tied_head_that_is_replaced_are_refused(model: Path, workshop: Path) -> None:
    source = make_kind(workshop / "tied", model, "token indices", 1)
    saved = {f"{PREFIX}lm_head.weight": torch.randn(272, 64)}
    folder = changed(workshop / "tied-b", source, {"modules_to_save": ["lm_head"]}, **saved)
    with pytest.raises(AdapterInvalidError, match="mean nothing in PEFT either"):
        read(folder, model)


def test_the_normaliser_takes_biases_along(model: Path, workshop: Path) -> None:
    adapter = make_kind(workshop / "unnormal", model, "DoRA + bias", 1)
    assert normalize_dora(adapter, model, workshop / "normal") == 14
    [one, other] = (read(path, model) for path in (adapter, workshop / "normal"))
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-5)
    assert [e.name for e in one.extras] == [e.name for e in other.extras] != []
    both = make_kind(workshop / "unnormal-head", model, "both + DoRA", 1)
    with pytest.raises(AdapterInvalidError, match=r"unknown weight: .*(lm_head|embed_tokens)\.lora_mag"):
        normalize_dora(both, model, workshop / "normal-head")

"""Protects what adapters bring beside low-rank matrices of linear layers: biases, norms, embeddings, heads,
rows of tokens, of encoder-decoders of each stack. Logits and greedy tokens equal PEFT's, mixed with other
adapters and the base, through every way into the engine; what cannot be served is refused with the reason."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapter_cases import PREFIX, check_batch, edited, prefixed
from driver import Driver, decoder_of
from parity import make_kind
from running import answers, check_greedy, read, tokens
from safetensors.torch import load_file, save_file
from selection import extended
from tiny_models import make_adapter, make_model, make_tuned, read_adapter_folder, reference_logits

from manylora.adapters.convert import normalize_dora
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft_folder import read_peft_whole
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.modules import lora_modules
from manylora.adapters.tensors import adapter_from_rows
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.triton.engine_client import request_tensors
from manylora.engine.engine import Engine
from manylora.errors import AdapterCacheFullError, AdapterInvalidError, RequestError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig

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


# T5 has no biases to train, and in an untied BART no stack looks at the shared table.
WITHOUT = dict.fromkeys(("t5", "t5-v1.1", "mt5"), ("bias", "DoRA + bias"))
WITHOUT["bart-scaled-untied"] = ("token indices",)


@pytest.mark.parametrize(
    "family",
    [
        "llama-mha-tied", "gpt2", "gemma3", "gpt-neox", "t5", "bart-scaled-untied",
        *extended("t5-v1.1", "mt5", "bart"),
    ],
)  # fmt: skip
def test_every_kind_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3)
    kinds = [kind for kind in ("LoRA", *EXTRA_KINDS) if kind not in WITHOUT.get(family, ())]
    check_batch(
        model, [make_kind(workshop / f"{family}-{n}", model, kind, n) for n, kind in enumerate(kinds)]
    )


def test_a_mixture_of_experts(workshop: Path) -> None:
    model = make_model(workshop / "moe", "qwen2-moe", seed=3)
    made = [
        make_adapter(workshop / f"moe-{seed}", model, seed, rank=4, **options)
        for seed, options in enumerate(MOE_OPTIONS.values())
    ]
    check_batch(model, made)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama-biases", "bias"), ("llama-biases", "modules_to_save"), ("gemma2", "both + DoRA")],
)
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(
    kind: str, family: str, workshop: Path
) -> None:
    model = workshop / f"bf16-{family}"
    if not model.is_dir():
        make_model(model, family, seed=6)
    adapter = make_kind(workshop / f"bf16-{family}-{kind}", model, kind, 6)
    decoder = decoder_of(model, dtype=torch.bfloat16)
    ids = tokens(60, 6)
    [found] = Driver(decoder, [ids], [read(adapter, model)]).run()
    truth = reference_logits(model, adapter, ids)
    theirs = (reference_logits(model, adapter, ids, torch.bfloat16) - truth).square().mean().sqrt()
    assert (found - truth).square().mean().sqrt() <= 1.3 * theirs


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
    engine = Engine(EngineConfig(small, device="cpu", max_seq_len=32, max_batch_size=4, lora=LoraCacheConfig(
        gpu_memory_bytes=2**21, host_memory_bytes=2**22)))  # fmt: skip
    started = len(recorded)
    one = answers(engine, Request(tuple(tokens(5, 1)), SamplingConfig(3), read(adapter, small, 1)))
    check_greedy(one[0], 3, small, adapter, tokens(5, 1))
    assert len(recorded) == started
    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    kinds = [
        peft.PrefixTuningConfig(**virtual),
        peft.PromptTuningConfig(**virtual),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ]
    paths = [make_tuned(workshop / "small-b" / str(n), small, kind, n) for n, kind in enumerate(kinds)]
    loras = [None, *(read(path, small, n) for n, path in enumerate(paths))]
    found = answers(engine, *(Request(tuple(tokens(4, 1)), SamplingConfig(2), lora) for lora in loras))
    for path, answer in zip([None, *paths], found, strict=True):
        check_greedy(answer, 2, small, path, tokens(4, 1))
    engine.close()


def test_requests_of_the_wire_refuse_them(model: Path, workshop: Path) -> None:
    sent = read(make_kind(workshop / "sent", model, "token indices", 3), model, 1)
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


REFUSED = [
    ({"lm_head.weight": torch.ones(275, 64)}, "a changed vocabulary is not supported"),
    ({"model.embed_tokens.weight": torch.ones(272, 64)}, "modules_to_save does not name it"),
    ({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}, "of modules_to_save the embedding, the"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(60)}, "attn_q of this model gives 64 values"),
    (
        {
            "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
            "model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(64),
        },
        "mean the same bias",
    ),
    (
        {"lm_head.bias": torch.ones(272), "lm_head.base_layer.bias": torch.ones(272)},
        "lm_head has two tensors for the same bias",
    ),
    ({"model.layers.7.input_layernorm.weight": torch.ones(64)}, "the base model has no such norm"),
    ({"model.norm.weight": torch.ones(32)}, "made for another model"),
    ({"lm_head.lora_A.weight": torch.ones(4, 64)}, "must have lora_A.weight and lora_B.weight"),
    (
        {"lm_head.lora_A.weight": torch.ones(4, 60), "lm_head.lora_B.weight": torch.ones(272, 4)},
        "goes from 60 to 272 dimensions",
    ),
    ({"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 64)}, "the tokens of"),
    ({"model.layers.0.self_attn.q_proj.lora_B.bias": torch.full((64,), torch.inf)}, "an infinity"),
    ({"model.layers.0.self_attn.x_proj.bias": torch.ones(64)}, "biases of this module are not"),
]


@pytest.mark.parametrize("given", [[3, 3], ["a"], [300], {"embed_tokens": 3}, [1]])
def test_token_indices_must_fit(given: object, model: Path, workshop: Path) -> None:
    source = make_kind(workshop / f"ids-{given}", model, "token indices", 1)
    folder = edited(source, workshop / f"wrong-ids-{given}", trainable_token_indices=given)
    with pytest.raises(AdapterInvalidError, match="trainable_token_indices"):
        read(folder, model)


def test_a_copy_of_the_base_is_not_stored_and_tensors_have_no_place_for_the_rest(
    model: Path, workshop: Path
) -> None:
    base = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    source = make_adapter(workshop / "with-copy", model, 1, rank=2, modules=("q_proj",))
    folder = edited(source, workshop / "copy", {f"{PREFIX}model.embed_tokens.weight": base.bfloat16()})
    assert read(folder, model).extras == ()
    with pytest.raises(AdapterInvalidError, match="have a place in the tensors of an adapter"):
        read_adapter_folder(folder, BaseWeights(model))


def test_a_bias_that_the_base_does_not_have_is_added_whole(workshop: Path) -> None:
    model = make_model(workshop / "no-bias", "llama", seed=3)
    source = make_adapter(workshop / "no-bias-a", model, 1, rank=2, modules=("q_proj",))
    bias = torch.randn(64)
    key = f"{PREFIX}model.layers.1.self_attn.q_proj.base_layer.bias"
    [extra] = read(edited(source, workshop / "no-bias-b", {key: bias}), model).extras
    assert extra.name == "layers.1.attn_q.bias"
    np.testing.assert_array_equal(extra.values, bias.numpy())


def test_trained_tokens_of_a_tied_head_that_is_replaced_are_refused(model: Path, workshop: Path) -> None:
    source = make_kind(workshop / "tied", model, "token indices", 1)
    saved = {f"{PREFIX}lm_head.weight": torch.randn(272, 64)}
    folder = edited(source, workshop / "tied-b", saved, modules_to_save=["lm_head"])
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


STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def t5(workshop: Path) -> Path:
    return make_model(workshop / "t5-model", "t5", seed=3)


@pytest.fixture(scope="module")
def bart(workshop: Path) -> Path:
    return make_model(workshop / "bart-model", "bart", seed=3)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_parts_of_one_stack_and_parts_together(family: str, workshop: Path) -> None:
    model = make_model(workshop / f"{family}-parts", family, seed=4)
    q, stack = ("q", "encoder") if family == "t5" else ("q_proj", "model.encoder")
    ids = list(range(3, 250, 2))
    options: list[dict[str, Any]] = [
        {"modules": (q, f"{stack}.embed_tokens")},
        {"modules": (q, f"{stack.replace('en', 'de')}.embed_tokens"), "use_dora": True},
        {"modules": (q, "lm_head"), "trainable_token_indices": ids},
        {"modules": (q, "lm_head"), "lora_bias": True},
        {"modules": (q,), "trainable_token_indices": {"embed_tokens": ids, "lm_head": ids[:9]}},
        {"modules": (q, "embed_tokens", "lm_head"), "use_dora": True, "use_rslora": True},
        {"modules": (q,), "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules": (q,), "modules_to_save": ["final_layer_norm"]},
    ]
    check_batch(
        model,
        [make_adapter(workshop / f"{family}-part-{i}", model, i, rank=3, **o) for i, o in enumerate(options)],
    )


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("t5", {}),
        ("bart", {}),
        ("bart", STAGES),
        pytest.param("t5", {**STAGES, "tensor_parallel_size": 2}, marks=pytest.mark.extended),
    ],
    ids=["t5", "bart", "bart pp 2", "t5 tp 2, pp 2"],
)  # fmt: skip
def test_greedy_tokens_of_the_engine_whatever_is_evicted(
    family: str, ranks: dict[str, int], workshop: Path
) -> None:
    """From the prefetch directory, encoder and decoder in one step, in chunks; read again without room."""
    model = make_model(workshop / f"{family}-engine", family, seed=5)
    names = ("lora_bias", "both + DoRA", "modules_to_save", "norms saved", "token indices")
    kinds = dict(enumerate(names, 2))
    folder = workshop / f"{family}-prefetch"
    for number, kind in kinds.items():
        if not (folder / str(number)).is_dir():
            make_kind(folder / str(number), model, kind, number)
    room = 5 * 2**16 if ranks else 2**19  # of each rank
    cache = LoraCacheConfig(
        gpu_memory_bytes=room, host_memory_bytes=room, prefetch_dir=folder, max_adapter_size=8
    )
    settings = {"max_seq_len": 64, "max_num_tokens": 96, "max_batch_size": 8, "tokens_per_block": 4}
    engine = Engine(EngineConfig(model, device="cpu", lora=cache, **settings, **ranks))
    try:
        check_greedy_tokens(engine, model, folder, [None, *kinds, *kinds])
        assert engine.stats().adapters.host_evictions > 0
        engine.check()
    finally:
        engine.close()


def check_greedy_tokens(engine: Engine, model: Path, folder: Path, given: list[int | None]) -> None:
    """Those of PEFT. folder: of adapters by task id. given: that of each request."""
    assert engine.model.encoder is not None
    start = engine.model.encoder.decoder_start_id
    texts = [tuple(tokens(9 + number, number)) for number in range(len(given))]
    loras = [LoraInput(task_id) if task_id else None for task_id in given]
    params = SamplingConfig(max_tokens=8)
    pairs = zip(loras, texts, strict=True)
    found = answers(engine, *(Request((), params, lora, encoder_prompt=text) for lora, text in pairs))
    for task_id, text, answer in zip(given, texts, found, strict=True):
        check_greedy(answer, 8, model, folder / str(task_id) if task_id else None, (start,), text)


@pytest.mark.parametrize("root", ["", "model."])
def test_a_checkpoint_may_name_its_stacks_otherwise(root: str, bart: Path, workshop: Path) -> None:
    """Released BART has no `model.` before them, and the shared table three times."""
    other = shutil.copytree(bart, workshop / f"names-{root}")
    held = load_file(other / "model.safetensors")
    renamed = {name.replace("model.", root, 1): tensor for name, tensor in held.items()}
    for stack in ("encoder", "decoder"):
        renamed[f"{root}{stack}.embed_tokens.weight"] = renamed[f"{root}shared.weight"].clone()
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    for kind in ("bias", "both + DoRA", "modules_to_save", "norms saved"):
        adapter = workshop / f"names-{kind}"
        if not adapter.is_dir():
            make_kind(adapter, bart, kind, 8)
        one, two = read(adapter, bart), read(adapter, other)
        assert [extra.name for extra in one.extras] == [extra.name for extra in two.extras] != []
        for ours, theirs in zip(one.extras, two.extras, strict=True):
            assert (ours.values == theirs.values).all()
        assert (one.weights == two.weights).all()


ONES = torch.ones(272, 64)
ROWS = {"shared.token_adapter.trainable_tokens_delta": torch.ones(2, 64)}
INDICES = {"trainable_token_indices": {"shared": [3, 4], "embed_tokens": [3, 4], "lm_head": [3, 4]}}
REFUSED_OF_T5 = [
    ({"shared.weight": ONES}, r"shared.weight would do nothing: .* train embed_tokens instead"),
    (
        {"shared.lora_embedding_A": torch.ones(2, 272), "shared.lora_embedding_B": torch.ones(64, 2)},
        r"shared.lora_embedding_A would do nothing",
    ),
    ({"shared.bias": torch.ones(64)}, "an embedding has no such part"),
    ({"model.embed_tokens.weight": ONES}, "has an embedding for each of encoder and decoder"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "names neither encoder nor decoder"),
    (
        {"encoder.block.7.layer.0.SelfAttention.q.bias": torch.ones(64)},
        "the encoder of this model has 2 layers",
    ),
    ({"decoder.block.0.layer.3.layer_norm.weight": torch.ones(64)}, "has no such norm"),
    (
        {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": torch.ones(32, 4)},
        "full weights and biases of this module are not supported",
    ),
    ({**ROWS, "lm_head.weight": ONES}, "beside head.weight mean nothing in PEFT"),
    ({**ROWS, "encoder.embed_tokens.weight": ONES}, "beside encoder.embed.weight mean nothing"),
]


@pytest.mark.parametrize(
    ("of_t5", "tensors", "reason"),
    [*((False, *one) for one in REFUSED), *((True, *one) for one in REFUSED_OF_T5)],
    ids=[reason for _, reason in (*REFUSED, *REFUSED_OF_T5)],
)
def test_what_cannot_be_served_is_refused(
    of_t5: bool, tensors: dict, reason: str, model: Path, t5: Path, workshop: Path, tmp_path: Path
) -> None:
    base, name = (t5, "q") if of_t5 else (model, "q_proj")
    source = workshop / f"plain-{name}"
    if not source.is_dir():
        make_adapter(source, base, 1, rank=2, modules=(name,))
    saved = {"modules_to_save": ["embed_tokens", "lm_head", "shared"], **INDICES} if of_t5 else {}
    with pytest.raises(AdapterInvalidError, match=reason):
        read(edited(source, tmp_path / "refused", prefixed(tensors), **saved), base)

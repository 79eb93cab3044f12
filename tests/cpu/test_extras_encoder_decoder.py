"""Protects what adapters bring to encoder-decoder models beside low-rank matrices: biases, norms, each
stack's embedding, the head, rows of tokens. Logits and greedy tokens equal PEFT's, mixed with others; what
PEFT passes over or cannot run is refused with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import check_batch, edited, prefixed
from parity import make_kind
from running import check_greedy, let_arrive, read, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError
from manylora.request import LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = (
    "bias", "lora_bias", "DoRA + bias", "embedding", "lm_head", "both + DoRA", "modules_to_save",
    "norms saved", "token indices",
)  # fmt: skip
STAGES, SHARED = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def t5(workshop: Path) -> Path:
    return make_model(workshop / "t5-model", "t5", seed=3)


@pytest.fixture(scope="module")
def bart(workshop: Path) -> Path:
    return make_model(workshop / "bart-model", "bart", seed=3)


SLOW = pytest.mark.extended


@pytest.mark.parametrize(
    "family",
    [
        "t5", pytest.param("t5-v1.1", marks=SLOW), pytest.param("mt5", marks=SLOW),
        pytest.param("bart", marks=SLOW), "bart-scaled-untied",
    ],
)  # fmt: skip
def test_every_kind_in_one_batch(family: str, workshop: Path) -> None:
    model = make_model(workshop / family, family, seed=3)
    # T5 has no biases to train, and in an untied BART no stack looks at the shared table.
    without = {"bart": (), "bart-scaled-untied": ("token indices",)}.get(family, ("bias", "DoRA + bias"))
    kinds = enumerate(kind for kind in KINDS if kind not in without)
    check_batch(model, [make_kind(workshop / f"{family}-{seed}", model, kind, seed) for seed, kind in kinds])


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
    [("t5", {}), ("bart", {}), ("bart", STAGES), pytest.param("t5", {**STAGES, **SHARED}, marks=SLOW)],
    ids=["t5", "bart", "bart pp 2", "t5 tp 2, pp 2"],
)
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
    handles, found = {}, {}
    for number, task_id in enumerate(given):
        text, lora = tuple(tokens(9 + number, number)), LoraInput(task_id) if task_id else None
        request = Request((), SamplingConfig(max_tokens=8), lora, encoder_prompt=text)
        handles[engine.submit(engine.prepare(request))] = (task_id, text)
    let_arrive(engine)
    while engine.has_work:
        for handle, event in engine.step():
            assert event.error is None
            found.setdefault(handle, []).extend(event.token_ids)
    for handle, (task_id, text) in handles.items():
        adapter = folder / str(task_id) if task_id else None
        check_greedy(found[handle], 8, model, adapter, (start,), text)


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
REFUSED = [
    ({"shared.weight": ONES}, r"shared.weight would do nothing: .* train embed_tokens instead"),
    (
        {"shared.lora_embedding_A": torch.ones(2, 272), "shared.lora_embedding_B": torch.ones(64, 2)},
        r"shared.lora_embedding_A would do nothing",
    ),
    ({"shared.bias": torch.ones(64)}, "an embedding has no such part"),
    ({"model.embed_tokens.weight": ONES}, "has an embedding for each of encoder and decoder"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "names neither encoder nor decoder"),
    (
        {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)},
        "names neither encoder nor decoder",
    ),
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
    (
        {**ROWS, "lm_head.token_adapter.trainable_tokens_delta": torch.ones(2, 64)},
        "beside head.tokens mean nothing in PEFT",
    ),
    ({**ROWS, "encoder.embed_tokens.weight": ONES}, "beside encoder.embed.weight mean nothing"),
]


@pytest.mark.parametrize(("given", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_served_is_refused(
    given: dict, reason: str, t5: Path, workshop: Path, tmp_path: Path
) -> None:
    source = workshop / "plain"
    if not source.is_dir():
        make_adapter(source, t5, 1, rank=2, modules=("q",))
    saved = {"modules_to_save": ["embed_tokens", "lm_head", "shared"], **INDICES}
    with pytest.raises(AdapterInvalidError, match=reason):
        read(edited(source, tmp_path / "refused", prefixed(given), **saved), t5)

"""Protects encoders, whose tokens see each other: hidden states, heads, pairs of texts and adapters equal
those of transformers + PEFT in float32, many prompts in one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_adapters import hidden, logits, make_classifier, near
from running import pooled, read, tokens

from manylora.config.engine import EngineConfig
from manylora.config.pooling import read_pooling_settings
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.request import LoraInput, Pooling, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = (
    "bert", "roberta", "xlm-roberta", "modernbert", "gemma3_text", "mpnet", "electra", "distilbert",
    "nomic_bert",
)  # fmt: skip
BERT_LINEARS = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 130,
}  # fmt: skip
GATED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS = {
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "gemma3_text": GATED,
    "mpnet": ["q", "k", "v", "o", "intermediate.dense", "output.dense"],
    "distilbert": ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"],
    "nomic_bert": GATED,
}
# Windows that are shorter than the prompts, and than what is attended in one operation.
VARIANTS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": 260},  # beyond the distance from which tokens share a bucket
    "electra": {"embedding_size": 48},
    "distilbert": {},
    "nomic_bert": {},
    "modernbert": {
        "num_hidden_layers": 4, "local_attention": 14, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "gemma3_text": {
        "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 24, "query_pre_attn_scalar": 20,
        "sliding_window": 14, "use_bidirectional_attention": True, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip


NAMES = {
    "hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}  # fmt: skip


def make_encoder(path: Path, kind: str, auto: str = "AutoModel", **settings: Any) -> Path:
    import transformers

    torch.manual_seed(7)
    settings = {**SIZES, **VARIANTS[kind], **settings}
    if kind == "distilbert":
        settings = {NAMES.get(name, name): value for name, value in settings.items()}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def prompt(count: int, seed: int) -> list[int]:
    """Without the tokens of padding, which other positions are given."""
    return [token + 5 for token in tokens(count, seed)]


def engine_of(model: Path, dtype: str = "float32") -> Engine:
    return Engine(EngineConfig(model, device="cpu", dtype=dtype, max_num_tokens=128, max_batch_size=8))


def ask(
    ids: Sequence[int], mode: str = "cls", head: bool = False, lora: LoraInput | None = None, first: int = 0
) -> Request:
    return Request(tuple(ids), lora=lora, pooling=Pooling(mode, head, first))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states(kind: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", kind)
    engine = engine_of(model)
    prompts = [prompt(count, count) for count in (100, 3, 60, 61, 1)]  # in two steps
    for _ in range(2):
        found = pooled(engine, *(ask(ids, "all") for ids in prompts), *(ask(ids, "mean") for ids in prompts))
        for ids, every, mean in zip(prompts, found, found[5:], strict=False):
            expected = hidden(model, ids)
            assert near(every, expected)
            assert near(mean, expected.mean(0))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_adapters(kind: str, tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "base", kind, "AutoModelForSequenceClassification", num_labels=4)
    linears, mode = LINEARS.get(kind, BERT_LINEARS), "last" if kind == "gemma3_text" else "cls"
    own = make_classifier(tmp_path / "own", base, 3, 1, target_modules=linears)
    labels_each = "TOKEN_CLS" if kind != "gemma3_text" else "SEQ_CLS"  # which transformers lacks
    each = make_classifier(tmp_path / "each", base, 5, 2, labels_each, target_modules=linears)
    plain = _load(base)
    engine = engine_of(base)
    assert read_pooling_settings(base).head_mode == mode
    a, b = read(tmp_path / "own", base, 1), read(tmp_path / "each", base, 2)
    x, y = prompt(40, 1), prompt(17, 2)
    requests = [ask(x, mode, True), ask(x, mode, True, a), ask(y, mode, True, a)]
    found = pooled(
        engine, *requests, ask(y, "all" if labels_each == "TOKEN_CLS" else mode, True, b), ask(y, mode, True)
    )
    expected = [logits(plain, x), logits(own, x), logits(own, y), logits(each, y), logits(plain, y)]
    for ours, theirs in zip(found, expected, strict=True):
        assert near(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(kind: str, tmp_path: Path) -> None:
    model, ids = make_encoder(tmp_path / "model", kind), prompt(60, 4)
    [found] = pooled(engine_of(model, "bfloat16"), ask(ids, "all"))
    truth = hidden(model, ids)
    import transformers

    with torch.inference_mode():
        narrow = transformers.AutoModel.from_pretrained(model, dtype=torch.bfloat16)
        theirs = narrow(torch.tensor([ids])).last_hidden_state[0].float().numpy()
    ours, theirs = (np.median(np.sqrt(np.square(one - truth).mean(-1))) for one in (found, theirs))
    assert ours <= 1.3 * theirs


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_tokens_of_padding_have_a_position_of_their_own(kind: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", kind)
    [ids, *others] = [[0, 1, 9, 8, 1, 1, 7, 2, 1], prompt(20, 1), [1], [3, 1, 5]]
    found = pooled(engine_of(model), *(ask(one, "all") for one in (ids, *others)))
    for one, values in zip((ids, *others), found, strict=True):
        assert near(values, hidden(model, one))


def test_modernbert_pools_labels_as_its_config_says(tmp_path: Path) -> None:
    settings = {"num_labels": 4, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}
    base = make_encoder(
        tmp_path / "base", "modernbert", "AutoModelForSequenceClassification", **settings,
        attention_bias=True, mlp_bias=True, classifier_activation="silu", local_attention=160,
    )  # fmt: skip
    assert read_pooling_settings(base).head_mode == "mean"
    ids = prompt(100, 1)
    [found] = pooled(engine_of(base), ask(ids, "mean", head=True))
    assert near(found, logits(_load(base), ids))


def test_nomic_settings_by_their_own_names(tmp_path: Path) -> None:
    """As nomic-embed-text-v1.5 is published."""
    model = make_encoder(tmp_path / "model", "nomic_bert", rope_parameters={"rope_theta": 900.0})
    ids = prompt(60, 1)
    expected = hidden(model, ids)
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 130, "vocab_size": 259,
        "rotary_emb_base": 900, "layer_norm_epsilon": 1e-12, "rotary_emb_fraction": 1.0, "prenorm": False,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    [found] = pooled(engine_of(model), ask(ids, "all"))
    assert near(found, expected)


def test_two_texts(tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "base", "bert", "AutoModelForSequenceClassification", num_labels=1)
    ids = prompt(20, 3)
    with torch.inference_mode():
        types = torch.tensor([[0] * 8 + [1] * 12])
        expected = _load(base)(torch.tensor([ids]), token_type_ids=types).logits[0].numpy()
    found = pooled(engine_of(base), ask(ids, head=True, first=8), ask(ids, head=True))
    assert near(found[0], expected)
    assert not near(found[1], expected)


def test_what_is_refused(tmp_path: Path) -> None:
    engine = engine_of(make_encoder(tmp_path / "base", "bert"))
    for request, words in (
        (Request((5, 6), SamplingConfig(3)), "no head for text"),
        (ask([5, 6], head=True), "does not have a classification head"),
        (ask([5] * 129), "exceeds maximum input length"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(engine.prepare(request))


def _load(model: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()

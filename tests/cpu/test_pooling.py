"""Protects pooled outputs: hidden states and labels of the base's and adapters' heads equal those of
transformers + PEFT in float32, in the same steps as generation, by the engine, `LLM` and every route."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from pooled_adapters import hidden, logits, make_classifier, near
from running import check_greedy, pooled, read, run, tokens
from safetensors.torch import load_file, save_file
from serving import Running
from test_encoders import make_encoder
from tiny_models import load_transformers, make_adapter, make_model

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.pooling import PoolingSettings, read_pooling_settings
from manylora.doors.python import LLM, LoRARequest, PoolingParams
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError, RequestError
from manylora.generation.outputs import embedding, probabilities
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Pooling, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["what a day", "the cat sat on the mat", "no"]


class Shop:
    """A model, two adapters with heads of three labels and of one, and PEFT's models of them."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder / "base", "llama", seed=1)
        self.adapters = folder / "adapters"
        self.three = make_classifier(self.adapters / "three", self.model, 3, 1)
        self.one = make_classifier(self.adapters / "one", self.model, 1, 2)
        self.tokenizer = Tokenizer(self.model)

    def embedding(self, text: str) -> np.ndarray:
        found = hidden(self.model, self.tokenizer.encode(text))[-1]
        return found / np.linalg.norm(found)

    def probs(self, text: str) -> np.ndarray:
        found = np.exp(logits(self.three, self.tokenizer.encode(text)))
        return found / found.sum()

    def pair(self, first: str, second: str) -> float:
        ids, _ = self.tokenizer.encode_pair(first, second)
        return float(1 / (1 + np.exp(-logits(self.one, ids)[0])))

    def lora(self, name: str) -> LoRARequest:
        return LoRARequest(name, 1 + ["three", "one"].index(name), str(self.adapters / name))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("pooled"))


@pytest.fixture(scope="module")
def llm(shop: Shop) -> Iterator[LLM]:
    with LLM(shop.model, device="cpu", dtype="float32", enable_lora=True) as found:
        yield found


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[Running]:
    with Running(
        model=shop.model,
        lora_root=(shop.adapters,),
        served_model_name=("base",),
        dtype="float32",
        allow_runtime_lora_updating=True,
    ) as found:
        yield found


def test_llm_embeds(llm: LLM, shop: Shop) -> None:
    found = llm.embed(TEXTS)
    assert [one.prompt_token_ids for one in found] == [shop.tokenizer.encode(text) for text in TEXTS]
    for text, one in zip(TEXTS, found, strict=True):
        assert near(np.array(one.outputs.embedding), shop.embedding(text))
    [plain] = llm.embed("no", pooling_params=PoolingParams(use_activation=False))
    assert near(np.array(plain.outputs.embedding), hidden(shop.model, shop.tokenizer.encode("no"))[-1])
    with pytest.raises(ValueError, match="matryoshka"):
        llm.embed("no", pooling_params=PoolingParams(dimensions=8))


def test_llm_classifies_and_scores(llm: LLM, shop: Shop) -> None:
    found = llm.classify(TEXTS, lora_request=shop.lora("three"))
    for text, one in zip(TEXTS, found, strict=True):
        assert near(np.array(one.outputs.probs), shop.probs(text))
    [raw] = llm.reward("no", lora_request=shop.lora("one"))
    assert near(raw.outputs.data, logits(shop.one, shop.tokenizer.encode("no")))
    scores = llm.score("who?", TEXTS, lora_request=shop.lora("one"))
    for text, one in zip(TEXTS, scores, strict=True):
        assert one.outputs.score == pytest.approx(shop.pair("who?", text), rel=1e-4)
    [cosine] = llm.score("no", "what a day")
    expected = shop.embedding("no") @ shop.embedding("what a day")
    assert cosine.outputs.score == pytest.approx(expected, rel=1e-4)
    [tokens] = llm.encode("no", pooling_task="token_classify", lora_request=shop.lora("three"))
    assert tokens.outputs.data.shape == (len(shop.tokenizer.encode("no")), 3)


def test_a_head_that_came_as_tensors_or_in_one_file_scores(llm: LLM, shop: Shop, tmp_path: Path) -> None:
    """It gave the cosine of two embeddings."""
    folder = Path(str(shop.lora("one").lora_path))
    tensors = load_file(folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    in_memory = LoRARequest("in memory", 41, None)
    llm.load_adapter(in_memory, tensors, settings)
    save_file(tensors, tmp_path / "one.safetensors", {"adapter_config": json.dumps(settings)})
    for given in (in_memory, LoRARequest("one file", 42, str(tmp_path / "one.safetensors"))):
        [score] = llm.score("who?", TEXTS[0], lora_request=given)
        assert score.outputs.score == pytest.approx(shop.pair("who?", TEXTS[0]), rel=1e-4)


def test_scales_and_mixes_have_embeddings(llm: LLM, shop: Shop, tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / str(n), shop.model, n, 4) for n in (1, 2)]
    one, two = (LoRARequest(str(n), 50 + n, str(path)) for n, path in enumerate(folders))
    merged = PeftModel.from_pretrained(load_transformers(shop.model), str(folders[0]), "one")
    merged.load_adapter(str(folders[1]), "two")
    merged.add_weighted_adapter(["one", "two"], [0.5, -1.5], "mixed", combination_type="cat")
    merged.set_adapter("mixed")
    ids = shop.tokenizer.encode("what a day")
    with torch.inference_mode():
        states = merged(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
    [found] = llm.embed("what a day", lora_request=[(one, 0.5), (two, -1.5)])
    assert near(np.array(found.outputs.embedding), states / np.linalg.norm(states))
    several = llm.embed(["no", "no"], lora_request=[(one, 0.5), one])
    assert several[0].outputs.embedding != several[1].outputs.embedding
    assert llm.embed("no", lora_request=(one, 0.5))[0].outputs == several[0].outputs


def test_an_encoder_is_healthy_without_text(shop: Shop, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "encoder", "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shop.model / name, model / name)
    with Running(model=model, dtype="float32") as server:
        answer = server.http.get("/health/model")
    assert answer.status_code == 200, answer.text


def test_embeddings_over_http(server: Running, shop: Shop) -> None:
    found = server.client().embeddings.create(model="base", input=TEXTS)  # which asks for base64
    for text, one in zip(TEXTS, found.data, strict=True):
        assert near(np.array(one.embedding), shop.embedding(text))
    count = sum(len(shop.tokenizer.encode(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == count
    ids = shop.tokenizer.encode("no")
    for given in (ids, [ids], "no"):
        body = server.post("/v1/embeddings", input=given, encoding_format="base64").json()
        values = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
        assert near(values, shop.embedding("no"))


def test_embeddings_as_ollama_asks_for_them(server: Running, shop: Shop) -> None:
    def ask(path: str = "/api/embed", model: str = "base", **body: Any) -> dict[str, Any]:
        return server.ask(path, model=model, **body)

    found = ask(model="base:latest", input=TEXTS, keep_alive=0, options={"num_ctx": 512})
    for text, one in zip(TEXTS, found["embeddings"], strict=True):
        assert near(np.array(one), shop.embedding(text))
    count = sum(len(shop.tokenizer.encode(text)) for text in TEXTS)
    assert (found["model"], found["prompt_eval_count"]) == ("base:latest", count)
    assert found["total_duration"] > found["load_duration"] > 1
    assert ask(input="no")["embeddings"] == ask(input=["no"])["embeddings"]
    assert not near(np.array(ask(model="three", input="no")["embeddings"][0]), shop.embedding("no"))
    plain = ask("/api/embeddings", prompt="no")["embedding"]
    assert near(np.array(plain), hidden(shop.model, shop.tokenizer.encode("no"))[-1])
    assert ask()["embeddings"] == ask(input="")["embeddings"] == ask("/api/embeddings")["embedding"] == []
    assert "'nobody' does not exist" in server.ask("/api/embed", 404, model="nobody")["error"]
    wrong = server.ask("/api/embed", 400, model="base", input="no", dimensions=8)
    assert "matryoshka" in wrong["error"]


def test_ollama_cuts_the_end_of_a_text(server: Running, shop: Shop) -> None:
    most = server.post("/tokenize", prompt="a").json()["max_model_len"]
    text = " ".join(TEXTS * most)
    ids = shop.tokenizer.encode(text)
    assert len(ids) > most
    found = server.post("/api/embed", model="base", input=text).json()
    assert found["prompt_eval_count"] == most
    whole = server.post("/v1/embeddings", model="base", input=ids[:most]).json()
    assert near(np.array(found["embeddings"][0]), np.array(whole["data"][0]["embedding"]))
    refused = server.post("/api/embed", model="base", input=text, truncate=False)
    assert refused.status_code == 400 and "context length" in refused.json()["error"]


def test_classify_over_http_beside_text(server: Running, shop: Shop) -> None:
    def ask(number: int) -> dict[str, Any]:
        if number % 3 == 0:
            return server.post(model="base", prompt="no", max_tokens=5, temperature=0).json()
        if number % 3 == 1:
            return server.post("/v1/classify", model="three", input=TEXTS).json()
        return server.post("/v1/embeddings", model="base", input="no").json()

    with ThreadPoolExecutor(9) as pool:
        texts, labels, embedded = (list(pool.map(ask, range(kind, 12, 3))) for kind in range(3))
    assert len({one["choices"][0]["text"] for one in texts}) == 1
    for one in labels:
        for text, data in zip(TEXTS, one["data"], strict=True):
            expected = shop.probs(text)
            assert near(np.array(data["probs"]), expected)
            assert data["label"] == f"LABEL_{expected.argmax()}"
            assert data["num_classes"] == 3
    assert server.metric('manylora_pooled_requests_total{adapter="three"') >= 12
    for one in embedded:
        assert near(np.array(one["data"][0]["embedding"]), shop.embedding("no"))


def test_score_and_rerank_over_http(server: Running, shop: Shop) -> None:
    body = server.post("/v1/score", model="one", text_1="who?", text_2=TEXTS).json()
    expected = [shop.pair("who?", text) for text in TEXTS]
    assert [one["score"] for one in body["data"]] == pytest.approx(expected, rel=1e-4)
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = server.post(path, model="one", query="who?", documents=TEXTS, top_n=2).json()["results"]
        assert [one["index"] for one in found] == order[:2]
        assert found[0]["document"]["text"] == TEXTS[order[0]]
        assert found[0]["relevance_score"] == pytest.approx(expected[order[0]], rel=1e-4)
    body = server.post("/score", model="base", text_1="no", text_2=["what a day"]).json()
    cosine = shop.embedding("no") @ shop.embedding("what a day")
    assert body["data"][0]["score"] == pytest.approx(cosine, rel=1e-4)


def test_pooling_over_http(server: Running, shop: Shop) -> None:
    labels = server.post("/pooling", model="three", input="no", use_activation=False).json()["data"][0][
        "data"
    ]
    assert near(np.array(labels), logits(shop.three, shop.tokenizer.encode("no")))
    each = server.post("/pooling", model="base", input="no", task="token_embed", use_activation=False).json()
    assert near(np.array(each["data"][0]["data"]), hidden(shop.model, shop.tokenizer.encode("no")))


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [("/v1/embeddings", {}, "normalize"), ("/v1/classify", {"model": "three"}, "activation")],
)
def test_other_names_of_use_activation(server: Running, path: str, body: dict[str, Any], name: str) -> None:
    made = [
        server.post(path, input="no", **body, **{key: value}).json()["data"]
        for key in ("use_activation", name)
        for value in (True, False)
    ]
    assert made[0] == made[2] != made[1] == made[3]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/embeddings", {"input": "a", "use_activation": True, "normalize": False}, 400, "mean the same"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "right"}, 400, "truncation_side"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input"),
        ("/v1/embeddings", {"input": [10**6]}, 400, "token ids must be at most"),
        ("/v1/completions", {"prompt": "a", "model": "three"}, 400, "has a classification head"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, 400, "one for each text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "three"}, 400, "one label"),
    ],
)
def test_http_refuses(server: Running, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = server.ask(path, status, **body)
    assert words in answer["error"]["message"]


def test_settings_of_sentence_transformers(tmp_path: Path) -> None:
    assert read_pooling_settings(tmp_path) == PoolingSettings()
    kind = "sentence_transformers.models"
    parts = ("Transformer", "Pooling")
    listed = ",".join(f'{{"type": "{kind}.{one}", "path": "1_{one}"}}' for one in parts)
    (tmp_path / "modules.json").write_text(f"[{listed}]")
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}')
    (tmp_path / "config.json").write_text(
        '{"id2label": {"0": "no", "1": "yes"}, "matryoshka_dimensions": [4]}'
    )
    found = read_pooling_settings(tmp_path)
    assert (found.mode, found.normalise, found.dimensions) == ("mean", False, (4,))
    assert found.label_names(2) == ("no", "yes")
    assert found.label_names(3) == ("LABEL_0", "LABEL_1", "LABEL_2")
    pooling.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ConfigError, match="must choose one of"):
        read_pooling_settings(tmp_path)


def test_arithmetic() -> None:
    values = np.array([3.0, 4.0, 12.0], np.float32)
    cut = embedding(values, PoolingSettings(dimensions=(2,)), PoolingParams(dimensions=2))
    assert cut == pytest.approx([0.6, 0.8])
    logits = np.array([0.0, np.log(3.0)], np.float32)
    assert probabilities(logits, PoolingSettings()) == pytest.approx([0.25, 0.75])
    many = PoolingSettings(problem="multi_label_classification")
    assert probabilities(logits, many) == pytest.approx([0.5, 0.75])
    assert probabilities(logits, PoolingSettings(problem="regression")) is logits
    assert probabilities(logits[1:], PoolingSettings()) == pytest.approx([0.75])


SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_tokens": 80, "max_batch_size": 16}


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "llama", seed=1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(EngineConfig(model, **SETTINGS))


def ask(ids: Sequence[int], mode: str = "last", head: bool = False, lora: LoraInput | None = None) -> Request:
    return Request(tuple(ids), lora=lora, pooling=Pooling(mode, head))


def test_hidden_states_of_the_base(engine: Engine, model: Path) -> None:
    ids = tokens(150, 5)  # in several chunks
    expected = hidden(model, ids)
    for _ in range(2):  # with blocks that are there already
        last, mean, every = pooled(engine, ask(ids), ask(ids, "mean"), ask(ids, "all"))
        assert near(last, expected[-1])
        assert near(mean, expected.mean(0))
        assert near(every, expected)


def test_heads_of_adapters_beside_generation(engine: Engine, model: Path, workshop: Path) -> None:
    three = make_classifier(workshop / "three", model, 3, 1)
    seven = make_classifier(workshop / "seven", model, 7, 2, "TOKEN_CLS")
    text = make_adapter(workshop / "text", model, 3)
    a, b, c = (read(workshop / name, model, task) for task, name in enumerate(("three", "seven", "text")))
    short, long = tokens(33, 6), tokens(120, 7)
    events = run(
        engine,
        ask(short, head=True, lora=a),
        ask(long, head=True, lora=a),
        ask(short, "all", head=True, lora=b),
        ask(long, "all", head=True, lora=b),
        Request(tuple(short), SamplingConfig(6), c),
        Request(tuple(long), SamplingConfig(6)),
        ask(long, lora=c),
    )
    found = [one[-1] for one in events]
    expected = [logits(three, short), logits(three, long), logits(seven, short), logits(seven, long)]
    for event, values in zip(found, expected, strict=False):
        assert event.pooled is not None
        assert near(event.pooled, values)
    check_greedy(found[4].token_ids, 6, model, text, short)
    check_greedy(found[5].token_ids, 6, model, None, long)
    assert not near(found[6].pooled, hidden(model, long)[-1])


def test_an_answer_does_not_depend_on_its_company(engine: Engine, model: Path, workshop: Path) -> None:
    make_classifier(workshop / "company", model, 4, 9)
    lora = read(workshop / "company", model, 9)
    one = ask(tokens(100, 1), head=True, lora=lora)
    [alone] = pooled(engine, one)
    others = [ask(tokens(60, seed), "mean") for seed in range(5)]
    assert np.array_equal(alone, pooled(engine, *others, one)[-1])


def test_eviction_and_reload(model: Path, workshop: Path) -> None:
    """A cache with room for one adapter: each comes back with its head."""
    lora = LoraCacheConfig(max_cpu_loras=1, max_loras=1, max_adapter_size=8)
    engine = Engine(EngineConfig(model, **SETTINGS, lora=lora))
    made = [make_classifier(workshop / f"evicted-{n}", model, n, n) for n in (2, 5)]
    loras = [read(workshop / f"evicted-{n}", model, n) for n in (2, 5)]
    ids = tokens(40, 3)
    for turn in (0, 1, 0, 1):
        assert near(pooled(engine, ask(ids, head=True, lora=loras[turn]))[0], logits(made[turn], ids))


def test_a_base_with_a_head_of_its_own(workshop: Path, model: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(4)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=4, dtype=torch.float32)
    base.config.pad_token_id = 0
    path = workshop / "headed"
    base.save_pretrained(path)
    own = make_classifier(workshop / "on-headed", path, 4, 8)
    engine = Engine(EngineConfig(path, **SETTINGS))
    ids = tokens(50, 4)
    lora = read(workshop / "on-headed", path, 1)
    found = pooled(engine, ask(ids, head=True), ask(ids, head=True, lora=lora))
    assert near(found[0], logits(base.eval(), ids))
    assert near(found[1], logits(own, ids))
    with pytest.raises(RequestError, match="no head for text"):
        engine.submit(engine.prepare(Request(tuple(ids), SamplingConfig(4))))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_a_bare_model(family: str, workshop: Path) -> None:
    """As embedding models are saved: without a head, and without its prefix in the names of tensors."""
    from transformers import AutoModel

    whole, path = make_model(workshop / family, family, seed=3), workshop / f"bare-{family}"
    AutoModel.from_pretrained(whole, dtype=torch.float32).save_pretrained(path)
    ids = tokens(30, 3)
    found = pooled(Engine(EngineConfig(path, **SETTINGS)), ask(ids), ask(ids, "all"))
    expected = hidden(whole, ids)
    assert near(found[0], expected[-1])
    assert near(found[1], expected)


def test_what_is_refused(engine: Engine, model: Path, workshop: Path) -> None:
    make_classifier(workshop / "only-labels", model, 2, 1)
    labels = read(workshop / "only-labels", model, 21)
    text = read(make_adapter(workshop / "only-text", model, 3), model, 22)
    ids = tuple(tokens(20, 1))
    for request, words in (
        (Request(ids, SamplingConfig(3), labels), "has a classification head"),
        (ask(ids, head=True, lora=text), "neither this adapter nor its base"),
        (ask(ids, head=True), "does not have a classification head"),
        (ask(ids, "cls"), "pooling must be last, mean or all"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(engine.prepare(request))
    with pytest.raises(RequestError, match="leave streaming out"):
        Request(ids, pooling=Pooling(), streaming=True)
    engine.check()


def test_a_head_for_another_model(model: Path, workshop: Path) -> None:
    make_classifier(workshop / "right", model, 3, 1)
    wrong = workshop / "wrong"
    shutil.copytree(workshop / "right", wrong)
    stored = load_file(wrong / "adapter_model.safetensors")
    [key] = [name for name in stored if name.endswith("score.weight")]
    save_file({**stored, key: torch.zeros(3, 8)}, wrong / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalidError, match="made for another model"):
        read(wrong, model)


def test_a_decoder_that_attends_both_ways_is_refused(model: Path, workshop: Path) -> None:
    path = workshop / "both-ways"
    shutil.copytree(model, path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "is_causal": False}))
    with pytest.raises(ConfigError, match="both directions"):
        read_model_config(path)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapped_steps_and_preemption(overlap: bool, model: Path) -> None:
    """With too few blocks for all, sequences are computed again; the values stay."""
    few = {"max_tokens_in_paged_kv_cache": 320, "batch_scheduler_policy": "max_utilization"}
    engine = Engine(EngineConfig(model, **SETTINGS, **few, enable_overlap=overlap))
    prompts = [tokens(90, seed) for seed in range(3)]
    text = [Request(tuple(tokens(20, seed)), SamplingConfig(60)) for seed in (8, 9)]
    asked = [ask(ids, mode) for ids in prompts for mode in ("last", "mean")]
    found = run(engine, *text, *asked)
    for events, request in zip(found[2:], asked, strict=True):
        assert events[0].pooled is not None
        expected = hidden(model, request.prompt)
        assert request.pooling is not None
        assert near(events[0].pooled, expected[-1] if request.pooling.mode == "last" else expected.mean(0))
    for events, one in zip(found, text, strict=False):
        check_greedy(events[-1].token_ids, 60, model, None, one.prompt)

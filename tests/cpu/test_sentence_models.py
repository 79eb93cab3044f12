"""Protects models of sentence-transformers: dense layers behind pooling, embeddings of the last token, and
scores from the logits of two tokens, with adapters mixed in one batch, as transformers + PEFT have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from pooled_adapters import near
from safetensors.torch import save_file
from test_encoders import make_encoder
from tiny_models import make_model

from manylora.config.pooling import read_pooling_settings
from manylora.doors.python import LLM, LoRARequest, PoolingParams, SamplingParams
from manylora.errors import ConfigError, RequestError
from manylora.generation.outputs import pair_score
from manylora.generation.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["what a day", "the cat sat on the mat, and then it left for good", "no"]
IDENTITY = "torch.nn.modules.linear.Identity"


def load(model: Path, auto: str = "AutoModel") -> Any:
    import transformers

    return getattr(transformers, auto).from_pretrained(model, dtype=torch.float32).eval()


def adapted(path: Path, model: Any, seed: int, **options: Any) -> Any:
    """A random adapter, and PEFT's model of it."""
    torch.manual_seed(seed)
    found = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    )
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    found.save_pretrained(path)
    return found.eval()


def save_modules(model: Path, kinds: list[str], mode: str) -> None:
    kind = "sentence_transformers.models"
    names = ["", *(f"{number}_{one}" for number, one in enumerate(kinds, 1))]
    listed = [
        {"idx": i, "name": str(i), "path": name, "type": f"{kind}.{one}"}
        for i, (name, one) in enumerate(zip(names, ["Transformer", *kinds], strict=True))
    ]
    (model / "modules.json").write_text(json.dumps(listed))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def add_dense(folder: Path, inputs: int, outputs: int, activation: str, bias: bool) -> torch.nn.Module:
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    folder.mkdir()
    save_file(
        {f"linear.{name}": one for name, one in layer.state_dict().items()}, folder / "model.safetensors"
    )
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(config))
    return layer


def length_one(values: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(values, dim=-1).numpy()


def test_embedding_gemma(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "gemma3_text", vocab_size=272)
    tokens = make_model(tmp_path / "tokens", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokens / name, model)
    save_modules(model, ["Pooling", "Dense", "Dense", "Normalize"], "mean_tokens")
    torch.manual_seed(3)
    first = add_dense(model / "2_Dense", 64, 96, IDENTITY, False)
    second = add_dense(model / "3_Dense", 96, 48, "torch.nn.modules.activation.Tanh", True)
    base, other = load(model), adapted(tmp_path / "other", load(model), 1)
    tokenizer, lora = Tokenizer(model), LoRARequest("other", 1, str(tmp_path / "other"))

    def expected(one: Any, text: str) -> np.ndarray:
        with torch.inference_mode():
            states = one(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
            return length_one(torch.tanh(second(first(states.mean(0)))))

    with LLM(model, device="cpu", dtype="float32", enable_lora=True) as llm:
        found = llm.embed(TEXTS * 2, lora_request=[None] * 3 + [lora] * 3)
        raw = llm.embed("no", pooling_params=PoolingParams(use_activation=False))
    for index, text in enumerate(TEXTS):
        assert near(np.array(found[index].outputs.embedding), expected(base, text))
        assert near(np.array(found[3 + index].outputs.embedding), expected(other, text))
    assert abs(np.linalg.norm(raw[0].outputs.embedding) - 1) > 1e-3
    (model / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"3_Dense/model\.safetensors is missing"):
        LLM(model, device="cpu", dtype="float32")


def test_qwen3_embedding(tmp_path: Path) -> None:
    """Its tokenizer puts an end token behind each text; that one is pooled."""
    model = make_model(tmp_path / "model", "qwen3", seed=4)
    plain, path = Tokenizer(model), model / "tokenizer.json"
    raw = json.loads(path.read_text())
    end = {"id": "</s>", "ids": [257], "tokens": ["</s>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    pair = [*single[:1], {"Sequence": {"id": "B", "type_id": 0}}, single[1]]
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"</s>": end}
    }  # fmt: skip
    path.write_text(json.dumps(raw))
    save_modules(model, ["Pooling", "Normalize"], "lasttoken")
    base, other = load(model), adapted(tmp_path / "other", load(model), 2)
    lora = LoRARequest("other", 1, str(tmp_path / "other"))
    with LLM(model, device="cpu", dtype="float32", enable_lora=True) as llm:
        found = llm.embed(TEXTS * 2, lora_request=[None, lora] * 3)
    for one, text, reference in zip(found, TEXTS * 2, [base, other] * 3, strict=True):
        ids = [*plain.encode(text, add_special_tokens=False), 257]
        assert one.prompt_token_ids == ids
        with torch.inference_mode():
            states = reference(torch.tensor([ids])).last_hidden_state[0]
        assert near(np.array(one.outputs.embedding), length_one(states[-1]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("named", ["config", "modules"])
def test_qwen3_reranker(named: str, tied: bool, tmp_path: Path) -> None:
    """The model for text gives the score; an adapter may change it, and both still make text."""
    if tied and named == "modules":
        pytest.skip("the same")
    model = make_model(tmp_path / "model", "qwen3", seed=5, tie_word_embeddings=tied)
    tokenizer = Tokenizer(model)
    [no], [yes] = (tokenizer.encode(one, add_special_tokens=False) for one in "ny")
    raw = json.loads((model / "config.json").read_text())
    if named == "config":
        (model / "config.json").write_text(json.dumps({**raw, "classifier_from_token": ["n", "y"]}))
    else:
        listed = [{"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_LogitScore"}]
        (model / "modules.json").write_text(json.dumps(listed))
        (model / "1_LogitScore").mkdir()
        ids = {"true_token_id": yes, "false_token_id": no}
        (model / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    causal = "AutoModelForCausalLM"
    base = load(model, causal)
    other = adapted(tmp_path / "other", load(model, causal), 3)
    adapted(tmp_path / "head", load(model, causal), 4, modules_to_save=["lm_head"])

    def expected(one: Any, first: str, second: str) -> float:
        ids, _ = tokenizer.encode_pair(first, second)
        with torch.inference_mode():
            last = one(torch.tensor([ids])).logits[0, -1]
        return float(torch.log_softmax(last[[no, yes]], 0)[1].exp())

    lora, head = (
        LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(("other", "head"), 1)
    )
    with LLM(model, device="cpu", dtype="float32", enable_lora=True) as llm:
        for reference, given in ((base, None), (other, lora)):
            for text, one in zip(TEXTS, llm.score("which?", TEXTS, lora_request=given), strict=True):
                assert one.outputs.score == pytest.approx(expected(reference, "which?", text), rel=1e-4)
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True)).outputs[0].token_ids
        with pytest.raises(RequestError, match="changes the head for text"):
            llm.classify("a", lora_request=head)


def test_settings_of_sentence_bert(tmp_path: Path) -> None:
    """Texts in lower case, and at most 12 tokens unless a larger limit is given."""
    model = make_model(tmp_path / "model", "qwen3", seed=4)
    path = model / "sentence_bert_config.json"
    path.write_text(json.dumps({"do_lower_case": True, "max_seq_length": 12}))
    with LLM(model, device="cpu", dtype="float32") as llm:
        [found, wanted] = llm.embed(["WHAT a Day", TEXTS[0]])
        with pytest.raises(RequestError, match="12"):
            llm.embed(TEXTS[1])
    assert found.prompt_token_ids == wanted.prompt_token_ids
    with LLM(model, device="cpu", dtype="float32", max_seq_len=100) as llm:
        [longer] = llm.embed(TEXTS[1].upper())
    path.unlink()
    assert longer.prompt_token_ids == Tokenizer(model).encode(TEXTS[1])


IDENTITIES = ({"sentence_transformers": {"activation_fn": IDENTITY}},
              {"sbert_ce_default_activation_function": IDENTITY})  # fmt: skip
SIGMOID = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}


def test_scores_of_a_cross_encoder(tmp_path: Path) -> None:
    """Equal CrossEncoder.predict: the head's value after the function that config.json names."""
    model = make_encoder(tmp_path / "model", "bert", "AutoModelForSequenceClassification", num_labels=1)
    tokens, config = make_model(tmp_path / "tokens", "llama"), model / "config.json"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokens / name, model)
    raw = json.loads(config.read_text())
    ids, first = Tokenizer(model).encode_pair("which?", TEXTS[0])
    types = torch.tensor([[int(place >= first) for place in range(len(ids))]])
    with torch.inference_mode():
        base = load(model, "AutoModelForSequenceClassification")
        value = base(torch.tensor([ids]), token_type_ids=types).logits[0]
    for number, own in enumerate((*IDENTITIES, SIGMOID, {})):
        config.write_text(json.dumps(raw | own))
        wanted = float(value if number < 2 else value.sigmoid())
        logits = value.numpy()
        assert pair_score(logits, read_pooling_settings(model), PoolingParams()) == pytest.approx(wanted)
    config.write_text(json.dumps(raw | IDENTITIES[0]))
    with LLM(model, device="cpu", dtype="float32") as llm:
        [found] = llm.score("which?", TEXTS[0])
    assert found.outputs.score == pytest.approx(float(value), rel=1e-4)
    for other in ("torch.nn.modules.activation.Softmax", "os.Identity", {"a": 1}):
        config.write_text(json.dumps(raw | {"sbert_ce_default_activation_function": other}))
        with pytest.raises(ConfigError, match=r"activation_fn .* only torch.nn's Sigmoid and Identity"):
            read_pooling_settings(model)

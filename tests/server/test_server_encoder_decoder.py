"""Protects encoder-decoder models behind the real server: input_ids go to the encoder, decoder_input_ids or
decoder_text_input to the decoder, with an adapter on both, through every model of the repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import processes
from servers import Running, fill_repo, served
from test_ranks import followers
from test_server import ask, inputs, new_ids
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_generate

from manylora.adapters.modules import lora_modules
from manylora.cli import main
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config

NEW = 6
TEXT, BEGUN = "Translate this: Hello", "Hal"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("both") / "model", "bart", seed=4)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model, 1, 8, ("q_proj", "v_proj", "out_proj", "fc1"))


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """Parts that tensors cannot carry, on both stacks."""
    options = {"use_dora": True, "modules_to_save": ["self_attn_layer_norm"], "bias": "lora_only"}
    modules = ("q_proj", "fc2", "embed_tokens", "lm_head")
    return make_adapter(model.parent / "prefetch" / "7", model, 2, 4, modules, **options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one rank"),
        pytest.param(2, id="two stages", marks=pytest.mark.extended),
    ],
)
def running(request: pytest.FixtureRequest, model: Path, whole: Path) -> Iterator[Running]:
    """Of a directory that was built for so many stages."""
    stages, built = request.param, model
    if stages > 1:
        built = model.parent / "built"
        flags = ["--model_dir", str(model), "--output_dir", str(built), "--pp_size", str(stages)]
        assert main(["build", *flags]) == 0
    repo = fill_repo(
        model.parent / f"repo-{stages}",
        built,
        lora_weights_data_type="TYPE_FP32",
        max_tokens_in_paged_kv_cache="512",
        lora_prefetch_dir=str(whole.parent),
    )
    with served(repo) as server:
        assert len(followers(processes(server)["tensorrt_llm"])) == stages - 1
        yield server


def test_the_decoder_goes_on_from_its_own_ids_under_an_adapter(
    running: Running, model: Path, adapter: Path
) -> None:
    config = read_model_config(model)
    assert config.encoder is not None
    start, text = config.encoder.decoder_start_id, Tokenizer(model).encode(TEXT)
    weights, rows = read_adapter_folder(adapter, None, lora_modules(config))
    lora = {"lora_task_id": np.array([[1]], np.uint64), "lora_weights": weights, "lora_config": rows}
    for decoder, echoed in (([start, 70, 71], [start, 70, 71]), ([], [])):
        sent = {"decoder_input_ids": np.array([decoder], np.int32)} if decoder else {}
        found = new_ids(ask(running, inputs(text, NEW, **sent, **lora)))
        assert found == echoed + reference_generate(model, adapter, decoder or [start], NEW, text)
        lora = {"lora_task_id": lora["lora_task_id"]}


def test_an_adapter_with_embeddings_head_norms_and_biases(running: Running, model: Path, whole: Path) -> None:
    start, text = Tokenizer(model).decoder_start_id, Tokenizer(model).encode(TEXT)
    assert start is not None
    found = new_ids(ask(running, inputs(text, NEW, lora_task_id=np.array([[7]], np.uint64))))
    assert found == reference_generate(model, whole, [start], NEW, text)
    assert found != reference_generate(model, None, [start], NEW, text)


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls"])
def test_texts_for_encoder_and_decoder(running: Running, model: Path, name: str) -> None:
    tokenizer = Tokenizer(model)
    start = tokenizer.decoder_start_id
    assert start is not None
    text = tokenizer.encode(TEXT)
    for begun in ("", BEGUN):
        body = {"text_input": TEXT, "max_tokens": NEW, "end_id": -1, "exclude_input_in_output": True}
        if begun:
            body["decoder_text_input"] = begun
        found = json.loads(running.post(f"{name}/generate", **body)[1])["text_output"]
        decoder = [start, *tokenizer.encode(begun, add_special_tokens=False)]
        assert found == tokenizer.decode(reference_generate(model, None, decoder, NEW, text))

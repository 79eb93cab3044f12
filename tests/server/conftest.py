"""A real tritonserver with a tiny model, started once through the launcher; nothing may be left behind."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig
from servers import INVOKE, MODULES, NAMES, ROOT, Named, Running, World, fill_repo, new_server, served
from tiny_models import make_adapter, make_model, make_tuned

from manylora.adapters.convert import convert_peft
from manylora.adapters.formats.npy import write_npy
from manylora.generation.tokenizer import Tokenizer

sys.path.append(str(ROOT / "tests" / "cpu"))
from pooled_adapters import make_classifier


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("served")
    model = make_model(path / "model", "llama", seed=11)
    adapters = {}
    for task_id, rank in ((1, 8), (2, 16), (3, 1), (4, 64)):
        adapters[task_id] = make_adapter(path / f"a{task_id}", model, task_id, rank, MODULES[: task_id + 2])
        weights, config = convert_peft(adapters[task_id], "float32")
        write_npy(path / "converted" / str(task_id), weights, config)
    return World(model, adapters, path / "converted")


@pytest.fixture(scope="session")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("repo")
    prefetch = path / "prefetch"
    shutil.copytree(world.converted / "4", prefetch / "4")
    catalog = path / "catalog"
    shutil.copytree(world.adapters[3], catalog / "tiny-three")
    saved = {"modules_to_save": ["embed_tokens", "norm"], "bias": "all"}
    make_adapter(catalog / "tiny-saved", world.model, 6, modules=("q_proj", "lm_head"), **saved)
    count = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
    scales = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    make_tuned(catalog / "tiny-scales", world.model, scales, 7)
    make_tuned(catalog / "tiny-prefix", world.model, PrefixTuningConfig(**count), 8)
    make_tuned(catalog / "tiny-prompt", world.model, PromptTuningConfig(**count), 9)
    (prefetch / "5").mkdir()
    (prefetch / "5" / "model.lora_weights.npy").write_bytes(b"\x93NUMPY rubbish")
    repo = fill_repo(
        path / "models",
        world.model,
        lora_prefetch_dir=str(prefetch),
        lora_catalog_dir=str(catalog),
        lora_weights_data_type="TYPE_FP32",
        max_beam_width="4",
        guided_decoding_backend="xgrammar",
        tensorrt_llm_draft_model_name="tensorrt_llm",
    )
    running = new_server(repo)
    running.start()
    yield running
    with Path(running.state()["log"]).open() as log:
        stopped = running.launch("--stop")
        text = log.read()
    assert "lora task 5 is skipped: model.lora_weights.npy is not a readable .npy array" in text
    assert "Fatal Python error" not in text
    assert stopped.returncode == 0, stopped.stderr
    assert not list(Path("/dev/shm").glob(f"manylora_*_{running.http}_*"))
    for port in (running.http, running.grpc, running.metrics):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} still listens"


@pytest.fixture(scope="session")
def named(world: World, tmp_path_factory: pytest.TempPathFactory) -> Named:
    path = tmp_path_factory.mktemp("named")
    catalog = path / "catalog"
    places = [(catalog if name in NAMES[:2] else path / "elsewhere") / name for name in NAMES]
    for seed, place in enumerate(places, 21):
        make_adapter(place, world.model, seed, 8, ("q_proj", "v_proj", "up_proj"))
    labels = make_classifier(catalog / "labels", world.model, 3, 1)
    score = make_classifier(catalog / "score", world.model, 1, 2, r=8)
    invoke = Tokenizer(world.model).encode(INVOKE, add_special_tokens=False)
    activated = {"alora_invocation_tokens": invoke, "task_type": "CAUSAL_LM"}
    make_adapter(catalog / "activated", world.model, 5, **activated)
    return Named(catalog, dict(zip(NAMES, places, strict=True)), labels, score)


@pytest.fixture(scope="session")
def contracts(world: World, named: Named, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With the models of other projects, and a cache of two adapters."""
    repo = fill_repo(
        tmp_path_factory.mktemp("contracts") / "models",
        world.model,
        contracts=True,
        lora_catalog_dir=str(named.catalog),
        max_loras="2",
        max_cpu_loras="2",
        lora_cache_max_adapter_size="8",
        guided_decoding_backend="xgrammar",
    )
    names = {name: str(named.folders[name]) for name in NAMES[2:]}
    (repo / "vllm_model/1/multi_lora.json").write_text(json.dumps(names), encoding="utf-8")
    config = repo / "vllm_model" / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace("${report_custom_metrics}", "true")
    config.write_text(text, encoding="utf-8")
    with served(repo) as running:
        yield running

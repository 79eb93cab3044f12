"""SmolLM2-135M-Instruct in Q4_1 with adapters trained by PEFT, through every door with defaults.

The answers are those of transformers and PEFT on the dequantised weights."""

from __future__ import annotations

import io
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import anthropic
import gguf
import numpy as np
import pytest
import torch
from commands import MANYLORA, get, post, served
from source_standins import serve_standin
from test_adapter_formats import llama_cpp

from manylora import LLM, LoRARequest, QuantConfig, SamplingParams
from manylora.cli import main
from manylora.doors.triton.launcher.processes import free_port
from manylora.kernels import native

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis in one sentence.",
    "How do I boil an egg?",
    "What is 12 times 7?",
    "Name three primary colors.",
    "Who wrote Hamlet?",
    "Tell me a joke.",
    "Where do penguins live?",
    "Give me a Python function that adds two numbers.",
)
GREEDY = SamplingParams(max_tokens=12, temperature=0)
ASKED = QUESTIONS[0]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turns(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def fast_gguf() -> Iterator[None]:
    """transformers parses the file three times: half the time without these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map))
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        yield


@pytest.fixture(scope="module")
def reference(smollm2: Path, fast_gguf: None) -> Any:
    """transformers' model and tokenizer of the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    given = {"gguf_file": smollm2.name}
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, **plain, **given)
    return model.eval(), AutoTokenizer.from_pretrained(smollm2.parent, **given)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, enable_lora=True) as one:
        yield one


def expected(reference: Any, model: Any, question: str) -> str:
    ids = reference[1].apply_chat_template(turns(question), add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        made = model.generate(torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
    return reference[1].decode(made[0][len(ids) :], skip_special_tokens=True)


def said(llm: LLM, questions: tuple[str, ...], adapter: LoRARequest | None = None) -> list[str]:
    found = llm.chat([turns(one) for one in questions], GREEDY, lora_request=adapter)
    return [one.outputs[0].text for one in found]


def test_ten_chats_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    assert said(llm, QUESTIONS) == [expected(reference, reference[0], one) for one in QUESTIONS]


def test_each_adapter_is_that_of_peft(llm: LLM, reference: Any, adapters: Path) -> None:
    from peft import PeftModel

    names = sorted(one.name for one in adapters.iterdir())
    assert len(names) >= 3
    for number, name in enumerate(names, 1):
        model = PeftModel.from_pretrained(reference[0], adapters / name)
        wanted = [expected(reference, model, one) for one in QUESTIONS[:2]]
        model.unload()
        found = said(llm, QUESTIONS[:2], LoRARequest(name, number, str(adapters / name)))
        assert found == wanted, name
        assert found != said(llm, QUESTIONS[:2]), f"{name} changes nothing"


def test_activations_in_8_bits(llm: LLM, smollm2: Path, adapters: Path, tmp_path: Path) -> None:
    """The file's own weights, so that an answer begins nearly as the exact one does, with an adapter too."""
    first = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
    asked = [turns(one) for one in QUESTIONS]
    with LLM(smollm2, enable_lora=True, quant_config=QuantConfig("W4A8")) as rounded:
        for adapter in (None, LoRARequest("json", 1, str(adapters / "json"))):
            pairs = [one.chat(asked, first, lora_request=adapter) for one in (llm, rounded)]
            exact, found = (
                [next(iter(one.outputs[0].logprobs[0].items())) for one in some] for some in pairs
            )
            # 8 or 9 without the adapter, by the instruction set: rounding decides where two are near.
            assert sum(a[0] == b[0] for a, b in zip(exact, found, strict=True)) >= 6
            off = [abs(a[1].logprob - b[1].logprob) for a, b in zip(exact, found, strict=True)]
            assert 0 < sum(off) / len(off) < 0.2
    furthest = off.index(max(off))  # the question whose answer shows best that a server rounds, too
    with served(tmp_path / "log", smollm2, "--lora-root", adapters, "-q", "W4A8") as url:
        body = {"model": "json", "messages": asked[furthest], "max_tokens": 1, "temperature": 0}
        [choice] = post(f"{url}/v1/chat/completions", body | {"logprobs": True})["choices"]
    shown = choice["logprobs"]["content"][0]["logprob"]
    assert off[furthest] > 1e-3
    assert shown == pytest.approx(found[furthest][1].logprob, abs=1e-4)


def test_chat_and_inspect(
    smollm2: Path,
    adapters: Path,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ASKED}\n/reset\n/lora none\n{ASKED}\n"))
    given = ["--lora-root", str(adapters), "--lora", "pirate", "--temperature=0", "--max-tokens=12"]
    assert main(["chat", str(smollm2), *given]) == 0
    pirate = LoRARequest("pirate", 9, str(adapters / "pirate"))
    assert capsys.readouterr().out.splitlines() == [*said(llm, (ASKED,), pirate), *said(llm, (ASKED,))]
    assert main(["inspect", str(smollm2)]) == 0
    facts = capsys.readouterr().out
    assert "30 layers of width 576, 9 heads over 3" in facts and "8,192 tokens" in facts
    assert "kv       46,080 bytes for each token" in facts or "kv       23,040 bytes" in facts
    assert "93.8 MiB in files, about 111 MiB in memory" in facts or native.load() is None
    assert "for the KV cache" in facts and "for adapters" in facts


def test_a_start_that_cannot_work_names_the_flags_of_serve(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--gpu-memory-utilization=0.0001", "--port=0"]
    assert main(["serve", str(smollm2), *given]) == 1
    assert "raise --gpu-memory-utilization" in capfd.readouterr().err


def test_serve_starts_by_default(smollm2: Path, adapters: Path, llm: LLM, tmp_path: Path) -> None:
    with served(tmp_path / "log", smollm2, "--lora-root", adapters) as url:
        names = [one["id"] for one in get(f"{url}/v1/models")["data"]]
        assert names[0] == "SmolLM2-135M-Instruct.Q4_1"
        assert set(names[1:]) == {one.name for one in adapters.iterdir()}

        def ask(model: str) -> str:
            body = {"model": model, "messages": turns(ASKED), "temperature": 0, "max_tokens": 12}
            return post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(len(names)) as pool:  # all in one batch
            texts = dict(zip(names, pool.map(ask, names), strict=True))
        assert texts[names[0]] == said(llm, (ASKED,))[0]
        assert len(set(texts.values())) == len(texts)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            shown = answer.read().decode()
        for name in names[1:]:
            assert f'vllm:lora_adapter_loaded{{adapter_name="{name}",level="gpu",pinned="false"' in shown
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            for model in names:
                message = client.messages.create(
                    model=model, messages=turns(ASKED), max_tokens=12, extra_body={"temperature": 0}
                )
                assert message.content[0].text == texts[model]
        called = post(
            f"{url}/v1/chat/completions",
            {
                "model": names[0],
                "messages": turns("What is the weather in Paris?"),
                "tools": [WEATHER],
                "tool_choice": "required",
                "temperature": 0,
                "max_tokens": 64,
            },
        )
        [call] = called["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert "city" in json.loads(call["function"]["arguments"])


def test_doors_of_others_and_what_operators_ask_for(
    smollm2: Path, adapters: Path, llm: LLM, tmp_path: Path
) -> None:
    """The same adapter as PEFT's folder, llama.cpp's file, a URL and an alias, through TGI's API; asleep and
    awake; and after a restart, from KV blocks on disk."""
    llama_cpp(adapters / "pirate", tmp_path / "sailor.gguf", {"self_attn.q_proj": 9}, "llama")
    system = "You speak of ships, harbours and the wind, and of nothing else. " * 8
    raw = system + ASKED
    pirate = LoRARequest("pirate", 9, str(adapters / "pirate"))
    wanted = [one.outputs[0].text for one in llm.generate([raw] * 2, GREEDY, lora_request=[None, pirate])]
    journal = tmp_path / "usage.jsonl"

    def flags(url: str) -> list[object]:
        named = [tmp_path / "sailor.gguf", f"remote={url}/pirate"]
        return [
            *(
                smollm2,
                "--lora-root",
                adapters,
                "--lora-modules",
                *named,
                "--download-dir",
                tmp_path / "kept",
            ),
            *("--lora-alias", "crew=pirate@3,polite@0", "--enable-sleep-mode", "--usage-log", journal),
            *("--kv-disk-cache-dir", tmp_path / "kv"),
        ]

    def ask(url: str, model: str | None) -> str:
        body = {"inputs": raw, "parameters": {"max_new_tokens": 12, "do_sample": False, "adapter_id": model}}
        return post(f"{url}/generate", body)["generated_text"]

    with serve_standin() as web:
        web.put("/pirate", adapters / "pirate")
        with served(tmp_path / "log", *flags(web.url)) as url:
            assert [ask(url, None), ask(url, "pirate")] == wanted
            assert {ask(url, name) for name in ("sailor", "remote", "crew")} == {wanted[1]}
            for level in (1, 2):
                urllib.request.urlopen(f"{url}/sleep?level={level}", b"", timeout=60).close()
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    ask(url, "pirate")
                urllib.request.urlopen(f"{url}/wake_up", b"", timeout=60).close()
                assert ask(url, "pirate") == wanted[1]
        with served(tmp_path / "again", *flags(web.url)) as url:
            assert [ask(url, None), ask(url, "pirate")] == wanted
    lines = [json.loads(one) for one in journal.read_text().splitlines()]
    done = [one for one in lines if one["status"] == 200]
    assert [one["adapter"] for one in done[-2:]] == [None, "pirate"]
    assert all(one["cached_tokens"] >= 64 for one in done[-2:])
    assert len({one["digest"] for one in done if one["adapter"] in ("pirate", "sailor", "remote")}) == 1


def test_verify_finds_the_same_log_probabilities(
    smollm2: Path, adapters: Path, tmp_path: Path, fast_gguf: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(f"{ASKED}\n", encoding="utf-8")
    given = ["--lora-root", str(adapters), "--lora", "json", "--prompts", str(tmp_path / "prompts")]
    assert main(["verify", str(smollm2), *given, "--json"]) == 0
    assert '"json"' in capsys.readouterr().out


def test_run_batch_answers_as_the_model_does(smollm2: Path, adapters: Path, llm: LLM, tmp_path: Path) -> None:
    """As a user types it, with the model's defaults. The base model and each adapter have a line."""
    names = ["SmolLM2-135M-Instruct.Q4_1", *sorted(one.name for one in adapters.iterdir())]
    body = {"messages": turns(ASKED), "temperature": 0, "max_tokens": 12}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": name, **body}}
        for name in names
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    command = [*MANYLORA, "run-batch", "in.jsonl", smollm2, "-o", "out.jsonl", "--lora-root", adapters]
    subprocess.run(command, cwd=tmp_path, check=True)
    found = [json.loads(one) for one in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in found] == names
    texts = [one["response"]["body"]["choices"][0]["message"]["content"] for one in found]
    assert texts[0] == said(llm, (ASKED,))[0]
    assert len(set(texts)) == len(texts)


def test_triton_starts_by_default(smollm2: Path, adapters: Path, llm: LLM, reference: Any) -> None:
    http, grpc, metrics = (free_port() for _ in range(3))
    ports = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}"]
    command = [*MANYLORA, "triton", smollm2, "--lora-root", adapters, *ports]
    started = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert started.returncode == 0, started.stderr
    try:
        prompt = reference[1].apply_chat_template(turns(ASKED), add_generation_prompt=True, tokenize=False)

        def ask(name: str) -> str:
            body = {"text_input": prompt, "max_tokens": 12} | ({"lora_name": name} if name else {})
            return post(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", body)["text_output"]

        names = sorted(one.name for one in adapters.iterdir())
        with ThreadPoolExecutor(len(names) + 1) as pool:
            base, *texts = pool.map(ask, ["", *names])
        assert base.endswith(said(llm, (ASKED,))[0])  # Triton's answers begin with the prompt
        for number, (name, text) in enumerate(zip(names, texts, strict=True), 1):
            adapter = LoRARequest(name, number, str(adapters / name))
            assert text.endswith(said(llm, (ASKED,), adapter)[0]), name
    finally:
        stop = [*MANYLORA, "triton", "--stop", ports[0]]
        assert subprocess.run(stop, capture_output=True, check=False).returncode == 0

"""Protects what acts in an answer over HTTP: a chat template's text leads to an activated LoRA's invocation,
and a fingerprint names all that acts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import DEMO, Running
from tiny_models import load_transformers, make_adapter
from tokenizers import Tokenizer

NEW = 6
BASE = DEMO / "base"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))
QUESTION: Any = [{"role": "user", "content": "Where is the capital of Japan? " * 8}]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose invocation is what the demo's template puts before an answer."""
    invoke = {"alora_invocation_tokens": ids("<|assistant|>"), "task_type": "CAUSAL_LM"}
    made = tmp_path_factory.mktemp("loras")
    make_adapter(made / "judge", BASE, 3, 8, ("q_proj", "v_proj", "down_proj"), **invoke)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with Running(lora_root=(DEMO / "adapters", folder)) as running:
        yield running


def peft(adapter: Path, prompt: list[int]) -> list[int]:
    from peft import PeftModel

    module = PeftModel.from_pretrained(load_transformers(BASE), str(adapter)).eval()
    given, new = torch.tensor([prompt]), {"max_new_tokens": NEW, "min_new_tokens": NEW}
    with torch.inference_mode():
        made = module.generate(
            input_ids=given, attention_mask=torch.ones_like(given), **new,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def test_the_template_leads_to_the_invocation(server: Running, folder: Path) -> None:
    prompt = ids(f"<s><|user|>{QUESTION[0]['content']}<|assistant|>")
    wanted = {"temperature": 0, "max_tokens": NEW}
    more = {"ignore_eos": True, "return_token_ids": True}
    client = server.client()
    before = client.chat.completions.create(model="demo", messages=QUESTION, **wanted)  # type: ignore[call-overload]
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="judge", messages=QUESTION, extra_body=more, **wanted
    )
    assert answer.prompt_token_ids == prompt
    assert answer.choices[0].token_ids == peft(folder / "judge", prompt)
    assert answer.system_fingerprint.startswith(f"{before.system_fingerprint}-")


def test_a_fingerprint_names_all_that_acts(server: Running) -> None:
    def fingerprint(*members: tuple[str, float]) -> str:
        lora = [{"name": name, "scale": scale} for name, scale in members]
        return server.post(prompt="a", max_tokens=1, lora=lora).json()["system_fingerprint"]

    one, two = ("chinese", 1.0), ("japanese", 1.0)
    found = [fingerprint(*members) for members in ((), (one,), (two,), (one, two), (one, ("japanese", 0.5)))]
    found.append(fingerprint(("chinese", 0.5)))
    assert len(set(found)) == len(found)
    assert fingerprint(two, one) == fingerprint(("chinese", 0.5), two, ("chinese", 0.5)) == found[3]
    assert fingerprint(one, ("japanese", 0.0)) == found[1]

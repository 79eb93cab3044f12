"""all-MiniLM-L6-v2 as published, and as a GGUF file: embeddings are those of sentence-transformers, which
pools the mean.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import post, served
from gguf_converter import convert

TEXTS = ["The cat sits on the mat.", "A feline rests on a rug.", "Interest rates rose by a quarter point."]


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_embeddings_of_a_default_start(
    form: str, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    source = minilm
    if form == "gguf":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        source = tmp_path / "all-MiniLM-L6-v2.gguf"
        convert(source, minilm)
    with served(tmp_path / "log", source) as url:
        rows = post(f"{url}/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": TEXTS})["data"]
    found = np.array([one["embedding"] for one in rows])
    assert np.allclose(found, wanted, atol=1e-5)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.5 > 0.2 > far

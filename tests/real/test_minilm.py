"""all-MiniLM-L6-v2 as published: embeddings are those of sentence-transformers, which pools the mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from commands import post, served

TEXTS = ["The cat sits on the mat.", "A feline rests on a rug.", "Interest rates rose by a quarter point."]


def test_embeddings_of_a_default_start(minilm: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    with served(tmp_path / "log", minilm) as url:
        rows = post(f"{url}/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": TEXTS})["data"]
    found = np.array([one["embedding"] for one in rows])
    assert np.allclose(found, wanted, atol=1e-5)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.5 > 0.2 > far

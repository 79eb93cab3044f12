#!/usr/bin/env python3
"""Compares 8-bit and 4-bit weights with plain ones on one model: bytes, speed, and distance from float32.

Expected speed. A decode step of few rows is memory-bound, so its speed-up is at most the ratio of the bytes.
It is less if a kernel cannot keep up with memory or dequantises weights first. Many rows, as in a prompt, are
bound by FLOPs, which quantisation does not reduce unless the product uses integers (W8A8, W4A8).

Accuracy. The logits of some prompts are compared with those of float32: the mean Kullback-Leibler divergence,
and the share of positions with the same most likely token.

    quantisation.py --model examples/demo/base
    quantisation.py --hidden 2048 --layers 4 --requests 4

Without --model, a Llama with random weights is used. Its accuracy is not representative, because random
weights have no outliers. Each case runs --rounds times, in turn, and times are medians. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from manylora import LLM, QuantConfig, SamplingParams
from manylora.testing.tiny_models import make_model

ALGOS = ("NO_QUANT", "W8A16", "W8A8", "W4A16", "W4A8", "FP8")
CASES = [(dtype, algo) for dtype in ("float32", "bfloat16") for algo in ALGOS]
TEXTS = (
    "Where is the capital of Japan? \\nAnswer: Tokyo",
    "Tell me about Kenya. \\nAnswer: Kenya is a country in Africa. The capital of Kenya is Nairobi.",
    "アメリカ合衆国の首都はどこですか? \\n答え: Washington, D.C.",
)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _random(Path(folder) / "model", options)
        times: dict[str, list[float]] = {_name(*case): [] for case in CASES}
        rows: dict[str, dict[str, float]] = {}
        truth: list[np.ndarray] = []
        for _ in range(options.rounds):
            for dtype, algo in CASES:
                name = _name(dtype, algo)
                with LLM(model, device="cpu", dtype=dtype, quant_config=QuantConfig(algo)) as llm:
                    times[name].append(_tokens_per_second(llm, options))
                    if name not in rows:
                        logits = _logits(llm)
                        truth = truth or logits
                        rows[name] = {"weight_mb": llm.stats().weight_bytes / 1e6, **_distance(truth, logits)}
        for name, row in rows.items():
            row["output_tok_s"] = statistics.median(times[name])
            print(f"{name:<20}" + "".join(f"{key} {value:<12.4g}" for key, value in row.items()))
        print(
            json.dumps({"model": str(options.model or "random"), "requests": options.requests, "cases": rows})
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _random(path: Path, options: argparse.Namespace) -> Path:
    sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden}
    heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 128}
    layers = {"num_hidden_layers": options.layers, "initializer_range": 0.02}
    return make_model(path, "llama", max_position_embeddings=512, **sizes, **heads, **layers)


def _name(dtype: str, algo: str) -> str:
    return dtype if algo == "NO_QUANT" else f"{dtype} {algo}"


def _tokens_per_second(llm: LLM, options: argparse.Namespace) -> float:
    prompts = [[5 + i, 6, 7, 8] for i in range(options.requests)]
    params = SamplingParams(max_tokens=options.tokens, end_id=-1)
    llm.generate(prompts, SamplingParams(max_tokens=2, end_id=-1), use_tqdm=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return options.requests * options.tokens / (time.perf_counter() - started)


def _logits(llm: LLM) -> list[np.ndarray]:
    params = SamplingParams(max_tokens=1, return_context_logits=True)
    return [output.context_logits for output in llm.generate(list(TEXTS), params, use_tqdm=False)]


def _distance(truth: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    p, q = (_log_softmax(np.concatenate(parts)) for parts in (truth, found))
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    return {"kl": divergence, "same_first": float((p.argmax(-1) == q.argmax(-1)).mean())}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


if __name__ == "__main__":
    main()

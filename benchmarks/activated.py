"""Time to first token of an activated LoRA and of a plain LoRA, after a prompt that the base model has
already processed.

    PYTHONPATH=src python benchmarks/activated.py [--prompt 2000] [--pairs 5]

The keys and values of a plain LoRA differ from those of the base model, so it must compute the whole prompt
again. An activated LoRA reuses the base model's KV cache and computes only its invocation sequence and what
follows. The same tensors are served as both kinds, with an invocation of 4 tokens and a question of 12 tokens
after a prompt that no adapter has seen. The two kinds alternate, and the one that goes first changes from
pair to pair. Then 10 adapters receive the same prompt at once: first a prompt that the base model has
processed, then a new one. The KV blocks that they hold are counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from loads import ALL, make_llama, prompts
from machine import see_machine

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.lora.formats.sources import find_source, read_lora
from manylora.request import LoraInput, Request, SamplingConfig
from manylora.testing.tiny_models import make_adapter

INVOKE = (301, 302, 303, 304)
QUESTION = (17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28)
PLAIN, ADAPTERS, OUTPUT = 100, 10, 4


def open_engine(folder: Path, prompt: int) -> tuple[Engine, dict[int, LoraInput]]:
    """Task ids from 1 on are activated adapters. PLAIN has the tensors of task 1, without an invocation."""
    model = make_llama(folder / "model", 512, 8)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": prompt + 64}))
    inputs = {}
    for number in range(1, ADAPTERS + 1):
        options = {"alora_invocation_tokens": list(INVOKE), "task_type": "CAUSAL_LM"}
        made = make_adapter(folder / str(number), model, number, 16, ALL, **options)
        inputs[number] = read_lora(find_source(made), number)
    inputs[PLAIN] = LoraInput(PLAIN, inputs[1].weights, inputs[1].config)
    lora = LoraCacheConfig(host_memory_bytes=2**28, gpu_memory_bytes=2**28)
    sizes = {"max_seq_len": prompt + 64, "max_tokens_in_paged_kv_cache": 8 * (prompt + 64)}
    return Engine(EngineConfig(model, device="cpu", lora=lora, **sizes)), inputs


def first_token_ms(engine: Engine, prompt: list[int], lora: LoraInput | None) -> tuple[float, float]:
    """Run a single request to its end. Returns the wall and CPU milliseconds until its first token."""
    start, used, first = time.perf_counter(), time.process_time(), (0.0, 0.0)
    made = engine.prepare(Request(tuple(prompt), SamplingConfig(max_tokens=OUTPUT), lora, streaming=True))
    engine.submit(made)
    while engine.has_work:
        if engine.step() and not any(first):
            first = 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - used)
    return first


def blocks_of_all(engine: Engine, prompt: list[int], inputs: dict[int, LoraInput]) -> tuple[int, int]:
    """The most KV blocks held while all adapters decode after the same prompt, and the tokens reused."""
    before = engine.stats()
    for number in range(1, ADAPTERS + 1):
        asked = Request((*prompt, *INVOKE, *QUESTION), SamplingConfig(max_tokens=OUTPUT), inputs[number])
        engine.submit(engine.prepare(asked))
    held = 0
    while engine.has_work:
        engine.step()
        held = max(held, engine.stats().kv_blocks - engine.stats().kv_blocks_free)
    return held, engine.stats().kv_tokens_reused - before.kv_tokens_reused


def arrival(engine: Engine, prompt: list[int], inputs: dict[int, LoraInput]) -> dict[str, object]:
    """Memory and time when all adapters ask at once, after a prompt that is not in the KV cache."""
    start, used = time.perf_counter(), time.process_time()
    held, reused = blocks_of_all(engine, prompt, inputs)
    seconds = time.perf_counter() - start, time.process_time() - used
    total = ADAPTERS * (len(prompt) + len(INVOKE) + len(QUESTION))
    names = "blocks_held", "tokens_reused", "prompt_tokens_computed", "wall_s", "processor_s"
    return dict(zip(names, (held, reused, total - reused, *(round(one, 2) for one in seconds)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the shared prompt")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"base": [], "activated": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        engine, inputs = open_engine(Path(folder), options.prompt)
        texts = [[token % 8000 for token in one] for one in prompts(options.pairs + 3, options.prompt)]
        for number in inputs:  # load every adapter into the cache
            first_token_ms(engine, [1, 2, *INVOKE], inputs[number])
        for pair, text in enumerate(texts[:-2]):
            base = first_token_ms(engine, text, None)
            order = (("activated", 1), ("plain", PLAIN))[:: 1 if pair % 2 else -1]
            asked = [*text, *INVOKE, *QUESTION]
            taken = {kind: first_token_ms(engine, asked, inputs[number]) for kind, number in order}
            for kind, value in {"base": base, **taken}.items():
                found[kind] += [value] * (pair > 0)  # the first pair only warms up
        first_token_ms(engine, texts[-2], None)
        held, reused = blocks_of_all(engine, texts[-2], inputs)
        at_once = arrival(engine, texts[-1], inputs)
        size = engine.stats().tokens_per_block
        engine.close()
    result: dict[str, object] = {"prompt": options.prompt}
    for place, clock in enumerate(("wall", "processor")):
        times = {kind: [one[place] for one in values] for kind, values in found.items()}
        ratios = [a / p for a, p in zip(times["activated"], times["plain"], strict=True)]
        result[clock] = {
            **{f"{kind}_ms": round(statistics.median(values), 1) for kind, values in times.items()},
            "ratio": round(statistics.median(ratios), 4),
            "ratio_of_minima": round(min(times["activated"]) / min(times["plain"]), 4),
        }
    result |= {
        "blocks_of_the_prompt": options.prompt // size,
        "blocks_held_by_10_adapters": held,
        "tokens_reused_by_10_adapters": reused,
        "10_adapters_behind_a_prompt_that_is_new": at_once,
    }
    print(see_machine())
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

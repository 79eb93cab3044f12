#!/usr/bin/env python3
"""Measures how long a model takes to load, and how much memory that needs.

Time: loading a model that `manylora build` wrote, compared with copying its bytes once from the page cache.
Each load runs in a separate process. The time is that of `load_decoder`, without imports, in the dtype that
keeps bfloat16 weights as they are stored. The copy goes into fresh memory, like a load.

Memory: the peak while `LLM` loads a checkpoint. It is VmHWM (anonymous and mapped pages) minus the memory
after the imports and minus the KV cache, in multiples of N, the bytes of the checkpoint's files.

The model has random bfloat16 weights and the proportions of Llama-2-7B in fewer and smaller layers (16 layers
of 2048, 5504; 32 000 tokens: 1.9 GB), because 13 GB do not fit on every machine.

    model_load.py --rounds 5
    model_load.py --layers 32 --hidden 4096      # the whole 13 GB

Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from manylora.adapters.formats.tensor_files import RawTensor, write_safetensors
from manylora.doors.python import LLM, KvCacheConfig
from manylora.kernels.device import open_device
from manylora.model.builder import BuildPlan, build
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder

CHUNK = 2**24


def write_model(folder: Path, layers: int, hidden: int) -> None:
    """Write a checkpoint without transformers, which would need the whole model in memory."""
    inner = hidden * 43 // 16
    shapes = {"model.embed_tokens.weight": (32000, hidden), "lm_head.weight": (32000, hidden)}
    shapes["model.norm.weight"] = (hidden,)  # type: ignore[assignment]
    linears = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        root = f"model.layers.{layer}."
        shapes |= {f"{root}{name}.weight": shape for name, shape in linears.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{root}{name}.weight": (hidden,) for name in norms}  # type: ignore[misc]
    rng = np.random.default_rng(0)
    # All tensors use the same random values, because only their sizes matter here.
    widest = max(int(np.prod(shape)) for shape in shapes.values())
    bits = (rng.standard_normal(widest, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    data = bits.astype(np.uint16)
    tensors = {
        name: RawTensor("BF16", shape, data[: int(np.prod(shape))].view(np.uint8))
        for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "bfloat16", "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def copy_once(folder: Path) -> float:
    """Copy all files into memory. Returns seconds."""
    start = time.perf_counter()
    kept = []
    for file in files_of(folder):
        target = np.empty(file.stat().st_size, np.uint8)
        with file.open("rb", buffering=0) as stream:
            for at in range(0, len(target), CHUNK):
                stream.readinto(target[at : at + CHUNK].data)
        kept.append(target)
    return time.perf_counter() - start


def load(folder: Path) -> dict[str, float]:
    device = open_device("cpu")
    device.ops.pack(torch.zeros(64, 64))  # exclude the initialisation at the first use
    before = status("VmRSS")
    start = time.perf_counter()
    config = read_model_config(folder)
    keeps = device.ops.keeps(torch.bfloat16, torch.float32)
    decoder = load_decoder(folder, config, torch.float32 if keeps else torch.bfloat16, device, 128)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "beyond": status("VmHWM") - before, "weights": decoder.weight_bytes}


def llm(folder: Path) -> dict[str, float]:
    before = status("VmRSS")
    kv = KvCacheConfig(max_tokens=1024)
    with LLM(folder, device="cpu", skip_tokenizer_init=True, max_seq_len=128, kv_cache_config=kv) as made:
        made.generate([[1, 2, 3]], None, use_tqdm=False)
        return {"beyond": status("VmHWM") - before - made.stats().kv_bytes}


def apart(what: str, folder: Path) -> dict[str, float]:
    """Run one measurement in a separate process."""
    command = [sys.executable, __file__, "--only", what, "--model", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--only", choices=("copy", "load", "llm"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run = {"copy": lambda folder: {"seconds": copy_once(folder)}, "load": load, "llm": llm}
        print(json.dumps(run[options.only](options.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model, built = Path(folder) / "model", Path(folder) / "built"
        write_model(model, options.layers, options.hidden)
        build(BuildPlan(model, built))
        nbytes = sum(file.stat().st_size for file in files_of(built))
        rounds = []
        for _ in range(options.rounds):  # alternate, so that other work on the machine affects both equally
            rounds.append((apart("copy", built)["seconds"], apart("load", built)))
        of_llm = [apart("llm", model)["beyond"] for _ in range(options.rounds)]
    copied = statistics.median(seconds for seconds, _ in rounds)
    loaded = statistics.median(found["seconds"] for _, found in rounds)
    peak = statistics.median(found["beyond"] for _, found in rounds)
    print(f"checkpoint of {nbytes / 1e9:.2f} GB, {options.layers} layers of {options.hidden}")
    print(f"copied once    {copied:6.2f} s")
    print(f"loaded         {loaded:6.2f} s  {loaded / copied:5.2f}x, peak {peak / nbytes:.2f} N")
    print(f"LLM without its caches: peak {statistics.median(of_llm) / nbytes:.2f} N")
    figures = {
        "gbytes": nbytes / 1e9, "copied_s": copied, "loaded_s": loaded, "ratio": loaded / copied,
        "load_peak": peak / nbytes, "llm_peak": statistics.median(of_llm) / nbytes,
        "rounds": options.rounds,
    }  # fmt: skip
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()

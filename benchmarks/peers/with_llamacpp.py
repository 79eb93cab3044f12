"""llama.cpp's server through xllamacpp. It has one slot per concurrent request, and each request names its
adapter.

The GGUF files are written here with llama.cpp's own `gguf` package. int8 is Q8_0 and int4 is Q4_0, also for
the embedding and the head. Adapters stay in bfloat16, or in float32 if the model is in float32.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Kind
from worker import Setup, serve

KINDS = {"gguf": Kind.BF16, "bfloat16": Kind.BF16, "float32": Kind.F32, "int8": Kind.Q8_0, "int4": Kind.Q4_0}
ALPHA = 2.0  # lora_alpha / rank of the benchmark's adapters
BYTES = 256  # the tokenizer needs a token for each byte, although prompts are token ids


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        model, kept, kind = Path(setup.model), Path(setup.kept), KINDS[setup.dtype]
        plain = Kind.F32 if setup.dtype == "float32" else Kind.BF16
        self._adapters = len(setup.adapters)
        params = xllamacpp.CommonParams()
        if model.suffix == ".gguf":
            params.model.path, model = str(model), kept / "model"
        else:
            params.model.path = str(_model(model, kept / f"llamacpp-{kind.name}.gguf", kind))
        params.n_parallel, params.n_ctx = setup.at_once, setup.length * setup.at_once
        params.n_batch, params.cache_ram_mib, params.ui = 2048, 0, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
        if setup.adapters:
            params.lora_adapters = [_lora(_adapter(Path(one), model, plain)) for one in setup.adapters]
            params.lora_init_without_apply = True
        self._server = xllamacpp.Server(params)
        self._address = f"{self._server.listening_address}/completion"
        self._pool = ThreadPoolExecutor(setup.at_once)
        self.details = {"llama.cpp's processor features": xllamacpp.get_system_info()}

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        return list(self._pool.map(lambda one: self._one(*one, tokens), zip(prompts, adapters, strict=True)))

    def _one(self, prompt: list[int], adapter: int | None, tokens: int) -> list[int]:
        body: dict[str, Any] = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
            "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        if self._adapters:  # without this field the server applies every adapter
            body["lora"] = [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}]
        # Over HTTP, because the calls of the binding return text.
        request = urllib.request.Request(self._address, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)["tokens"]


def _lora(path: Path) -> xllamacpp.CommonAdapterLoraInfo:
    one = xllamacpp.CommonAdapterLoraInfo()
    one.path, one.scale = str(path), 1.0
    return one


def _model(model: Path, made: Path, kind: Kind) -> Path:
    if made.exists():
        return made
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer, name = _writer(made, config)
    for name_of, values in _weights(model / "model.safetensors"):
        stored = kind if values.ndim > 1 else Kind.F32
        turned = _turn(name_of, values, config)
        writer.add_tensor(name(name_of), gguf.quantize(turned, stored), raw_dtype=stored)
    return _written(writer, made)


def _adapter(adapter: Path, model: Path, kind: Kind) -> Path:
    made = adapter.with_name(f"{adapter.name}-{kind.name}.gguf")
    if made.exists():
        return made
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer, name = _writer(made, config, adapter=True)
    for name_of, values in _weights(adapter / "adapter_model.safetensors"):
        stem, part, _ = name_of.removeprefix("base_model.model.").rsplit(".", 2)
        if part == "lora_B":
            values = _turn(stem, values, config)
        writer.add_tensor(
            f"{name(stem + '.weight')}.{part.lower()}", gguf.quantize(values, kind), raw_dtype=kind
        )
    rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA * rank)
    return _written(writer, made)


def _writer(path: Path, config: dict[str, Any], adapter: bool = False) -> tuple[gguf.GGUFWriter, Any]:
    """A writer for a GGUF file, and a function that maps a checkpoint's tensor names to GGUF names."""
    arch = config["model_type"]
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path.with_suffix(".part"), arch)
    if adapter:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    else:
        _write_sizes(writer, config)
    return writer, lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    names = _byte_names() + ["ab"] + [f"<fill{i}>" for i in range(config["vocab_size"] - BYTES - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


def _byte_names() -> list[str]:
    """The printable characters that GPT-2 uses for the 256 bytes, in any order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, plain), *(chr(256 + i) for i in range(BYTES - len(plain)))]


def _weights(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file as float32. Converts bfloat16, which numpy does not have."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            wide = np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16
            values = wide.view(np.float32)
        else:
            values = np.frombuffer(data[first:last], np.float32)
        yield name, values.reshape(entry["shape"])


def _turn(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Reorder the rows of q and k for llama.cpp's rotary embedding of a Llama, which pairs adjacent rows."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name and config["model_type"] == "llama":
            halves = weight.reshape(config[key], 2, -1, *weight.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _written(writer: gguf.GGUFWriter, made: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made.with_suffix(".part").rename(made)


if __name__ == "__main__":
    serve(LlamaCpp, lambda: {"xllamacpp": xllamacpp.__version__})

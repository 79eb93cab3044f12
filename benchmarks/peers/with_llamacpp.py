"""llama.cpp, by its llama-server: as many slots as requests at a time, adapters named in each request.

LLAMA_CPP names its source folder, with build/bin/llama-server and llama-quantize made; sentencepiece, which
its converters need, must be importable here. LLAMA_CPP_TYPE: q8_0 or q4_0, in which the embedding and the
head are then too; else the setup's dtype. Adapters stay in the setup's dtype.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from worker import Setup, serve

SOURCE = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
TYPES = {"bfloat16": "bf16", "float32": "f32"}


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        kept, plain = Path(setup.kept), TYPES[setup.dtype]
        self._adapters = len(setup.adapters)
        wanted = os.environ.get("LLAMA_CPP_TYPE", plain)
        model = _model(Path(setup.model), kept, plain, wanted)
        adapters = [_adapter(Path(one), Path(setup.model), plain) for one in setup.adapters]
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]
        threads, count = str(setup.threads), setup.at_once
        lora = ["--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"] if adapters else []
        self._server = subprocess.Popen([
            SOURCE / "build/bin/llama-server", "-m", model, "--host", "127.0.0.1", "--port", str(self._port),
            "-np", str(count), "-c", str(setup.length * count), "-t", threads, "-tb", threads, "-b", "2048",
            "--cache-ram", "0", "--no-webui", "--threads-http", str(count + 2), *lora,
        ])  # fmt: skip
        self._pool = ThreadPoolExecutor(count)
        while self._answer("GET", "/health")[0] != 200:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode}")
            time.sleep(0.1)

    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        return list(self._pool.map(lambda one: self._one(*one, tokens), zip(prompts, adapters, strict=True)))

    def _one(self, prompt: list[int], adapter: int | None, tokens: int) -> list[int]:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
            "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        if self._adapters:  # without it the server applies every adapter
            body["lora"] = [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}]
        status, text = self._answer("POST", "/completion", json.dumps(body))
        if status != 200:
            raise RuntimeError(f"llama-server: {status} {text[:300]}")
        return json.loads(text)["tokens"]

    def _answer(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
        try:
            link.request(method, path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except OSError:
            return 0, ""
        finally:
            link.close()


def _model(model: Path, kept: Path, plain: str, wanted: str) -> Path:
    made = kept / f"llamacpp-{wanted}.gguf"
    if made.exists():
        return made
    if wanted not in TYPES.values():
        base, part = _model(model, kept, plain, plain), made.with_suffix(".part")
        tool = SOURCE / "build/bin/llama-quantize"
        subprocess.run([tool, "--pure", base, part, wanted], stdout=sys.stderr, check=True)
        part.rename(made)
        return made
    named = kept / "llamacpp"
    shutil.copytree(model, named, dirs_exist_ok=True)
    _name_tokens(named)
    _convert("convert_hf_to_gguf.py", [str(named), "--outtype", wanted], made)
    return made


def _adapter(adapter: Path, model: Path, plain: str) -> Path:
    made = adapter.with_name(f"{adapter.name}-{plain}.gguf")
    if not made.exists():
        _convert("convert_lora_to_gguf.py", [str(adapter), "--base", str(model), "--outtype", plain], made)
    return made


def _name_tokens(model: Path) -> None:
    """A tokenizer that has a name for every id, as the converter needs one; prompts are ids."""
    count = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    names = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    names += [f"<fill{i}>" for i in range(count - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)


def _convert(script: str, arguments: list[str], made: Path) -> None:
    """By llama.cpp's own script, in a fork; told that our tokens are cut as GPT-2's, which it cannot know."""
    part = made.with_suffix(".part")
    child = os.fork()
    if child == 0:
        sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
        from conversion import base  # type: ignore[import-not-found]

        for name in ("TextModel", "ModelBase"):
            getattr(base, name).get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
        sys.argv = [script, *arguments, "--outfile", str(part)]
        runpy.run_path(str(SOURCE / script), run_name="__main__")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{script} failed")
    part.rename(made)


if __name__ == "__main__":
    serve(LlamaCpp, lambda: {"llama.cpp": os.environ.get("LLAMA_CPP_VERSION", str(SOURCE))})

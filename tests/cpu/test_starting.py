"""Protects the first minutes of a newcomer: each typical mistake with a model, an adapter, a port or a flag
is one line that says what to do; ids of the hub, vLLM's flags and Ctrl-C do what is expected."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from serving import DEMO, Running
from source_standins import COMMIT, serve_hub
from tiny_models import make_model

import manylora
from manylora.cli import main
from manylora.config.model_folder import local_model
from manylora.doors.http.arguments import parse_options
from manylora.errors import ConfigError

ADAPTER = DEMO / "adapters" / "chinese"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that a newcomer may give, most of them wrong."""
    root = tmp_path_factory.mktemp("models")
    good = make_model(root / "good", "llama", seed=3)
    for name, files in {
        "no-tokenizer": ["config.json", "model.safetensors"],
        "no-weights": ["config.json"],
    }.items():
        (root / name).mkdir()
        for file in files:
            shutil.copy(good / file, root / name)
    for name, extra in {
        "pickle": "pytorch_model.bin", "gguf": "llama-q4.gguf", "shards": "model.safetensors.index.json",
    }.items():  # fmt: skip
        (root / name).mkdir()
        shutil.copy(good / "config.json", root / name)
        text = json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        )
        (root / name / extra).write_text(text if name == "shards" else "")
    (root / "shards" / "model-00001-of-00002.safetensors").touch()
    (root / "lfs").mkdir()
    shutil.copy(good / "config.json", root / "lfs")
    (root / "lfs" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (root / "above" / "inside").mkdir(parents=True)
    shutil.copy(good / "config.json", root / "above" / "inside")
    (root / "empty").mkdir()
    (root / "key.pem").write_text("no key")
    return root


MISTAKES: list[tuple[str, str, list[str]]] = [
    ("a typing error", "serve {m}/goood", ["{m}/goood does not exist", "did you mean {m}/good?"]),
    ("a path that ends early", "serve {m}/x/y/z", ["does not exist", "of its path there is only {m}"]),
    ("a file", "serve {m}/good/model.safetensors", ["is a file", "give {m}/good"]),
    ("an empty folder", "serve {m}/empty", ["{m}/empty is empty"]),
    ("an id without its owner", "serve gpt2", ["gpt2 does not exist", "org/name"]),
    ("the folder above", "serve {m}/above", ["has one in it: give {m}/above/inside"]),
    ("no weights", "serve {m}/no-weights", ["no weights (model.safetensors)"]),
    ("half a download", "serve {m}/shards", ["lacks model-00002-of-00002.safetensors (1 of its 2 files"]),
    ("pickles", "serve {m}/pickle",
     ["pytorch_model.bin, a pickle", ".save_pretrained('pickle-safetensors')"]),
    ("GGUF", "serve {m}/gguf", ["llama-q4.gguf is a GGUF file", "give its own path"]),
    ("a clone without LFS", "serve {m}/lfs", ["git -C {m}/lfs lfs pull"]),
    ("no tokenizer", "serve {m}/no-tokenizer", ["no tokenizer.json", "--tokenizer"]),
    ("a model as an adapter", "serve {m}/good --lora-modules a={m}/good", ["a whole model, not an adapter"]),
    ("an adapter that is not there", "serve {m}/good --lora-modules a={a}x", ["did you mean {a}?"]),
    ("a root that is not there", "serve {m}/good --lora-root {m}/none",
     ["--lora-root {m}/none does not exist: give a folder"]),
    ("an adapter without a name", "serve {m}/good --lora-modules {a}",
     ["NAME=PATH, such as sql=/adapters/sql"]),
    ("several replicas", "serve {m}/good --data-parallel-size 2", ["--data-parallel-size must be 1, got 2"]),
    ("another backend", "serve {m}/good --backend tensorrt", ["no counterpart here", "pytorch"]),
    ("a flag of vLLM", "serve {m}/good --quantization awq", ["must be one of W8A16", "its own format"]),
    ("a port in use", "serve {m}/good --port {port}",
     ["Address already in use; choose another port with --port"]),
    ("a host elsewhere", "serve {m}/good --host 192.0.2.1 --port 0",
     ["cannot listen on 192.0.2.1:0", "0.0.0.0"]),
    ("no certificate", "serve {m}/good --port 0 --ssl-certfile {m}/key.pem",
     ["HTTPS cannot be served", "PEM"]),
    ("a length beyond the model's", "serve {m}/good --port 0 --max-model-len 1M",
     ["more than the model's 256 positions"]),
]  # fmt: skip


def test_a_mistake_is_one_line_that_leads_on(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, line, texts in MISTAKES:
        with socket.create_server(("127.0.0.1", 0)) as other:
            names = {"m": str(models), "a": str(ADAPTER), "port": str(other.getsockname()[1])}
            try:
                status = main(line.format(**names).split())
            except SystemExit as end:
                status = end.code
        said = capfd.readouterr().err.splitlines()
        assert status in (1, 2) and len(said) == 1, (name, said)
        assert said[0].startswith("manylora"), name
        for text in texts:
            assert text.format(**names) in said[0], name


def test_a_key_in_vllms_variable_is_not_overlooked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match="VLLM_API_KEY is set but not read here: give --api-key"):
        parse_options(["model"])
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert parse_options(["model", "--api-key", "other"]).api_key == ("other",)
    assert "VLLM_LOGGING_LEVEL is set but not read here: the flag is --log-level" in caplog.text
    assert "secret" not in caplog.text


def test_a_root_without_adapters_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "none").mkdir()
    Running(lora_root=(tmp_path / "none",)).close()
    told = f"no adapter is below --lora-root {tmp_path / 'none'}: each is a folder with"
    assert any(one.startswith(told) for one in caplog.messages)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["serve", "--version"]):
        with contextlib.suppress(SystemExit):
            assert main(arguments) == 0
        assert capsys.readouterr().out == f"manylora {manylora.__version__}\n"


class Started:
    """`manylora serve` in a process. lines: what it wrote to stderr."""

    def __init__(self, log: Path, *arguments: str, **settings: str) -> None:
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manylora.cli", "serve", "--device", "cpu", "--port", "0", *arguments],
            stdout=subprocess.DEVNULL, stderr=log.open("w"), env=os.environ | settings,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def wait_for(self, text: str) -> str:
        """The first line with it."""
        self.until(lambda: any(text in line for line in self.lines), text)
        return next(line for line in self.lines if text in line)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, f"no {what}: {self.lines}"
            time.sleep(0.05)

    def interrupt(self) -> list[str]:
        """What Ctrl-C does. Returns the lines since then."""
        before = len(self.lines)
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(120) == 130
        return self.lines[before:]

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def get(url: str, key: str = "", **body: Any) -> Any:
    import httpx2

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method, sent = ("POST", {"json": body}) if body else ("GET", {})
    found = httpx2.request(method, url, headers=headers, timeout=60, **sent)
    return found.json() if found.status_code == 200 else found.text


def test_a_line_of_vllm_serves_and_ends_with_ctrl_c(models: Path, tmp_path: Path) -> None:
    """The flags that people have, with the program's name changed."""
    adapters = [f"one={ADAPTER}", json.dumps({"name": "two", "path": str(ADAPTER), "base_model_name": "x"})]
    line = (
        "--enable-lora --max-loras 2 --max-lora-rank 16 --max-cpu-loras 4 --max-model-len 0.25k "
        "--max-num-seqs 4 --dtype float --trust-remote-code --disable-log-requests "
        "--tensor-parallel-size 1 --seed 0 "
        "--enable-auto-tool-choice --tool-call-parser hermes --enable-prefix-caching --api-key k1 k2 "
        "--served-model-name base other"
    )
    with Started(tmp_path / "log", str(DEMO / "base"), *line.split(), "--lora-modules", *adapters) as server:
        url = server.wait_for("running on").split("running on ")[1].split()[0]
        assert server.wait_for("OpenAI API: ").endswith(
            f'OpenAI API: {url}/v1, the base model is "model": "base"; a page to try it: {url}/'
        )
        assert server.wait_for("2 adapters: one, two")
        listed = get(f"{url}/v1/models", "k2")["data"]
        assert [one["id"] for one in listed] == ["base", "other", "one", "two"]
        assert listed[0]["max_model_len"] == 250
        question = {"prompt": "Hi", "max_tokens": 2}
        assert get(f"{url}/v1/completions", "k1", model="two", **question)["usage"]["completion_tokens"] == 2
        assert "invalid_api_key" in get(f"{url}/v1/models", "k3")
        # Where adapters lie that the operator named is nobody's business.
        path = {"model": "base", "lora_path": str(ADAPTER)}
        assert "no adapter there that may be read" in get(f"{url}/v1/completions", "k1", **path, **question)
        refused = get(f"{url}/v1/load_lora_adapter", "k1", lora_name="x", lora_path=str(ADAPTER))
        assert "--allow-runtime-lora-updating" in refused and "admin: true" in refused
        last = server.interrupt()
    assert last[-1] == "manylora serve: stopped by Ctrl-C" and not any("Traceback" in line for line in last)
    assert any("loaded weights: " in line for line in server.lines)


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


PYTHON = """
from manylora import LLM, LoRARequest, SamplingParams
llm = LLM("org/model", revision="v1", enable_lora=True, device="cpu")
for number, path in enumerate(["org/adapter", "org/nothing"], start=1):
    try:
        output = llm.generate("Hi", SamplingParams(max_tokens=2), LoRARequest(f"a{number}", number, path))
        print(output.outputs[0].length)
    except Exception as error:
        print(error)
"""


def test_ids_of_the_hub_are_downloaded_once_and_python_takes_them_offline(
    tmp_path: Path, hub_home: dict[str, str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO / "base", model)
    for name in ("pytorch_model.bin", "modeling_own.py", "consolidated.safetensors"):
        (model / name).write_text("not to be read")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    arguments = ["org/model@v1", "--lora-modules", "sql=org/adapter"]
    with serve_hub({"org/model": model, "org/adapter": ADAPTER}) as hub:
        with Started(tmp_path / "log", *arguments, HF_ENDPOINT=hub.url, **hub_home) as server:
            url = server.wait_for("running on").split("running on ")[1].split()[0]
            asked = len(hub.asked)
            assert [one["id"] for one in get(f"{url}/v1/models")["data"]] == ["org/model", "sql"]
            answer = get(f"{url}/v1/completions", model="sql", prompt="Hi", max_tokens=2)
            assert answer["usage"]["completion_tokens"] == 2
            # A client cannot make it download.
            path = get(f"{url}/v1/completions", model="org/model", prompt="Hi", lora_path="org/adapter")
            assert "no adapter there that may be read" in path
            assert len(hub.asked) == asked
            assert "downloaded org/model@v1: " in "\n".join(server.lines)
            server.interrupt()
        unread = {"pytorch_model.bin", "modeling_own.py", "consolidated.safetensors"}
        assert "model.safetensors" in hub.downloaded and not hub.downloaded & unread
        hub.asked.clear()
        offline = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PYTHON], capture_output=True, text=True, check=True, timeout=120,
            cwd=tmp_path, env=os.environ | hub_home | offline,
        )  # fmt: skip
        assert hub.asked == []
    length, problem = done.stdout.splitlines()
    assert length == "2"
    assert "there is no folder org/nothing here, and it is not whole in the cache" in problem
    cached = tmp_path / "hf" / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert (cached / "model.safetensors").is_file()
    assert (cached / "1_Pooling" / "config.json").is_file() and not (cached / "onnx").exists()


LINES = """
import sys
from huggingface_hub import constants
from manylora.cli import main
for line in sys.stdin:
    constants.HF_HUB_OFFLINE = line.startswith("offline ")
    status = main(["serve", "--port", "0", *line.removeprefix("offline ").split()])
    print("status", status, file=sys.stderr, flush=True)
"""


def test_an_id_that_cannot_be_had_is_one_line(models: Path, hub_home: dict[str, str]) -> None:
    """And one in the cache is of use without the hub: here until its length is found to be too small."""
    whole = "org/model --max-model-len 1M"
    with serve_hub({"org/model": models / "good", "org/adapter": ADAPTER}, gated=("org/gated",)) as hub:
        process = subprocess.Popen(
            [sys.executable, "-c", LINES], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            bufsize=1, env=os.environ | hub_home | {"HF_ENDPOINT": hub.url},
        )  # fmt: skip
        with process:
            cases = {
                "offline org/model": "HF_HUB_OFFLINE is set",
                "org/nothing": "there is no folder org/nothing here, and no org/nothing on",
                "org/gated": f"org/gated is gated: accept its terms on {hub.url}/org/gated, and set HF_TOKEN",
                "org/model@v9": "org/model has no revision 'v9'",
                "org/adapter": "is an adapter of",
                f"{models / 'good'} --revision v1": "is for an id of the hub",
                whole: "more than the model's 256 positions",
            }
            for line, text in cases.items():
                *said, last = tell(process, line)
                assert text in last and not any("cache are used" in one for one in said), said
            hub.leave()
            *_, gone = tell(process, "org/other")
            assert "it cannot be had from" in gone and "hf download org/other" in gone
            *said, last = tell(process, whole)
            assert any("the files in the cache are used" in one for one in said)
            assert cases[whole] in last


def tell(process: subprocess.Popen[str], line: str) -> list[str]:
    """What the command says, which fails."""
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(line + "\n")
    said = list(iter(lambda: process.stderr.readline().rstrip("\n"), "status 1"))
    assert said and "Traceback" not in "\n".join(said), said
    return said


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the download, and in it."""
    file = SimpleNamespace(file_size=10**18, will_download=True)

    def download(*_: object, dry_run: bool = False, **__: object) -> list[SimpleNamespace]:
        if dry_run:
            return [file]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=r"org/model needs 1000000000.0 GB, and .* has .* left: .*HF_HOME"):
        local_model("org/model", cache=tmp_path)
    file.file_size = 1
    with pytest.raises(ConfigError, match=r"org/model: the disk of .* is full: .*HF_HOME"):
        local_model("org/model", cache=tmp_path)


def test_ctrl_c_in_a_download_does_not_wait_for_it(tmp_path: Path, hub_home: dict[str, str]) -> None:
    with serve_hub({"org/model": DEMO / "base"}) as hub:
        hub.go_on.clear()
        try:
            with Started(tmp_path / "log", "org/model", HF_ENDPOINT=hub.url, **hub_home) as server:
                server.until(lambda: "model.safetensors" in hub.downloaded, "download")
                server.interrupt()
        finally:
            hub.go_on.set()
    assert server.lines[-1] == "manylora serve: stopped by Ctrl-C"
    assert not [line for line in server.lines if "Traceback" in line or "HTTP Request" in line]

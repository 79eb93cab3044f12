"""Protects adapters from where they live: buckets, web servers, OCI registries and own sources serve like
folders, are downloaded once, stay within bounds, and only below what the operator allowed; archives and
manifests are not trusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from huggingface_hub import constants
from serving import DEMO, Running
from source_standins import LOGIN, OCI, Standin, serve_standin, tar
from test_adapter_formats import llama_cpp, mlx

from manylora import LLM, LoRARequest, SamplingParams
from manylora.adapters.formats.manifest import MANIFEST, signed_text
from manylora.adapters.remote import resolver
from manylora.adapters.remote.resolver import AdapterSources
from manylora.cli import main
from manylora.doors.http.options import NamedAdapter
from manylora.errors import ConfigError

for driver in ("s3fs", "oras", "aiohttp"):
    pytest.importorskip(driver, reason=f"URLs of adapters need {driver}: pip install 'manylora[sources]'")

ADAPTER = DEMO / "adapters" / "chinese"
FILES = {file.name: file.read_bytes() for file in ADAPTER.iterdir()}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
MOST = 600_000  # bytes of the cache: five adapters
PROMPT = {"prompt": "What is the capital of France?", "max_tokens": 4, "temperature": 0}


def manifest(**more: Any) -> bytes:
    return json.dumps({"files": DIGESTS} | more).encode()


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    home = tmp_path_factory.mktemp("home")
    (home / "manylora").mkdir()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for kernels in (cache / "manylora").glob("*.so"):  # or they would be compiled again
        (home / "manylora" / kernels.name).symlink_to(kernels)
    with serve_standin() as server, pytest.MonkeyPatch.context() as patch:
        login = {"auths": {server.at: {"auth": LOGIN}}}
        (home / "config.json").write_text(json.dumps(login))
        for name, value in {
            "XDG_CACHE_HOME": home, "DOCKER_CONFIG": home, "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1",
            "STORAGE_EMULATOR_HOST": server.url, "FSSPEC_GS_TOKEN": "anon",
        }.items():  # fmt: skip
            patch.setenv(name, str(value))
        package = home / "own"
        (package / "own_source-1.dist-info").mkdir(parents=True)
        (package / "own_source-1.dist-info" / "METADATA").write_text("Name: own-source\nVersion: 1\n")
        points = "[manylora.adapter_sources]\nown = own_source:fetch\n"
        (package / "own_source-1.dist-info" / "entry_points.txt").write_text(points)
        copy = f"copytree({str(ADAPTER.parent)!r} + url[5:], folder, dirs_exist_ok=True)"
        copy = f"from shutil import copytree\ndef fetch(url, folder): {copy}\n"
        (package / "own_source.py").write_text(copy)
        patch.syspath_prepend(str(package))
        server.put("/bucket/team/chinese", ADAPTER)
        server.put("/private/chinese", ADAPTER)
        mlx(ADAPTER, home / "mlx")
        server.put("/bucket/team/mlx", home / "mlx")
        llama_cpp(ADAPTER, home / "one.gguf", {"self_attn.q_proj": 6, "self_attn.k_proj": 2}, "llama")
        server.files["/bucket/team/one.gguf"] = (home / "one.gguf").read_bytes()
        inside = {f"run/{name}": content for name, content in FILES.items()}
        server.files["/bucket/team/chinese.tar.gz"] = tar(inside | {"run/optimizer.bin": b"pickle"})
        server.files["/bucket/team/chinese.tgz"] = tar(inside)
        server.push("team/files", [(name, f"{OCI}.layer.v1.tar", content) for name, content in FILES.items()])
        server.push("team/image", [("", f"{OCI}.layer.v1.tar+gzip", tar(inside | {"bin/sh": "busybox"}))])
        yield server


@pytest.fixture(scope="module")
def served(remote: Standin) -> Iterator[Running]:
    server = Running(
        lora_modules=[NamedAdapter("local", str(ADAPTER)), NamedAdapter("first", "s3://bucket/team/chinese")],
        allow_runtime_lora_updating=True,
        lora_download_bytes=MOST,
        lora_allowed_source=("s3://bucket/team", "gs://bucket/team", f"{remote.url}/bucket/team",
                             f"oci://{remote.at}/team", "own://"),
    )  # fmt: skip
    yield server
    server.close()


def load(served: Running, source: str, name: str = "new") -> str:
    """Load and unload it. Returns "" or the error's code and message."""
    answer = served.post("/v1/load_lora_adapter", lora_name=name, lora_path=source)
    if answer.status_code == 200:
        assert text(served, name) == text(served, "local")
        card = served.http.get(f"/v1/models/{name}").json()
        assert card["source"] == source and card["digest"]
        by_path = served.post(lora_path=source, model="demo", **PROMPT).json()["choices"][0]["text"]
        assert by_path == text(served, "local") != text(served, "demo")
        assert served.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200
        return ""
    error = answer.json()["error"]
    assert str(Path.home()) not in error["message"] and "/manylora/" not in error["message"]
    return f"{answer.status_code} {error['code']} {error['message']}"


def text(served: Running, name: str) -> str:
    return str(served.client().completions.create(model=name, **PROMPT).choices[0].text)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "source",
    ["s3://bucket/team/chinese", "s3://bucket/team/chinese.tar.gz", "{url}/bucket/team/chinese/",
     "{url}/bucket/team/chinese.tgz", "oci://{at}/team/files:v1", "oci://{at}/team/image:v1", "own://chinese",
     "gs://bucket/team/chinese", "s3://bucket/team/mlx", "{url}/bucket/team/one.gguf"],
)  # fmt: skip
def test_a_source_serves_like_its_folder(remote: Standin, served: Running, source: str) -> None:
    if source.startswith("gs:"):
        pytest.importorskip("gcsfs", reason="gs:// needs gcsfs: pip install 'manylora[sources]'")
    source = source.format(url=remote.url, at=remote.at)
    assert load(served, source) == ""
    remote.asked.clear()
    assert load(served, source) == ""  # from the cache
    weights = [one for one in remote.asked if one.endswith((".safetensors", ".gz", ".gguf"))]
    assert not [one for one in weights if one.startswith("GET") and one[4:] in remote.files]


def test_at_the_start_and_for_many_at_once_it_is_downloaded_once(remote: Standin, served: Running) -> None:
    assert text(served, "first") == text(served, "local")
    remote.files["/bucket/team/once.tar.gz"] = tar({**FILES, "README.json": b"once"})
    remote.files["/bucket/team/again.tar.gz"] = tar(FILES | {"README.json": b"tried again"})
    remote.failing["/bucket/team/again.tar.gz"] = 2
    assert load(served, f"{remote.url}/bucket/team/again.tar.gz") == ""
    remote.asked.clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: load(served, "s3://bucket/team/once.tar.gz", f"n{n}"), range(4)))
    assert found == [""] * 4 and remote.num_asked("GET /bucket/team/once") == 1
    remote.down = True
    try:  # what was downloaded goes on serving, the rest may be asked for again
        assert load(served, "s3://bucket/team/once.tar.gz") == ""
        assert load(served, f"{remote.url}/bucket/team/other.tar.gz").startswith("503 adapter_unreadable")
    finally:
        remote.down = False


@pytest.mark.parametrize(
    "source, error",
    [
        ("s3://private/chinese", "403 not_allowed"),
        ("s3://bucket/team/../../private/chinese", "403 not_allowed"),
        ("{url}/bucket/team/chinese?x=y", "403 not_allowed"),
        ("{url}@example.com/bucket/team/chinese", "403 not_allowed"),
        ("{url}/bucket/team/%2e%2e/chinese", "403 not_allowed"),
        ("file:///etc", "403 not_allowed"),
        ("{url}/bucket/team/away.tar", "422 adapter_broken lora_path: {url}/bucket/team/away.tar: it redir"),
        ("s3://bucket/team/none", "404 adapter_not_found"),
        ("oci://{at}/team/files:v2", "404 adapter_not_found"),
        ("oci://{at}/team/large:v1", "422 adapter_broken"),
    ],
)
def test_a_request_names_only_what_is_allowed(
    remote: Standin, served: Running, source: str, error: str
) -> None:
    remote.redirects["/bucket/team/away.tar"] = f"http://localhost:{remote.server_address[1]}/private.tar"
    remote.push("team/large", [("adapter_config.json", "any", b" " * MOST), ("model.tar", "any", b"x")])
    remote.asked.clear()
    source, error = (one.format(url=remote.url, at=remote.at) for one in (source, error))
    assert load(served, source).startswith(error)
    assert not error.startswith("403") or not remote.asked
    assert remote.num_asked("private") == 0


HOSTILE = {
    "escape": (tar({"../adapter_config.json": b"{}"}), "points outside"),
    "link": (tar({"adapter_config.json": "/etc/passwd"}), "is no plain file"),
    "bomb": (tar({"large.bin": bytes(2**23), **FILES}), "an adapter may have"),
    "name": (tar({"x" * 2**21: b"", **FILES}), "a header in it is too large"),
    "two": (tar({f"{one}/{name}": FILES[name] for one in "ab" for name in FILES}), "several adapters: a, b"),
    "pickle": (tar({"adapter_model.bin": b"pickle"}), "it has no adapter_config.json"),
    "cut": (tar(FILES)[:5000], "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_is_not_trusted(remote: Standin, served: Running, name: str) -> None:
    content, error = HOSTILE[name]
    remote.files[f"/bucket/team/{name}.tar"] = content
    assert error in load(served, f"s3://bucket/team/{name}.tar")


def test_the_cache_is_bounded_and_keeps_what_serves(
    remote: Standin, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        note = {"generation_config.json": json.dumps({"note": number}).encode()}
        remote.files[f"/bucket/team/v{number}.tar"] = tar(FILES | note, "w")
        assert load(served, f"s3://bucket/team/v{number}.tar") == ""
    remote.asked.clear()
    assert load(served, "s3://bucket/team/v7.tar") == "" and remote.num_asked("GET /bucket/team/v7") == 0
    assert load(served, "s3://bucket/team/v0.tar") == "" and remote.num_asked("GET /bucket/team/v0") == 1
    assert load(served, "s3://bucket/team/chinese") == ""
    assert remote.num_asked("chinese/adapter_m") == 1  # HEAD
    monkeypatch.setattr(resolver, "MAX_RECORDS", 4)
    assert load(served, "s3://bucket/team/v1.tar") == ""
    records = Path(os.environ["XDG_CACHE_HOME"]) / "manylora" / "adapters" / "sources"
    assert len(list(records.iterdir())) <= 5


def test_many_at_once_have_few_threads() -> None:
    sources, go_on = AdapterSources(), threading.Event()
    futures = [sources.in_background(lambda: go_on.wait(60) and threading.get_ident()) for _ in range(40)]
    names = [thread.name for thread in threading.enumerate()]
    go_on.set()
    assert len({one.result() for one in futures}) <= resolver.AT_ONCE == names.count("manylora-download")


@pytest.mark.parametrize(
    "content, error",
    [
        (manifest(), ""),
        (json.dumps({"files": dict.fromkeys(FILES, "0" * 64)}).encode(), "is not the file of"),
        (manifest(base_model_revision="0" * 40), "that of this model is not known"),
        (manifest(signature="AAAA"), "is signed: set MANYLORA_MANIFEST_KEY"),
        (manifest(owner="x"), "must be"),
    ],
)
def test_a_manifest_is_enforced(remote: Standin, served: Running, content: bytes, error: str) -> None:
    remote.put("/bucket/team/told", ADAPTER)
    remote.files[f"/bucket/team/told/{MANIFEST}"] = content
    found = load(served, "s3://bucket/team/told")
    assert error in found and bool(found) == bool(error)


def test_a_manifest_lists_each_file_and_the_key_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in {**FILES, MANIFEST: manifest(), "more.gguf": b"GGUF"}.items():
        (tmp_path / name).write_bytes(file)
    with pytest.raises(ValueError, match=r"more\.gguf is not in"):
        Running(lora_modules=(NamedAdapter("a", str(tmp_path)),)).close()
    monkeypatch.setenv("MANYLORA_MANIFEST_KEY", "key.pem")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--org--name"
    copytree(ADAPTER, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    with pytest.raises(ConfigError, match="hf://org/name: it has no manylora-manifest"):
        AdapterSources(hub=tmp_path / "hub").locate("hf://org/name")


def test_a_signed_manifest(
    remote: Standin, served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "signatures need cryptography: pip install 'manylora[sources]'"
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason=reason)
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    private = ed25519.Ed25519PrivateKey.generate()
    key = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(key)
    monkeypatch.setenv("MANYLORA_MANIFEST_KEY", str(tmp_path / "key.pem"))
    remote.put("/bucket/team/signed", ADAPTER)
    assert "it has no manylora-manifest.json" in load(served, "s3://bucket/team/signed")
    signature = base64.b64encode(private.sign(signed_text(json.loads(manifest())))).decode()
    remote.files[f"/bucket/team/signed/{MANIFEST}"] = manifest(signature=signature)
    assert load(served, "s3://bucket/team/signed") == ""
    remote.files[f"/bucket/team/signed/{MANIFEST}"] = manifest(
        signature=signature, base_model_revision="0" * 40
    )
    assert "not by the key" in load(served, "s3://bucket/team/signed")


def test_python_takes_urls_and_errors_show_no_credentials(
    remote: Standin, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("/bucket/team/python", ADAPTER)
    secret = remote.url.replace("//", "//someone:secret@") + "/nothing?sig=secret"
    with LLM(DEMO / "base", enable_lora=True, device="cpu") as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        asked = ["s3://bucket/team/python", str(ADAPTER)]
        requests = [LoRARequest(f"a{i}", i, path) for i, path in enumerate(asked, 1)]
        first, second = llm.generate([PROMPT["prompt"]] * 2, params, requests)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        with pytest.raises(Exception, match="/nothing") as problem:
            llm.generate("Hi", params, LoRARequest("bad", 3, secret))
        assert "secret" not in str(problem.value)
    blob = f"/v2/team/files/blobs/sha256:{DIGESTS['adapter_config.json']}"
    monkeypatch.setitem(remote.redirects, blob, f"{remote.url}/gone?X-Amz-Signature=secret")
    monkeypatch.setitem(remote.failing, "/gone", 9)
    with pytest.raises(ConfigError, match="answers HTTP 503") as found:
        AdapterSources(tmp_path).locate(f"oci://{remote.at}/team/files:v1")
    assert "secret" not in str(found.value)
    assert main(["inspect", "s3://bucket/team/python"]) == 0
    assert "peft" in capsys.readouterr().out

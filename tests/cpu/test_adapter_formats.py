"""Protects adapters of other trainers than PEFT: each answers as the same adapter in transformers + PEFT,
with the same tokens and log probabilities, through `LLM`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from adapter_cases import check_answer
from running import tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, reference_logits
from torch import Tensor

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.adapters.catalog.files import find_adapters
from manylora.adapters.report import inspect_adapter
from manylora.doors.cli.convert import main as convert
from manylora.doors.http.options import NamedAdapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS = "adapter_model.safetensors"
PROMPT, NEW, RANK = tokens(11), 5, 4
Tensors = dict[str, Tensor]
Write = Callable[[Path, Path], None]  # the folder of a PEFT adapter, and where the same goes


def settings_of(adapter: Path) -> dict[str, Any]:
    return json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))


def write(path: Path, found: Tensors, settings: dict[str, Any], name: str = WEIGHTS) -> None:
    path.mkdir()
    save_file({key: value.clone().contiguous() for key, value in found.items()}, path / name)
    (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def apart(adapter: Path) -> tuple[Tensors, Tensors]:
    """The tensors of an adapter without those of experts, and these by `HEAD.experts.NAME.A` or B, each
    [experts, r, in] or [experts, out, r]. Gate and up are apart, too."""
    others: Tensors = {}
    stacks: Tensors = {}
    for key, value in load_file(adapter / WEIGHTS).items():
        head, experts, tail = key.partition(".experts.")
        if not experts:
            others |= {key: value} if ".lora_" in key else {}
        elif "lora_A" in tail:
            each = value.unflatten(0, (-1, RANK))
            for name in ("gate_proj", "up_proj") if "base_layer" in tail else ("down_proj",):
                stacks[f"{head}.experts.{name}.A"] = each
        else:
            each = value.unflatten(1, (RANK, -1)).permute(2, 0, 1)
            halves = each.chunk(2, dim=1) if "gpt" not in str(adapter) else (each[:, ::2], each[:, 1::2])
            parts = (
                {"gate_proj": halves[0], "up_proj": halves[1]}
                if "base_layer" in tail
                else {"down_proj": each}
            )
            stacks |= {f"{head}.experts.{name}.B": part for name, part in parts.items()}
    return others, stacks


def mlx(adapter: Path, path: Path) -> None:
    settings = settings_of(adapter)
    found, stacks = apart(adapter)
    ends = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    ends |= {"lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b"}
    made: Tensors = {}
    for key, value in found.items():
        name, _, end = key.removeprefix("base_model.model.").partition(".lora_")
        made[f"{name}.{ends[f'lora_{end}']}"] = value.T if value.ndim == 2 else value
    for key, value in stacks.items():
        name, side = key.removeprefix("base_model.model.").rsplit(".", 1)
        made[f"{name.replace('.experts.', '.switch_mlp.')}.lora_{side.lower()}"] = value
    scale = settings["lora_alpha"] / settings["r"]
    parameters = {"rank": settings["r"], "scale": scale, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    kind = "dora" if settings["use_dora"] else "lora"
    more = {"fine_tune_type": kind, "num_layers": 16, "model": "org/base", "optimizer_config": {"adam": {}}}
    write(path, made, {"lora_parameters": parameters, **more}, "adapters.safetensors")


def tinker(adapter: Path, path: Path) -> None:
    found, stacks = apart(adapter)
    made = {
        key.replace("model.lm_head", "model.model.unembed_tokens").replace(".self_attn.", ".attn."): value
        for key, value in found.items()
    }
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for key, value in stacks.items():
        head, name, side = key.rsplit(".", 2)
        shared = value[:1] if (value == value[:1]).all() else value
        made[f"{head}.{short[name]}.lora_{side}.weight"] = shared
    write(path, made, {name: settings_of(adapter)[name] for name in ("lora_alpha", "r")})


def megatron_bridge(adapter: Path, path: Path) -> None:
    made, stacks = apart(adapter)
    for key, value in stacks.items():
        head, name, side = key.rsplit(".", 2)
        if (value == value[:1]).all():
            made[f"{head}.{name}.lora_{side}.weight"] = value[:1]
        else:
            made |= {f"{head}.{n}.{name}.lora_{side}.weight": one.clone() for n, one in enumerate(value)}
    names = ["down_proj", "gate_proj", *ATTENTION, "up_proj"]
    write(path, made, {**settings_of(adapter), "target_parameters": None, "target_modules": names})


def megatron_bridge_3d(adapter: Path, path: Path) -> None:
    made = load_file(adapter / WEIGHTS)
    for key, value in made.items():
        if ".experts." in key:
            made[key] = value.unflatten(0, (-1, RANK)) if "lora_A" in key else value.unflatten(1, (RANK, -1))
    write(path, made, settings_of(adapter))


def automodel(adapter: Path, path: Path) -> None:
    made, stacks = apart(adapter)
    for key in stacks:
        head, name, side = key.rsplit(".", 2)
        value = stacks[key].mT
        if name == "gate_proj":
            other = stacks[key.replace("gate_proj", "up_proj")].mT
            made[f"{head}.lora_gate_and_up_{side}"] = (
                value if side == "A" else torch.cat((value, other), dim=2)
            )
        elif name == "down_proj":
            made[f"{head}.lora_down_{side}"] = value
    write(path, made, {**settings_of(adapter), "target_parameters": None})


def automodel_scaled(adapter: Path, path: Path) -> None:
    """Packed as PEFT does, with A and B of a transposed matrix, and without the experts' own rank."""
    made, stacks = apart(adapter)
    for key, value in stacks.items():
        head, name, side = key.rsplit(".", 2)
        wrapper = head if name == "down_proj" else f"{head}.base_layer"
        if name == "gate_proj" and side == "B":
            value = torch.cat((value, stacks[key.replace("gate_proj", "up_proj")]), dim=1)
        if name != "up_proj" and side == "A":
            made[f"{wrapper}.lora_B.weight"] = value.permute(2, 1, 0).flatten(1)
        elif name != "up_proj":
            made[f"{wrapper}.lora_A.weight"] = value.mT.flatten(0, 1)
    write(path, made, {**settings_of(adapter), "r": 2 * RANK, "rank_pattern": {}})
    (path / "automodel_peft_config.json").write_text('{"moe_rank_scaling": true}', encoding="utf-8")


GGUF = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def llama_cpp(adapter: Path, path: Path, heads: dict[str, int] | None = None, kind: str = "qwen3moe") -> None:
    """heads: whose rows its converter reorders. Compared with files of convert_lora_to_gguf.py itself."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, settings_of(adapter)["lora_alpha"])
    found, stacks = apart(adapter)
    for key, value in {**found, **stacks}.items():
        name = key.partition(".layers.")[2].replace("mlp.", "").replace("experts.", "")
        layer, _, name = name.partition(".")
        side = "lora_a" if "lora_A" in name or name.endswith(".A") else "lora_b"
        name = name.partition(".lora_")[0].removesuffix(".A").removesuffix(".B")
        if side == "lora_b" and heads and name in heads:
            value = value.reshape(heads[name], 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        own = GGUF[name] + "_exps" * (".experts." in key)
        writer.add_tensor(f"blk.{layer}.{own}.weight.{side}", value.float().contiguous().numpy())
    for write_part in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write_part()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def dense(folder: Path) -> Path:
    """A model, and an adapter of it in PEFT's form, in mlx-lm's and in GGUF, beside it."""
    model = make_model(folder / "llama", "llama", seed=4)
    mlx(make_adapter(folder / "lora", model, 0, 6, DENSE, alpha=9), folder / "mlx-lora")
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    llama_cpp(folder / "lora", folder / "one.gguf", heads, "llama")
    return model


def check(llm: LLM, model: Path, pairs: dict[Path, Path]) -> None:
    """Each adapter answers as the one of PEFT beside it, all in one batch."""
    asked = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(pairs, 1)]
    params = SamplingParams(max_tokens=NEW, logprobs=1, ignore_eos=True)
    outputs = llm.generate([PROMPT] * len(asked), params, asked, False)
    assert isinstance(outputs, list)
    for peft, output in zip(pairs.values(), outputs, strict=True):
        made = output.outputs[0]
        expected = reference_logits(model, peft, [*PROMPT, *made.token_ids])[len(PROMPT) - 1 : -1]
        check_answer(made, expected)


def test_dense_models(dense: Path, folder: Path) -> None:
    dora = make_adapter(folder / "dora", dense, 1, 6, DENSE, alpha=9, use_dora=True)
    mlx(dora, folder / "mlx-dora")
    pairs = {folder / "mlx-lora": folder / "lora", folder / "one.gguf": folder / "lora"}
    pairs[folder / "mlx-dora"] = dora
    with LLM(dense, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        check(llm, dense, pairs)
    report = inspect_adapter(folder / "one.gguf")
    assert report.kind == "gguf" and report.problem is not None and "(--base)" in report.problem
    assert inspect_adapter(folder / "mlx-lora").kind == "mlx"
    assert convert(["-i", str(folder / "mlx-lora"), "-o", str(folder / "converted"), "--to", "npy"]) == 0


def test_mixtures_of_experts(folder: Path) -> None:
    model = make_model(folder / "moe", "qwen3-moe", seed=3)
    modules = (*ATTENTION, "lm_head")
    plain = make_adapter(folder / "plain", model, 1, RANK, modules, 7, target_parameters=EXPERTS)
    outer = make_adapter(folder / "outer", model, 2, RANK, ATTENTION, 7, target_parameters=EXPERTS)
    found = load_file(outer / WEIGHTS)
    for key, value in found.items():  # gate and up have one A for all experts, down has one B
        if "experts.base_layer.lora_A" in key:
            found[key] = value[:RANK].repeat(len(value) // RANK, 1)
        elif "experts.lora_B" in key:
            found[key] = value[:, :RANK].repeat_interleave(value.shape[1] // RANK, 1).contiguous()
    save_file(found, outer / WEIGHTS)
    ranks = {r".*\.experts\.(gate_up|down)_proj": RANK}
    scaled = {"target_parameters": EXPERTS, "rank_pattern": ranks}
    scaled_peft = make_adapter(folder / "scaled", model, 3, 2 * RANK, ATTENTION, 7, **scaled)
    writers: list[tuple[Write, Path]] = [
        (mlx, plain), (tinker, plain), (automodel, plain), (tinker, outer), (megatron_bridge, outer),
        (megatron_bridge_3d, outer), (automodel_scaled, scaled_peft),
    ]  # fmt: skip
    llama_cpp(
        plain_experts := make_adapter(
            folder / "exps", model, 4, RANK, ATTENTION, 7, target_parameters=EXPERTS
        ),
        folder / "exps.gguf",
    )
    pairs = {folder / "exps.gguf": plain_experts}
    for writer, peft in writers:
        pairs[folder / f"{writer.__name__}-{peft.name}"] = peft
        writer(peft, folder / f"{writer.__name__}-{peft.name}")
    with LLM(model, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        check(llm, model, pairs)


def test_parts_of_a_layer(folder: Path) -> None:
    """Tinker trains q, k and v of Qwen3.5's linear attention apart."""
    model = make_model(folder / "delta", "qwen3.5", seed=6)
    ranks = {"rank_pattern": {"in_proj_qkv": 3 * RANK}, "alpha_pattern": {"in_proj_qkv": 21}}
    peft = make_adapter(
        folder / "delta-peft", model, 1, RANK, ("in_proj_qkv", "in_proj_z", "q_proj"), 7, **ranks
    )
    found = load_file(peft / WEIGHTS)
    parts: Tensors = {}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    rows = [config["linear_key_head_dim"] * config["linear_num_key_heads"]] * 2
    for key, value in list(found.items()):
        if "in_proj_qkv" not in key:
            parts[key] = value
            continue
        a, b = key.replace("lora_B", "lora_A"), key.replace("lora_A", "lora_B")
        sizes = [*rows, len(found[b]) - sum(rows)]
        ranks_of = [slice(n * RANK, (n + 1) * RANK) for n in range(3)]
        blocks = [part[:, one] for part, one in zip(found[b].split(sizes), ranks_of, strict=True)]
        found[b] = torch.block_diag(*blocks)
        for name, one, block in zip("qkv", ranks_of, blocks, strict=True):
            parts[a.replace("in_proj_qkv", f"in_proj_{name}")] = found[a][one]
            parts[b.replace("in_proj_qkv", f"in_proj_{name}")] = block
    save_file(found, peft / WEIGHTS)
    write(folder / "tinker-delta", parts, {"lora_alpha": 7, "r": RANK})
    with LLM(model, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        check(llm, model, {folder / "tinker-delta": peft})


def test_a_tied_head_changes_with_its_embedding(folder: Path) -> None:
    model = make_model(folder / "tied", "llama", seed=5, tie_word_embeddings=True)
    peft = make_adapter(folder / "tied-peft", model, 1, RANK, ("q_proj", "embed_tokens", "lm_head"), 7)
    found = {key: value for key, value in load_file(peft / WEIGHTS).items() if ".lora_" in key}
    table, head = "base_model.model.model.embed_tokens.lora_embedding", "base_model.model.lm_head.lora"
    found[f"{head}_A.weight"], found[f"{head}_B.weight"] = found[f"{table}_B"].T, found[f"{table}_A"].T
    for path, kept in ((folder / "both", found), (folder / "table", dict(found))):
        if path.name == "table":  # all that mlx-lm saves
            del kept[f"{head}_A.weight"], kept[f"{head}_B.weight"]
        write(path, kept, settings_of(peft))
    mlx(folder / "table", folder / "mlx-tied")
    with LLM(model, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        check(llm, model, {folder / "mlx-tied": folder / "both"})


def test_what_is_wrong_is_said(dense: Path, folder: Path) -> None:
    for name, settings, reason in [
        ("full", {"fine_tune_type": "full"}, "serve the folder that mlx_lm.fuse writes"),
        (
            "scale",
            {"lora_parameters": {"rank": 4, "scale": "1"}},
            "must have rank, a positive number, and scale",
        ),
    ]:
        found = {"model.layers.0.self_attn.q_proj.lora_a": torch.ones(64, 4)}
        write(folder / name, found, settings, "adapters.safetensors")
        assert reason in (inspect_adapter(folder / name).problem or "")
    found = {"model.layers.0.mlp.experts.w1.lora_A.weight": torch.ones(1, 2, 64)}
    write(folder / "shared", found, {"lora_alpha": 2, "r": 2})
    assert "how many there are depends on the base" in (inspect_adapter(folder / "shared").problem or "")
    up = "model.layers.0.mlp.experts.w1"
    found = {f"{up}.lora_A.weight": torch.ones(8, 0, 64), f"{up}.lora_B.weight": torch.ones(8, 32, 2)}
    write(folder / "empty", found, {"lora_alpha": 2, "r": 2})
    assert "8 experts cannot have (8, 0, 64)" in (inspect_adapter(folder / "empty").problem or "")
    whole = (folder / "one.gguf").read_bytes()
    for number, (data, reason) in enumerate([
        (whole.replace(b"adapter.type", b"adapter.tipe"), "its adapter.type must be lora, got None"),
        (whole.replace(b"attn_q.weight.lora_b", b"attn_q.weight.lora_c"), "neither lora_a nor lora_b"),
        (whole.replace(b"attn_q.weight.lora_a", b"attn_q.wei.ht.lora_a"), "is missing its lora_"),
        (whole[:-5], "does not lie in the file"),
    ]):  # fmt: skip
        (folder / f"broken-{number}.gguf").write_bytes(data)
        assert reason in (inspect_adapter(folder / f"broken-{number}.gguf").problem or ""), number
    assert NamedAdapter.parse("a/sql.gguf") == NamedAdapter("sql", "a/sql.gguf")
    assert set(find_adapters(folder, {}, [folder])) >= {"one", "mlx-lora"}


def test_experts_whose_rows_are_in_turn(folder: Path) -> None:
    model = make_model(folder / "gpt", "gpt-oss", seed=6)
    peft = make_adapter(folder / "gpt-plain", model, 1, RANK, ATTENTION, 7, target_parameters=EXPERTS)
    tinker(peft, folder / "tinker-gpt")
    with LLM(model, device="cpu", lora_config=LoraConfig(max_lora_rank=16)) as llm:
        check(llm, model, {folder / "tinker-gpt": peft})

"""Protects mixtures of experts: logits and greedy tokens equal transformers + PEFT, with adapters on every
module, many of them and the base model in one batch; what cannot be served is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import agree, decoder_of
from parity import read_from
from peft import PeftModel
from running import answers, check_greedy
from safetensors.torch import load_file, save_file
from selection import extended
from test_parity_adapters import mixed_logits, tokens
from test_parity_models import Driver
from tiny_configs import MOE_FAMILIES
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_logits
from transformers import AutoModelForCausalLM

from manylora.adapters.cache.store import AdapterStore
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.npy import write_npy
from manylora.adapters.modules import MODULE_NAMES, lora_modules, targets_beside_quantised_experts
from manylora.adapters.moe_layout import make_per_expert_lora
from manylora.adapters.slicing import slice_row
from manylora.adapters.tensors import AdapterRow, pack_rows
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError
from manylora.kernels.row_format import RowFormat
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig

# Of all families; PEFT takes those that there are.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
KINDS: dict[str, dict[str, Any]] = {
    "experts": {"rank": 4, "target_parameters": EXPERTS, "modules": ATTENTION},
    "experts and router": {"rank": 3, "target_parameters": [*EXPERTS, *ROUTER], "modules": ()},
    "rank 1": {"rank": 1, "target_parameters": EXPERTS[1:], "modules": ("q_proj", "q_a_proj")},
    "rank 512": {"rank": 512, "target_parameters": EXPERTS[:1], "modules": ()},
    "patterns": {
        "rank": 4,
        "target_parameters": [*EXPERTS, *ROUTER],
        "modules": ATTENTION,
        "rank_pattern": {r".*\.gate_up_proj": 9, "layers.1.mlp.experts.down_proj": 2, "gate.weight": 7},
        "alpha_pattern": {"experts.gate_up_proj": 5, "layers.1.mlp.gate.weight": 20},
    },
    "rsLoRA": {
        "rank": 6,
        "target_parameters": EXPERTS,
        "modules": ("v_proj", "kv_b_proj"),
        "use_rslora": True,
    },
    "attention": {"rank": 8, "modules": ATTENTION},
}
SHARED = {
    "rank": 5,
    "modules": ("shared_expert_gate", *(f"shared_expert.{n}_proj" for n in ("gate", "up", "down"))),
}


def by_number(adapter: Path, path: Path, mixtral: bool) -> Path:
    """The same adapter as PEFT wrote it before it stacked experts: matrices of each expert by its number."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for key, value in load_file(adapter / "adapter_model.safetensors").items():
        key = key.replace(".mlp.", ".block_sparse_moe.") if mixtral else key
        head, experts, tail = key.partition(".experts.")
        if not experts:
            found[key] = value
            continue
        gate_up, rank = "base_layer" in tail, config["r"]
        side = "lora_A" if "lora_A" in tail else "lora_B"
        if side == "lora_A":
            each = value.unflatten(0, (-1, rank))
            parts = [each, each] if gate_up else [each]
        else:
            each = value.unflatten(1, (rank, -1)).permute(2, 0, 1)
            parts = list(each.chunk(2, dim=1)) if gate_up else [each]
        for name, part in zip(names[:2] if gate_up else names[2:], parts, strict=True):
            for number, matrix in enumerate(part):
                found[f"{head}.experts.{number}.{name}.{side}.weight"] = matrix.clone()
    path.mkdir()
    save_file(found, path / "adapter_model.safetensors")
    config.update(target_parameters=None, target_modules=[*names, *ATTENTION])
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def in_block(options: dict[str, Any], family: str) -> dict[str, Any]:
    """Granite, Llama 4 and Gemma 4 have their experts and their router elsewhere, gpt-oss only the latter,
    LFM2 only the former; Nemotron-H's have no gate."""
    if not family.startswith(("granite", "llama4", "gpt-oss", "lfm2", "gemma4", "nemotron")):
        return options
    block = "feed_forward." if family.startswith(("llama4", "lfm2")) else "block_sparse_moe."

    def named(name: str) -> str:
        if family.startswith("gemma4"):
            return name.replace("mlp.experts", "experts").replace("mlp.", "").replace("gate.", "router.proj.")
        if family.startswith("nemotron"):
            return name.replace("mlp.", "mixer.").replace("gate_up_proj", "up_proj")
        name = name if family.startswith("lfm2") else name.replace("gate.weight", "router.weight")
        return name if family.startswith("gpt-oss") else name.replace("mlp.", block)

    moved = dict(options)
    if "target_parameters" in options:
        moved["target_parameters"] = [named(name) for name in options["target_parameters"]]
    for kind in ("rank_pattern", "alpha_pattern"):
        moved[kind] = {named(name): value for name, value in options.get(kind, {}).items()}
    return moved


@pytest.mark.parametrize("family", sorted(MOE_FAMILIES))
def test_kinds_in_one_batch(family: str, workshop: Path) -> None:
    check_kinds(family, workshop, ("patterns", "shared expert, DoRA"))


@pytest.mark.parametrize("family", ["qwen2-moe", *extended(*sorted(MOE_FAMILIES.keys() - {"qwen2-moe"}))])
def test_every_kind_in_one_batch(family: str, workshop: Path) -> None:
    check_kinds(family, workshop, (*KINDS, "shared expert", "shared expert, DoRA"))


def check_kinds(family: str, workshop: Path, chosen: Container[str]) -> None:
    """chosen: of KINDS and those on a shared expert, where the family has adapters there."""
    model = make_model(workshop / family, family, seed=8, sharded=family == "qwen2-moe")
    shared = {"shared expert": SHARED, "shared expert, DoRA": {**SHARED, "use_dora": True}}
    kinds = {**KINDS, **shared} if family.startswith(("qwen2", "llama4")) else KINDS
    kinds = {name: in_block(options, family) for name, options in kinds.items() if name in chosen}
    adapters: list[Path | None] = [None]
    for number, options in enumerate(kinds.values()):
        adapters.append(make_adapter(workshop / f"{family}-{len(kinds)}-{number}", model, number, **options))
    base = BaseWeights(model)
    # How the rows of a stacked matrix lie, only the model tells.
    known = lora_modules(read_model_config(model))
    inputs = [
        LoraInput(i, *read_adapter_folder(a, base, known)) if a else None for i, a in enumerate(adapters)
    ]
    for i, (adapter, found) in enumerate(zip(adapters, mixed_logits(model, inputs), strict=True)):
        assert agree(found, reference_logits(model, adapter, tokens(20, i))), ["base", *kinds][i]


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_by_number_are_the_stacked_ones(family: str, workshop: Path) -> None:
    model = make_model(workshop / f"{family}-n", family, seed=9)
    stacked = make_adapter(workshop / f"{family}-s", model, 1, **KINDS["experts"])
    old = by_number(stacked, workshop / f"{family}-o", mixtral=family == "mixtral")
    modules = lora_modules(read_model_config(model))
    for given in (None, modules):  # known sizes, and those that the files tell
        for one, other in zip(
            read_adapter_folder(old, modules=given), read_adapter_folder(stacked, modules=given), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    if family == "qwen2-moe":
        return  # PEFT itself does not read the old form of this family
    expected = reference_logits(model, old, tokens(20, 0))
    assert agree(mixed_logits(model, [LoraInput(0, *read_adapter_folder(old))])[0], expected)
    # PEFT fuses gate and up when it reads the old form: of twice the rank, half of which is idle in either.
    again = workshop / f"{family}-again"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), old).save_pretrained(again)
    assert json.loads((again / "adapter_config.json").read_text(encoding="utf-8"))["target_parameters"]
    for one, other in zip(read_adapter_folder(old), read_adapter_folder(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "granitemoe-shared"])
def test_stacked_checkpoints_are_read(family: str, workshop: Path) -> None:
    plain, stacked = (
        make_model(workshop / f"{family}-{form}", family, seed=5, stacked=form == "stacked")
        for form in ("plain", "stacked")
    )
    for path in (plain, stacked):
        names = load_file(path / "model.safetensors")
        assert any(name.endswith(".experts.gate_up_proj") for name in names) == (path == stacked)
    [one], [other] = mixed_logits(plain, [None]), mixed_logits(stacked, [None])
    assert torch.equal(one, other)


def random_rows(model: Path, layers: range, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An adapter with every module that each layer has, ranks all different, as a request's tensors."""
    random, rows = np.random.default_rng(seed), []
    for layer in layers:
        for module in lora_modules(read_model_config(model)).values():
            if module.layers is None or layer in module.layers:
                rank = int(random.integers(1, 9))
                values = random.normal(size=module.row_elements(RowFormat(rank))) * 0.1
                rows.append(AdapterRow(module.module_id, layer, RowFormat(rank), values.astype(np.float32)))
    return pack_rows(rows)


def merged(model: Path, path: Path, weights: np.ndarray, config: np.ndarray) -> Path:
    """The model with an adapter's rows added to its weights."""
    modules, made = lora_modules(read_model_config(model)), load_file(model / "model.safetensors")
    plain = {1: "self_attn.q_proj", 2: "self_attn.k_proj", 3: "self_attn.v_proj", 4: "self_attn.o_proj",
             5: "mlp.gate_proj", 6: "mlp.down_proj", 7: "mlp.up_proj", 16: "mlp.gate",
             17: "mlp.shared_expert_gate", 19: "mlp.shared_expert.gate_proj",
             20: "mlp.shared_expert.down_proj", 21: "mlp.shared_expert.up_proj"}  # fmt: skip
    fused = {0: (1, 2, 3), 18: (7, 5), 47: (21, 19)}
    experts = {13: "gate_proj", 14: "down_proj", 15: "up_proj"}
    for row, (module_id, layer, rank, _) in zip(weights[0], config[0].tolist(), strict=True):
        module, base = modules[module_id], f"model.layers.{layer}."
        count = module.experts
        middle, end = rank * module.in_dim, rank * (module.in_dim + module.out_dim)
        a = torch.tensor(row[:middle]).view(count, rank, -1)
        b = torch.tensor(row[middle:end]).view(count, -1, rank)
        for number, delta in enumerate(b @ a):
            names = (
                [f"mlp.experts.{number}.{experts[module_id]}"]
                if module_id in experts
                else [plain[i] for i in fused.get(module_id, (module_id,))]
            )
            parts = delta.split([len(made[f"{base}{name}.weight"]) for name in names])
            for name, part in zip(names, parts, strict=True):
                made[f"{base}{name}.weight"] += part
    shutil.copytree(model, path)
    save_file(made, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("family", ["qwen2-moe-sparse", "qwen3-moe"])
def test_every_module_through_the_tensors_of_a_request(family: str, workshop: Path) -> None:
    """Requests of one engine, in chunks, with and without company: the tokens of the merged model."""
    model = make_model(workshop / f"{family}-wire", family, seed=11)
    layers = range(read_model_config(model).num_layers)
    sent = [random_rows(model, layers, seed) for seed in (1, 2)]
    write_npy(workshop / f"{family}-prefetch" / "7", *sent[1])
    cache = LoraCacheConfig(gpu_memory_bytes=2**25, prefetch_dir=workshop / f"{family}-prefetch")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=64, max_num_tokens=64, lora=cache))
    known = {row for row in MODULE_NAMES if row.startswith(("moe_", "shared_", "mlp_"))} & {
        MODULE_NAMES[i] for i in sent[0][1][0, :, 0]
    }
    assert known >= {"moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router"}
    if family == "qwen2-moe-sparse":
        assert known >= {"mlp_router", "mlp_gate_up", "shared_expert_gate", "shared_expert_4h_to_h"}
    given = [None, LoraInput(3, *sent[0]), LoraInput(7), None, LoraInput(3)]
    wholes = [merged(model, workshop / f"{family}-merged-{i}", *one) for i, one in enumerate(sent)]
    expected = generate(engine, given)
    for i, (lora, found) in enumerate(zip(given, expected, strict=True)):
        check_greedy(found, 10, wholes[lora.task_id == 7] if lora else model, None, tokens(30, i))
    alone = [generate(engine, [lora], first=i)[0] for i, lora in enumerate(given)]
    assert alone == expected
    engine.close()


def generate(engine: Engine, given: Sequence[LoraInput | None], first: int = 0) -> list[list[int]]:
    params = SamplingConfig(max_tokens=10)
    requests = (Request(tuple(tokens(30, first + i)), params, lora) for i, lora in enumerate(given))
    return answers(engine, *requests)


def test_experts_of_either_orientation(workshop: Path) -> None:
    """PEFT takes the matrices for [out, in] now, and did not in its first versions."""
    model = make_model(workshop / "turned", "llama4", seed=3)
    names = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    adapter = make_adapter(workshop / "now", model, 1, rank=3, target_parameters=names, modules=("q_proj",))
    [expected] = mixed_logits(model, [LoraInput(0, *read_from(adapter, model))])
    assert agree(expected, reference_logits(model, adapter, tokens(20, 0)))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for a in [name for name in tensors if "experts" in name and "lora_A" in name]:
        b = a.replace("lora_A", "lora_B")
        low, high = tensors[a].unflatten(0, (4, 3)), tensors[b].unflatten(1, (3, 4)).permute(2, 0, 1)
        tensors[a] = high.transpose(1, 2).flatten(0, 1).contiguous()
        tensors[b] = low.transpose(1, 2).permute(1, 2, 0).flatten(1).contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    [then] = mixed_logits(model, [LoraInput(0, *read_from(adapter, model))])
    assert agree(then, expected)


def broken(adapter: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(adapter, path)
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / "adapter_model.safetensors")
    return path


def test_broken_adapters_are_refused_with_the_reason(workshop: Path) -> None:
    model = make_model(workshop / "small", "qwen3-moe", seed=12)
    modules = lora_modules(read_model_config(model))
    stacked = make_adapter(workshop / "stacked", model, 1, rank=4, target_parameters=EXPERTS, modules=())
    old = by_number(stacked, workshop / "old", mixtral=False)
    block, a, b = "base_model.model.model.layers.0.mlp.experts", ".lora_A.weight", ".lora_B.weight"
    whole, up = f"{block}{a}", f"{block}.2.up_proj"
    changes: list[tuple[Path, dict[str, torch.Tensor | None], str]] = [
        (old, {f"{up}{a}": None}, r"experts\.2\.up_proj is missing its lora_A"),
        (old, {f"{up}{a}": torch.ones(5, 64)}, "up_proj: adapter size of A"),
        (old, {f"{up}{a}": torch.full((4, 64), torch.nan)}, "NaN"),
        (old, {f"{block}.0.gate_proj.lora_magnitude_vector": torch.ones(40)},
         "0.gate_proj: DoRA magnitudes are divided by .* --base"),
        (old, {f"{up}{a}": torch.ones(5, 64), f"{up}{b}": torch.ones(40, 5)},
         r"of expert 2 are .5, 64. and .40, 5., of expert 0 .4, 64. and"),
        (stacked, {f"{block}.base_layer{a}": None}, "missing its lora_A"),
        (stacked, {whole.replace("s.0", "s.9"): load_file(stacked / "adapter_model.safetensors")[whole],
                   whole: None},
         "layers.0.mlp.experts is missing its lora_A .* and .*layers.9.mlp.experts is missing its lora_B"),
        (stacked, {whole: torch.ones(24, 41)},
         "goes from 41 to 64 dimensions: neither gate_up_proj nor down_proj of this"),
    ]  # fmt: skip
    for number, (adapter, changed, reason) in enumerate(changes):

        def change(tensors: dict[str, torch.Tensor], changed: dict = changed) -> None:
            for key, value in changed.items():
                tensors.pop(key) if value is None else tensors.update({key: value})

        path = broken(adapter, workshop / f"broken-{number}", change)
        with pytest.raises(AdapterInvalidError, match=reason):
            read_adapter_folder(path, modules=None if "of expert 2" in reason else modules)
    wide = make_model(workshop / "wide", "qwen3-moe", seed=12, num_experts=8)
    for path in (stacked, old):
        with pytest.raises(AdapterInvalidError, match="has 6 experts, this model has 8"):
            read_adapter_folder(path, modules=lora_modules(read_model_config(wide)))


def test_adapters_on_what_granite_fuses(workshop: Path) -> None:
    """Its shared expert, also with DoRA, and its experts as transformers 5 and 4 name them; in one batch."""
    model = make_model(workshop / "granite-shared", "granitemoe-shared", seed=12)
    config = read_model_config(model)
    modules = ("q_proj", "input_linear", "output_linear")
    shared = make_adapter(workshop / "granite-s", model, 1, rank=4, modules=modules)
    dora = make_adapter(workshop / "granite-d", model, 2, rank=3, modules=modules, use_dora=True)
    stacks = [f"block_sparse_moe.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    experts = make_adapter(workshop / "granite-e", model, 3, modules=("v_proj",), target_parameters=stacks)
    older = broken(experts, workshop / "granite-4", _as_transformers_4_names_granite)
    settings = json.loads((older / "adapter_config.json").read_text())
    names = [f"block_sparse_moe.{name}.weight" for name in ("input_linear", "output_linear")]
    (older / "adapter_config.json").write_text(json.dumps({**settings, "target_parameters": names}))
    decoder = decoder_of(model)
    folders = [None, shared, dora, experts, older]
    adapters = [folder and read_from(folder, model) for folder in folders]
    found = Driver(decoder, [tokens(20)] * 5, adapters).run()
    for folder, one in zip([None, shared, dora, experts, experts], found, strict=True):
        assert agree(one, reference_logits(model, folder, tokens(20)))
    assert not any(agree(one, found[0]) for one in found[1:])
    assert torch.equal(found[3], found[4])
    short = broken(
        shared, workshop / "granite-b", lambda t: t.pop(next(k for k in t if "t_linear.lora_B" in k))
    )
    with pytest.raises(AdapterInvalidError, match="put_linear is missing its lora_B matrix"):
        read_adapter_folder(short, modules=lora_modules(config))


def _as_transformers_4_names_granite(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if ".experts." in key]:
        tensor = tensors.pop(key)
        rows = tensor.shape[0 if "lora_B" in key else 1]
        inner = (2 * 96, 96)
        name = "input_linear" if rows == (inner[0] if "lora_B" in key else 64) else "output_linear"
        tensors[key.replace("experts.base_layer", "experts").replace("experts", name)] = tensor


def test_experts_are_cut_one_by_one_for_tensor_parallel_ranks(workshop: Path) -> None:
    model = make_model(workshop / "tp", "mixtral", seed=1)
    modules = lora_modules(read_model_config(model))
    assert (modules[13].in_dim, modules[13].out_dim, modules[14].in_dim) == (64 * 4, 96 * 4, 96 * 4)
    assert (modules[16].in_dim, modules[16].out_dim) == (64, 4)
    made = make_per_expert_lora(4, 3, 64, 96, dtype=torch.float32, seed=1)
    for module_id, a, b in [(13, made["A"], made["B"]), (14, made["B"].mT, made["A"].mT)]:
        m = b[:, :, 0] + 5
        payload = np.concatenate([part.contiguous().numpy().ravel() for part in (a, b, m)])
        row = AdapterRow(module_id, 0, RowFormat(3, dora=True), payload)
        cut = slice_row(row, modules[module_id], modules[module_id].share(2), 2, 1).payload
        kept = (a, b[:, 48:], m[:, 48:]) if module_id == 13 else (a[:, :, 48:], b, m)
        np.testing.assert_array_equal(cut, np.concatenate([k.contiguous().numpy().ravel() for k in kept]))


def test_what_cannot_be_served_is_refused_by_name(workshop: Path) -> None:
    config = read_model_config(make_model(workshop / "rules", "qwen2-moe", seed=1))
    assert "shared_expert_gate" in {m.name for m in lora_modules(config, ("mlp_gate",)).values()}
    assert "shared_expert_gate_up" in {m.name for m in lora_modules(config, ("mlp_gate_up",)).values()}
    with pytest.raises(ConfigError, match="Invalid LoRA module mamba_in_proj"):
        lora_modules(config, ("mamba_in_proj",))
    with pytest.raises(ConfigError, match=r"only supports unquantized .*=W4A16\. .*\['moe_4h_to_h'\]"):
        targets_beside_quantised_experts(("attn_q", "moe_4h_to_h"), config, "W4A16")
    assert targets_beside_quantised_experts(("attn_q",), config, "W4A16") == ("attn_q",)
    assert targets_beside_quantised_experts(("moe_4h_to_h",), config, "FP8") == ("moe_4h_to_h",)
    rest = targets_beside_quantised_experts((), config, None)
    assert "moe_router" in rest and not {"moe_gate", "moe_h_to_4h", "moe_4h_to_h"} & set(rest)


def test_a_cache_too_small_for_experts_serves_the_other_modules(
    workshop: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_model_config(make_model(workshop / "tight", "mixtral", seed=1))
    least = {"max_adapter_size": 64, "gpu_memory_bytes": 2**19, "host_memory_bytes": 2**19}

    def opened(*targets: str) -> AdapterStore:
        cache = LoraCacheConfig(target_modules=targets, **least)  # type: ignore[arg-type]
        return AdapterStore(config, cache, torch.device("cpu"), torch.float32, 2**30)

    module = lora_modules(config)[13]
    row = AdapterRow(13, 0, RowFormat(1), np.ones(module.row_elements(RowFormat(1)), np.float32))
    with pytest.raises(AdapterInvalidError, match="moe_h_to_4h not enabled"):
        opened().prepare(LoraInput(1, *pack_rows([row])))
    assert "adapters on routed experts are off: Not enough space" in caplog.text
    with pytest.raises(ConfigError, match="or name fewer lora_target_modules"):
        opened("attn_q", "moe_h_to_4h", "moe_4h_to_h")

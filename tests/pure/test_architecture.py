"""Protects the shape of the house: imports point one way, heavy and foreign modules stay in their rooms."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "manylora"

# Lower levels first; inside a level, earlier names may be imported by later ones.
ORDER = [
    ["errors", "request", "stats", "system"],
    ["kernels"],
    ["quant", "gguf", "config"],
    ["wire", "text"],
    ["lora"],
    ["model"],
    ["parallel", "group"],
    ["engine"],
    ["launcher", "testing", "llmapi", "bench", "openai", "fleet", "contracts", "commands", "cli"],
    ["lora_helper", "lora_manager", "executor", "sampling_params", "models", "quantization", "_torch"],
]
RANK = {name: (level, place) for level, names in enumerate(ORDER) for place, name in enumerate(names)}
# The same inside a package, one list each.
INSIDE = {
    "request": ["rules", "sampling", "adapter", "request", "event"],
    "system": [
        "cgroup", "threads", "allocator", "text_threads", "processor", "folders", "compiler", "lifeline",
        "progress", "own_clock", "command_line",
    ],
    "kernels": [
        "activations", "quantised", "huge_pages", "panels", "integer", "products", "extras", "row_format",
        "recurrent", "delta_rule", "short_conv", "mamba2", "spec", "experts", "transfer", "decode_step",
        "attention", "lora", "reference", "native", "loading", "cpu", "compiled", "cuda", "device",
    ],
    "quant": ["config", "checkpoint", "layouts", "mxfp4", "bitsandbytes", "checkpoint_weights"],
    "gguf": [
        "container", "parts", "cache", "names", "metadata", "fields", "architectures", "config",
        "pre_tokenizers", "tokenizer", "folder", "blocks", "sources", "file",
    ],
    "config": [
        "blocks", "values", "pooling", "engine", "model", "build_record", "hub", "model_folder", "resolve",
    ],
    "wire": [
        "parameters", "tensor_table", "server_types", "sending", "utf8", "word_lists", "client_errors",
        "client_disconnects", "shape_guard", "lock_guard", "request_guard", "text_worker", "metrics", "bls",
        "bls_generator", "bls_worker", "server_calls", "decode", "encode", "engine_worker", "engine_client",
    ],
    "text": [
        "json_schema", "tool_text", "chat_template", "stream", "limits", "tokenizer", "item_text",
        "preprocessing", "postprocessing",
    ],
    "lora": [
        "pages", "space", "shared", "module_sizes", "modules", "expert_rules", "geometry", "bounds",
        "number_types", "tensors",
        "file_adapter", "staging", "effect", "extras", "rules", "slicing", "formats", "cache", "pool",
        "library", "text",
        "loaded", "lease", "arrivals", "loader", "cache_view", "pins", "store_parts", "waiting", "store",
        "convert",
        "convert_nemo", "normalize",
        "report", "moe_layout",
    ],
    "lora.library": [
        "names", "aliases", "fingerprint", "roots", "reader", "memory", "disk", "versions", "library",
    ],
    "lora.text": ["generation_defaults", "tokenizers", "adapter_text", "current", "repository"],
    "model": [
        "families", "safetensors_file", "checkpoint", "plan_parts", "plan_layers", "plan", "batch",
        "chunks", "kv_tensors", "rope",
        "extras", "heads", "dense", "attend", "layers", "shared_kv", "layer_inputs", "altup", "latent",
        "routing", "moe", "delta_rule", "short_conv", "mamba2", "decoder_parts", "transformer",
        "decoder_layers", "decoder",
        "encoder_decoder", "encoder", "quant", "effective_weights", "weights", "builder",
    ],
    "parallel": [
        "mapping", "rank_model", "collectives", "weights", "stages", "adapters", "experts", "layers",
        "recurrent", "vectors", "decoder", "encoders", "build",
    ],
    "group": ["channel", "place", "agreement", "rendezvous", "watch", "leader", "collectives"],
    "engine": [
        "ngram", "speculation",
        "token_counts", "top_p", "sequence_parts", "sequence", "sequence_events", "penalties", "state_pool",
        "kv_cache", "decode_run", "shared_prompts", "scheduler",
        "version_swaps",
        "memory", "guide_trial", "guide", "beam",
        "sampler", "launched", "inputs", "pooler", "step_messages", "peak", "graphs", "kernel_trials",
        "input_maker", "runner", "checks",
        "build", "follower", "repository_rank", "results", "sequence_maker", "engine", "preparation",
        "loop",
    ],
    "launcher": [
        "roles", "state", "logs", "processes", "management_access", "http_checks", "places", "http_proxy",
        "probes", "installation", "templates", "repository", "new_repository", "supervisor",
        "command_service", "server_command", "server", "triton_service", "follower_service", "arguments",
        "cli",
    ],
    "testing": ["tiny_configs", "tiny_models", "driver", "parity"],
    "llmapi": [
        "lora", "llm_args", "guided", "sampling", "outputs", "result", "decoding", "continuation",
        "adapters", "prompts", "generation", "named_adapters", "options", "engine_config", "service",
        "pooled_outputs", "pooled", "model_defaults", "chat", "llm",
    ],
    "bench": [
        "datasets", "load", "options", "report", "memory_traffic",
        "report_text", "plots", "local", "remote", "triton_endpoint", "openai_endpoint", "system", "run",
    ],
    "openai": [
        "api", "serving", "page", "other_flags", "options", "arguments", "other_routes",
        "adapter_routes", "app", "server",
    ],
    "openai.api": [
        "errors", "fields", "parsing", "schema", "adapter_choice",
        "tools", "guides", "params",
        "logprobs", "pooled_request", "responses_request", "ollama_request", "run_request", "openapi",
    ],
    "openai.serving": [
        "logs", "connections", "host_check", "protocol", "waits", "generation",
        "adapter_entry", "adapter_record", "root_scan", "catalog", "fairness", "history",
        "backend", "pinning", "shared_adapters", "keys", "responses",
        "transport", "prompts", "running_calls", "pooled_state", "inference",
        "pooled_api", "truncation", "recent_items",
        "responses_api", "run_api", "metrics", "models", "ollama_api",
        "uploads", "in_process", "triton",
    ],
    "openai.page": ["page", "cache_status"],
    "fleet": [
        "routing", "requested_adapter", "options", "remote_http", "member", "change_response", "router",
        "broadcast", "merged_exports", "relay", "changes", "front", "application", "cleaner", "local",
    ],
    "contracts": [
        "tensors", "prompts", "vllm_sampling", "vllm_embedding", "vllm_metrics", "vllm_model", "llmapi_model",
    ],
}  # fmt: skip
NO_TORCH = [
    "errors", "request", "stats", "system.lifeline", "system.threads", "system.text_threads",
    "system.processor", "system.folders", "system.compiler", "system.progress", "system.own_clock",
    "quant.config", "quant.checkpoint", "gguf.container",
    "gguf.config", "gguf.tokenizer", "gguf.folder", "config",
    "wire", "text", "launcher", "lora.pages", "lora.module_sizes", "lora.modules", "lora.geometry",
    "lora.bounds",
    "lora.number_types", "lora.tensors", "lora.staging", "lora.extras", "lora.rules", "lora.slicing",
    "lora.cache", "lora.text", "cli", "engine.sequence_parts", "engine.sequence",
    "engine.sequence_events", "engine.guide", "engine.guide_trial",
    "engine.kv_cache", "engine.ngram", "engine.speculation",
    "engine.decode_run", "engine.scheduler", "kernels.row_format", "kernels.cuda.plan", "parallel.mapping",
    "parallel.rank_model", "llmapi", "bench", "openai", "fleet", "contracts",
    "lora_helper", "lora_manager", "executor", "sampling_params", "models", "quantization",
]  # fmt: skip
CUDA_ROOMS = ("kernels.device", "kernels.cuda")


@cache
def modules() -> list[str]:
    return sorted(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__init__.py"
    )


@cache
def tree(module: str) -> ast.Module:
    path = PACKAGE / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


@cache
def imports(module: str) -> set[str]:
    """Names imported at module level, those only for type checkers left out."""
    found: set[str] = set()
    for node in tree(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    return {name.removeprefix("manylora.") for name in names if name.startswith("manylora.")}


def in_room(module: str, rooms: list[str] | tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def test_every_module_has_a_place_and_imports_only_from_below() -> None:
    wrong = []
    for module in modules():
        room = module.split(".")[0]
        assert room in RANK, f"{room} has no level in ORDER"
        for target in own(imports(module)):
            other = target.split(".")[0]
            if other != room and not RANK[other] < RANK[room]:
                wrong.append(f"{module} imports {target} from above")
    assert not wrong


def test_inside_a_package_imports_follow_the_order_written() -> None:
    wrong = []
    for package, order in INSIDE.items():
        for module in modules():
            if not module.startswith(package + "."):
                continue
            place = module.removeprefix(package + ".").split(".")[0]
            assert place in order, f"{module} has no place in INSIDE[{package!r}]"
            for target in own(imports(module)):
                other = target.removeprefix(package + ".").split(".")[0]
                inside = target.startswith(package + ".") and other in order and other != place
                if inside and not order.index(other) < order.index(place):
                    wrong.append(f"{module} imports {target}")
    assert not wrong


def test_torch_stays_out() -> None:
    wrong = []
    for module in filter(lambda module: in_room(module, NO_TORCH), modules()):
        for node in ast.walk(tree(module)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            if any(name.split(".")[0] == "torch" for name in names):
                wrong.append(f"{module} imports torch")
    assert not wrong


def test_cuda_is_named_only_where_devices_are() -> None:
    wrong = []
    for module in modules():
        for node in [] if in_room(module, CUDA_ROOMS) else ast.walk(tree(module)):
            if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch":
                wrong.append(f"{module} names torch.cuda")
    assert not wrong


def test_the_server_module_is_imported_only_by_the_model_repository() -> None:
    skipped = {".venv", "build", ".git"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in skipped]
    users = {
        folder.name
        for folder in folders
        for path in folder.rglob("*.py")
        if re.search(r"^\s*(import|from) triton_python_backend_utils", path.read_text(), re.MULTILINE)
    }
    assert users <= {"model_repo", "tests"}  # tests: the stand-in for a model of NVIDIA's


def test_names_with_an_underscore_stay_in_their_package() -> None:
    wrong = []
    for module in modules():
        package = module.rpartition(".")[0]
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("manylora"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                near = node.module.removeprefix("manylora.").rpartition(".")[0] == package
                if private and not near:
                    wrong.append(f"{module} imports {private[0]} of {node.module}")
    assert not wrong

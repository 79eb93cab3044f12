"""Protects the shape of the house: imports point one way, heavy and foreign modules stay in their rooms."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "manylora"

# Lower levels first; inside a level, earlier names may be imported by later ones.
ORDER = [
    ["errors", "version", "trtllm_paths", "request", "stats", "system"],
    ["kernels"],
    ["checkpoints", "config"],
    ["generation"],
    ["adapters"],
    ["model"],
    ["ranks"],
    ["engine"],
    ["doors", "cli"],
]
RANK = {name: (level, place) for level, names in enumerate(ORDER) for place, name in enumerate(names)}
NO_TORCH = [
    "errors", "request", "stats", "system.lifeline", "system.threads", "system.threads",
    "system.compiler", "system.folders", "system.command_line", "system.lifeline",
    "system.connections", "checkpoints.quant.config",
    "checkpoints.gguf.container", "checkpoints.gguf.config", "checkpoints.gguf.tokenizer",
    "config", "generation", "adapters.pages",
    "adapters.modules", "adapters.geometry", "adapters.bounds", "adapters.number_types", "adapters.tensors",
    "adapters.staging", "adapters.extras", "adapters.rules", "adapters.slicing", "adapters.cache.cache",
    "adapters.catalog", "cli", "engine.sequence", "engine.guide",
    "engine.kv_cache", "engine.speculation", "engine.scheduler", "kernels.row_format", "kernels.cuda.plan",
    "ranks.mapping", "doors.python", "doors.http", "doors.fleet", "doors.triton",
    "trtllm_paths",
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
def imports(module: str, *, typing: bool = False) -> set[str]:
    """Names imported at module level. typing: also those only for type checkers."""
    found: set[str] = set()
    nodes = tree(module).body
    for node in nodes:
        if typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes = [*nodes, *node.body]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    return {name.removeprefix("manylora.") for name in names if name.startswith("manylora.")}


def below(package: str, module: str) -> str:
    """The part of a module's name that follows the package's."""
    return module.removeprefix(package + ".").split(".")[0]


def in_room(module: str, rooms: list[str] | tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def test_every_module_has_a_level_and_imports_only_from_below() -> None:
    wrong = []
    for module in modules():
        room = module.split(".")[0]
        if room not in RANK:
            wrong.append(f"{room} has no level in ORDER")
            continue
        for target in own(imports(module)):
            other = target.split(".")[0]
            if other != room and not RANK[other] < RANK[room]:
                wrong.append(f"{module} imports {target} from above")
    assert not wrong


def test_inside_a_package_imports_make_no_circle() -> None:
    """Neither do those for type checkers. A package inside a package counts as one module."""
    wrong = []
    for package in {module.rpartition(".")[0] for module in modules()} - {""}:
        graph: dict[str, set[str]] = defaultdict(set)
        for module in modules():
            for target in own(imports(module, typing=True)):
                if module.startswith(package + ".") and target.startswith(package + "."):
                    graph[below(package, module)].add(below(package, target))
        try:
            TopologicalSorter({name: found - {name} for name, found in graph.items()}).prepare()
        except CycleError as error:
            wrong.append(f"{package}: {' -> '.join(error.args[1])}")
    assert not wrong


def test_torch_stays_out() -> None:
    wrong = [
        f"{name} is no module" for name in NO_TORCH if not any(in_room(one, [name]) for one in modules())
    ]
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
                private = [a.name for a in node.names if a.name.startswith("_") and a.name != "__version__"]
                near = node.module.removeprefix("manylora.").rpartition(".")[0] == package
                if private and not near:
                    wrong.append(f"{module} imports {private[0]} of {node.module}")
    assert not wrong

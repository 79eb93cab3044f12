"""Prints the size of the project beside its budgets, which stand in pyproject.toml. Exits with 1 above one.

Lines are all lines of Python files (of C files for `src, C`). Links to folders are not followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings the same under this name
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "manylora"


def main() -> int:
    plan = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["manylora"]["budgets"]
    sizes = measure({name: budget["of"] for name, budget in plan.items() if "of" in budget})
    print(f"{'':14}{'now':>8}{'most':>8}{'goal':>8}")
    above = False
    for name, size in sizes.items():
        most, goal = plan[name]["most"], plan[name]["goal"]
        above = above or size > most
        print(f"{name:14}{size:8,}{most:8,}{goal:8,}{'  too much' if size > most else ''}")
    if above:
        print("make it smaller, or raise the budget in a commit of its own that says why", file=sys.stderr)
    return int(above)


def measure(parts: dict[str, list[str]]) -> dict[str, int]:
    """parts: packages and modules of manylora, as paths without .py, by the name of their budget. Raises
    SystemExit if there are others."""
    listed = {name for names in parts.values() for name in names}
    sizes: dict[str, int] = {}
    for path in files(PACKAGE, ".py"):
        module = path.relative_to(PACKAGE).with_suffix("")
        above = [str(folder) for folder in (module, *module.parents) if str(folder) in listed]
        name = above[0] if above else str(module)
        sizes[name] = sizes.get(name, 0) + lines(path)
    if odd := sizes.keys() ^ listed:
        names = ", ".join(sorted(odd))
        raise SystemExit(f"pyproject.toml: tool.manylora.budgets must list {names}, and only what exists")
    pages = list(files(ROOT / "docs", ".md"))
    return {
        **{name: sum(sizes[one] for one in names) for name, names in parts.items()},
        "src": sum(sizes.values()),
        "src, files": sum(1 for _ in files(PACKAGE, ".py")),
        "src, C": sum(lines(path) for end in (".c", ".h") for path in files(PACKAGE, end)),
        "benchmarks": sum(map(lines, files(ROOT / "benchmarks", ".py"))),
        "tests": sum(map(lines, files(ROOT / "tests", ".py"))),
        "docs, pages": len(pages),
        "docs, kB": round(sum(path.stat().st_size for path in pages) / 1000),
    }


def files(folder: Path, end: str) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names if name.endswith(end))


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


if __name__ == "__main__":
    sys.exit(main())

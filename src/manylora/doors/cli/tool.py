"""manylora tool NAME …: runs the scripts of tools/ and client/ by the names that TensorRT-LLM users know."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

from manylora.doors.triton.launcher.templates import FOLDER as TEMPLATES

FOLDERS = [Path(__file__).parents[2] / name for name in ("tools", "client")]


def main(given: list[str]) -> int:
    scripts = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}
    if not given or given[0] in ("-h", "--help"):
        print(_usage(scripts))
        return 0 if given else 2
    path = scripts.get(given[0].removesuffix(".py"))
    if path is None:
        print(f"manylora tool: there is no script {given[0]!r}\n{_usage(scripts)}", file=sys.stderr)
        return 2
    sys.argv = [f"manylora tool {path.stem}", *given[1:]]
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ImportError as error:
        print(
            f"manylora tool {path.stem} needs {error.name}: pip install 'manylora[server]'", file=sys.stderr
        )
        return 1
    return 0


def _usage(scripts: dict[str, Path]) -> str:
    lines = ["usage: manylora tool NAME [options]", ""]
    for name, path in scripts.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(text.partition("\n\n")[0].split())
        lines.append(f"  {name:<29}{re.split(r'(?<=[.]) |: ', first)[0]}")
    return "\n".join([*lines, "", f"the templates are in {TEMPLATES}"])

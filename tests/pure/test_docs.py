"""Protects the documents: links lead somewhere, and commands, flags and parameters that they show exist."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from manylora import cli
from manylora.config.foreign import FLEET, SERVE, SERVE_SWITCHES
from manylora.doors.triton.launcher.cli import main as launch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
LINK = re.compile(r'\]\(([^()\s]+)\)|<img src="([^"]+)"')
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"--[a-z][a-z0-9_-]*")
MAKE = re.compile(r"(?:`|^)make ([a-z][a-z-]*)", re.MULTILINE)
METRIC = r"(?:manylora|nv_trt_llm|nv_llm)_\w+|vllm:\w+"
VARIABLE_METRIC = re.compile(rf"`({METRIC})`")
VARIABLE = re.compile(r"`(\w+)`")
LAUNCHER = "launch_triton_server.py"
DATASET = ["prepare-dataset --help", "prepare-dataset --tokenizer x token-norm-dist --help"]
SECTION_OF_COMMAND = {
    "serve": ("openai_server.md", "# The OpenAI server"),
    "build": ("models.md", "## manylora build"),
    "bench": ("benchmarks.md", "## manylora bench"),
    "fleet": ("deploy.md", "## A fleet"),
}
ELSEWHERE = ("migration.md",)  # names files of upstream
TABLES = SERVE, SERVE_SWITCHES, FLEET
FOREIGN = {
    "--data-binary", "--max_input_len", "--to", "--lora_dir", "--rounds", "--world_size",
    "--model_repo", "--lora-root", "--http_port",
    "--url", "--endpoint-type", "--extra-inputs", "--model",
    # aiperf and guidellm, on the page of `bench`
    "--constraint", "--data", "--isl", "--model-selection-strategy", "--osl", "--profile", "--request-count",
    "--request-rate", "--served-model-name",
    # Taken or refused by `serve` or `fleet`, and not in their help.
    *(f"--{name.replace('_', '-')}" for table in TABLES for name in table),
}  # fmt: skip
"""Flags of other programs that the sections of SECTION_OF_COMMAND name."""


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for page in PAGES:
        for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
            target = match[1] or match[2]
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            path, _, heading = target.partition("#")
            file = page.parent / path if path else page
            is_there = file.exists() and (not heading or file.suffix != ".md" or heading in headings(file))
            wrong += [] if is_there else [f"{page.name} links to {target}, which is not there"]
    assert not wrong


def test_the_modules_that_pages_name_exist() -> None:
    below = [path for folder in ("src", "tests", "tools", "client") for path in (ROOT / folder).rglob("*")]
    folders = [
        ROOT,
        ROOT / "src",
        ROOT / "tools",
        ROOT / "client",
        *(path for path in below if path.is_dir()),
    ]
    wrong = []
    for page in (page for page in PAGES if page.name not in ELSEWHERE):
        for path in set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text(encoding="utf-8"))):
            known = "NAME" in path or any((folder / path).exists() for folder in (*folders, page.parent))
            wrong += [] if known else [f"{page.name} names {path}, which is not there"]
    assert not wrong


def test_lines_of_prose_are_at_most_140_characters() -> None:
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
        long = [line for line in prose if len(line) > 140 and not line.startswith("|")]
        assert long == [], page.name


def test_the_index_has_every_page_of_the_docs() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {match[1] for match in LINK.finditer(index.read_text(encoding="utf-8"))}
    assert {page.name for page in ROOT.glob("docs/*.md")} - {index.name} <= linked
    assert "](docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_make_targets_of_the_documents_exist() -> None:
    targets = set(
        re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = {target for page in PAGES for target in MAKE.findall(page.read_text(encoding="utf-8"))}
    assert {"demo", "test", "check"} <= named
    assert named <= targets


def test_the_flags_of_our_commands_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command, flags in commands(text):
            unknown = flags - flags_of(command)
            assert not unknown, f"{page.name}: {command} has no {sorted(unknown)}"
    for command, (name, heading) in SECTION_OF_COMMAND.items():
        unknown = set(FLAG.findall(section(ROOT / "docs" / name, heading))) - flags_of(command) - FOREIGN
        assert not unknown, f"{name}, {heading}: {command} has no {sorted(unknown)}"


def test_the_parameters_in_tables_are_template_variables() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    tables = text.partition("## What one request may ask for")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE) for name in VARIABLE.findall(row)
    }
    templates = [path.read_text(encoding="utf-8") for path in ROOT.glob("model_repo/*/config.pbtxt")]
    known = {name for template in templates for name in re.findall(r"\$\{(\w+)\}", template)}
    assert "lora_prefetch_dir" in named
    assert named <= known | {"text_input", "decoder_text_input"}  # inputs, in the table of limits


def test_every_metric_has_its_row() -> None:
    """A metric's name is a string of the code, wherever its table is."""
    text = section(ROOT / "docs" / "triton_server.md", "## Metrics") + section(
        ROOT / "docs" / "deploy.md", "### Metrics and the page"
    )
    named = set(VARIABLE_METRIC.findall(text))
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    exported = set(re.findall(rf'"({METRIC})"', code))
    assert "manylora_adapter_requests_total" in exported
    assert exported == named


def test_the_table_of_layers_is_the_order_that_is_tested() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| (.*?) \|", section, re.MULTILINE)
    tests = (ROOT / "tests" / "pure" / "test_architecture.py").read_text(encoding="utf-8")
    order = ast.literal_eval(tests.partition("\nORDER = ")[2].partition("\nRANK")[0])
    assert [VARIABLE.findall(row) for row in rows] == order


def section(page: Path, heading: str) -> str:
    """From this heading to the next one of its level."""
    level = heading.partition(" ")[0]
    _, found, text = page.read_text(encoding="utf-8").partition(f"{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^{level} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def commands(text: str) -> list[tuple[str, set[str]]]:
    """Lines of code and code spans that call one of our commands, with the flags that they give it."""
    blocks = FENCE.findall(text)
    lines = re.sub(r"\\\n\s*", " ", "\n".join(blocks)).splitlines()
    code = lines + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in code:
        calls = re.split(r"(?:^|[\s/])(manylora [a-z-]+|" + re.escape(LAUNCHER) + r")(?=\s|$)", line)
        for called, rest in zip(calls[1::2], calls[2::2], strict=True):
            name = called.removeprefix("manylora ")
            if name in cli.COMMANDS or name == LAUNCHER:
                found.append((name, set(FLAG.findall(re.split(r" #|[;|] ", rest)[0]))))
    return found


@cache
def flags_of(command: str) -> set[str]:
    calls = {
        LAUNCHER: ["--help"],
        "bench": ["bench --model x throughput --help", "bench --help", *DATASET],
        "prepare-dataset": DATASET,
        "tool": [f"tool {name} --help" for name in ("fill_template", "hf_lora_convert")],
    }.get(command, [f"{command} --help"])
    main = launch if command == LAUNCHER else cli.main
    found: set[str] = set()
    for call in calls:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
            main(shlex.split(call))
        found |= set(FLAG.findall(output.getvalue()))
    if command == "tool":  # other parsers
        return found
    spelt = [(flag[2:].replace("-", "_"), flag[2:].replace("_", "-")) for flag in found]
    return {f"--{name}" for names in spelt for name in names}

"""Markdown tables of the results."""

from __future__ import annotations

from collections.abc import Iterable

from peers.rows import Found, Row

NAMES = {
    "openvino": "OpenVINO",
    "vllm": "vLLM",
    "llama.cpp": "llama.cpp",
}
WHOLE = {
    "base": "base model",
    "resident": "base model, 32 adapters loaded",
    "zipf-32": "32 adapters, rank 16, by popularity",
    "mixed-32": "32 adapters, ranks 4 to 64 on all layers",
}
CASES = {"r8qkv": "rank 8 on q, k, v", "r16all": "rank 16 on all layers"}
GIB = 2**30


def case_words(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    kind, _, count = name.partition("-")
    return f"{count} adapter{'' if count == '1' else 's'}, {CASES[kind]}"


def figures(found: Found) -> str:
    """One table per model, dtype, peer and length of prompts."""
    parts = []
    tables: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in found.rows:
        tables.setdefault((row.model, row.dtype, row.peer, row.prompt), []).append(row)
    for (model, dtype, peer, prompt), rows in tables.items():
        name = NAMES[peer]
        head = ["case", "at once", "ours, tokens/s", name, "ratio (all pairs)", "first token, ms: ours", name,
                "ratio", "memory, GiB: ours", name, "same first token"]  # fmt: skip
        lines = [line(head), line(["---"] * len(head)), *(line(_cells(row)) for row in rows)]
        title = f"**{model}, {dtype}, prompts of {prompt} tokens, compared with {name}**"
        parts.append(f"{title}\n\n" + "\n".join(lines))
    notes = []
    if any(row.busy for row in found.rows):
        notes.append("\\* Unreliable: other processes used more than a quarter of a CPU during this row.")
    if own := _own(found.good()):
        notes.append(own)
    return "\n\n".join([*parts, *notes])


def _cells(row: Row) -> list[str]:
    head = [case_words(row.case), str(row.at_once)]
    if row.error is not None:
        return [*head, row.error, *[""] * 8]
    pairs = [theirs / ours for ours, theirs in zip(row.ours_s, row.peer_s, strict=True)]
    return [
        *head, f"{row.rate('ours'):.0f}", f"{row.rate('peer'):.0f}",
        f"{row.ratio():.2f}{'*' * row.busy} ({min(pairs):.2f}–{max(pairs):.2f})",
        f"{1000 * row.first('ours'):.0f}", f"{1000 * row.first('peer'):.0f}", f"{row.first_ratio():.2f}",
        f"{row.ours_bytes['all'] / GIB:.2f}", f"{row.peer_bytes['all'] / GIB:.2f}", f"{row.same_first:.0%}",
    ]  # fmt: skip


def _own(rows: Iterable[Row]) -> str:
    """A note with each engine's highest memory without mapped files."""
    most: dict[str, int] = {}
    for row in rows:
        for name, sizes in (("ours", row.ours_bytes), (NAMES[row.peer], row.peer_bytes)):
            most[name] = max(most.get(name, 0), sizes["own"])
    words = ", ".join(f"{name} {size / GIB:.2f}" for name, size in most.items())
    return (
        f"Memory is all resident memory. Without pages of mapped files it is at most: {words} GiB."
        if most
        else ""
    )


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"

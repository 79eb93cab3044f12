"""Markdown tables of the results: figures, first uses of adapters, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peers.rows import Found, Row

NAMES = {
    "openvino": "OpenVINO",
    "vllm": "vLLM",
    "transformers": "transformers + PEFT",
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


@dataclass(frozen=True)
class Target:
    """A target for a ratio. value: computes it from a row, None if the row does not have it. at: the
    concurrencies that count. more: whether more is better."""

    words: str
    wanted: float
    case: str
    value: Callable[[Row], float | None]
    at: tuple[int, ...]
    more: bool = True


def _of_limit(row: Row) -> float | None:
    return row.rate("ours") / row.limit if row.limit else None


def _of_bandwidth(row: Row) -> float | None:
    """The reached share of the read bandwidth. Valid for one sequence, where bytes limit a step."""
    return row.step_limit / row.step() if row.step_limit else None


ALL_OF_THEM = (1, 4, 16, 32)
TARGETS = (
    Target("base model: speed / the best peer's", 1.10, "base", lambda row: row.ratio(), ALL_OF_THEM),
    Target("base model: time to first token / the best peer's", 0.95, "base",
           lambda row: row.first_ratio(), ALL_OF_THEM, more=False),
    Target("8 adapters of rank 8 on q, k, v: speed / the best peer's", 2, "r8qkv-8",
           lambda row: row.ratio(), (16, 32)),
    Target("32 adapters of rank 16 on all layers: speed / the best peer's", 6, "r16all-32",
           lambda row: row.ratio(), (32,)),
    Target("memory in all cases / the best peer's", 0.5, "", lambda row: row.memory_ratio(), ALL_OF_THEM,
           more=False),
    Target("base model: share of the machine's limit", 0.70, "base", _of_limit, (16,)),
    Target("base model: share of the read bandwidth, one request", 0.85, "base", _of_bandwidth, (1,)),
)  # fmt: skip


def figures(found: Found) -> str:
    """One table per model, dtype, peer and length of prompts."""
    parts = []
    tables: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in found.rows:
        tables.setdefault((row.model, row.dtype, row.peer, row.prompt), []).append(row)
    for (model, dtype, peer, prompt), rows in tables.items():
        name = NAMES[peer]
        flows = any(row.flow for row in rows)
        head = ["case", "at once", "ours, tokens/s", name, "ratio (all pairs)", "first token, ms: ours", name,
                "ratio", "memory, GiB: ours", name, "same first token"]  # fmt: skip
        lines = [line(head + ["ours in flight"] * flows), line(["---"] * (len(head) + flows))]
        lines += [line(_cells(row) + [f"{row.flow:.0f}" if row.flow else "–"] * flows) for row in rows]
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


def first_use(found: Found) -> str:
    if not found.first_use:
        return ""
    head = [
        "adapter",
        "model",
        "no adapter, ms: ours",
        "peer",
        "never used: ours",
        "peer",
        "again: ours",
        "peer",
    ]
    lines = [line(head), line(["---"] * len(head))]
    for use in found.first_use:
        cells = [CASES[use.adapters], f"{use.model}, {use.dtype}, {NAMES[use.peer]}"]
        for kind in ("none", "first use", "warm"):
            cells += [f"{1000 * statistics.median(times[kind]):.0f}" for times in (use.ours_s, use.peer_s)]
        lines.append(line(cells))
    return "\n".join(lines)


def targets(found: Found) -> str:
    """One table per model and dtype: each target's worst value among the peers, and whether it is met, for
    prompts of the usual length.
    """
    parts = []
    good = [row for row in found.good() if row.prompt == Row.prompt]
    for model, dtype in dict.fromkeys((row.model, row.dtype) for row in good):
        rows = [row for row in good if (row.model, row.dtype) == (model, dtype)]
        head = ["target", "wanted", *(f"at {n}" for n in ALL_OF_THEM), "met"]
        lines = [line(head), line(["---"] * len(head))]
        lines += [line(_judged(target, rows)) for target in TARGETS]
        parts.append(f"**Targets: {model}, {dtype}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _judged(target: Target, rows: list[Row]) -> list[str]:
    """The cells of a target. If several rows have a value, the worst one counts."""
    values: dict[int, tuple[float, bool]] = {}
    for n in ALL_OF_THEM:
        some = [row for row in rows if row.at_once == n and row.case.startswith(target.case)]
        known = [(value, row.busy) for row in some if (value := target.value(row)) is not None]
        if known:
            values[n] = min(known) if target.more else max(known)
    judged = [n for n in target.at if n in values]
    sign = 1 if target.more else -1
    bad = [n for n in judged if sign * values[n][0] < sign * target.wanted]
    missing = [n for n in target.at if n not in values]
    words = [f"not at {_join(bad)}"] if bad else ["yes"] if judged else []
    words += [f"at {_join(missing)} not measured"] if missing else []
    shown = [f"{values[n][0]:.2f}{'*' * values[n][1]}" if n in values else "–" for n in ALL_OF_THEM]
    return [target.words, f"{'≥' if target.more else '≤'} {target.wanted:g}", *shown, "; ".join(words)]


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"

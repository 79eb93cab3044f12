#!/usr/bin/env python3
"""manylora and the engines one would pick instead, on the same random models and adapters.

The physics is that of benchmarks/engine.py and the same for all: an engine that reads every weight and every
adapter once in a step, and adds nothing, is at the limit. On a machine that others use as well, only ratios
taken close together mean something: each engine is measured against manylora, the two in turn, each in a
process of its own that is idle while the other runs, and the ratio is the median of the pairs.

    peers.py                                                          # whoever this Python can import
    peers.py --python openvino=/venvs/ov/bin/python --python vllm=/venvs/vllm/bin/python --models small,mid

Load: 32 requests of 64 tokens in and 64 out, greedy, never ending early, 16 at a time, in one offline call;
time to first token is that of one request to an idle engine. r8qkv: rank 8 on q, k, v; r16all: rank 16 on all
linear layers; then the number of distinct adapters, asked for in turn. The first tokens of both engines'
answers are compared: where far fewer than all agree, an adapter was not applied, or rounding decided between
near equals. Memory is what is resident after the case. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loads import ALL, AT_ONCE, MODELS, OUTPUT, QKV, REQUESTS, Case, prompts, save_adapter, save_model
from peers.process import Worker, WorkerError
from peers.worker import Setup

HERE = Path(__file__).parent

US = "manylora"
MODULES = {
    US: "manylora", "transformers": "peft", "vllm": "vllm", "openvino": "openvino_genai",
    "llama.cpp": "sentencepiece",
}  # fmt: skip
SCRIPTS = {
    US: "with_manylora.py",
    "transformers": "with_peft.py",
    "vllm": "with_vllm.py",
    "openvino": "with_openvino.py",
    "llama.cpp": "with_llamacpp.py",
}
PROMPT, SINGLES = 64, 4
SETS: dict[str, tuple[int, tuple[str, ...]]] = {"base": (0, ()), "r8qkv": (8, QKV), "r16all": (16, ALL)}
CASES = [
    Case("base"),
    *(Case(f"r8qkv-{n}", (8,), QKV, n) for n in (1, 8, 32)),
    *(Case(f"r16all-{n}", (16,), ALL, n) for n in (1, 8, 32)),
]


@dataclass
class Row:
    """Of one case: seconds of each round, resident bytes, share of requests with our first token."""

    model: str
    case: str
    peer: str
    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    ours_bytes: int = 0
    peer_bytes: int = 0
    same_first: float = 0.0
    error: str | None = None

    def ratio(self) -> float:
        """Our speed by theirs."""
        return statistics.median(b / a for a, b in zip(self.ours_s, self.peer_s, strict=True))


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the workers are, too
    rows: list[Row] = []
    first: list[dict[str, Any]] = []
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        pythons = _available(options)
        for model in options.models:
            for peer in pythons:
                if peer != US:
                    _compare(model, peer, pythons, folder, options, rows, first, versions)
    _print_table(rows, first)
    print(json.dumps({
        "dtype": options.dtype, "rounds": options.rounds, "threads": _threads(), "versions": versions,
        "rows": [asdict(row) for row in rows], "first_token": first,
    }))  # fmt: skip


def _compare(
    model: str,
    peer: str,
    pythons: dict[str, str],
    folder: Path,
    options: argparse.Namespace,
    rows: list[Row],
    first: list[dict[str, Any]],
    versions: dict[str, dict[str, str]],
) -> None:
    """One peer and us over all cases, a pair of fresh processes for each set of adapters."""
    for name in SETS:
        cases = [case for case in CASES if case.name in options.cases and case.name.split("-")[0] == name]
        if not cases:
            continue
        setup = _setup(model, name, max(case.adapters for case in cases), options.dtype, folder)
        try:
            with (
                _start(US, pythons, setup, folder, options) as ours,
                _start(peer, pythons, setup, folder, options) as theirs,
            ):
                versions |= {US: ours.versions, peer: theirs.versions}
                first.append({"model": model, "set": name, "peer": peer, "ours_s": _first_token(ours, setup),
                              "peer_s": _first_token(theirs, setup)})  # fmt: skip
                for case in cases:
                    row = Row(model, case.name, peer)
                    rows.append(row)
                    _measure(case, ours, theirs, row, options.rounds)
                    print(f"{model} {peer} {case.name}: {row.ratio():.2f} x", file=sys.stderr, flush=True)
        except WorkerError as error:
            print(f"{model} {peer} {name}: {error}", file=sys.stderr, flush=True)
            rows.append(Row(model, name, peer, error=str(error)))


def _start(
    name: str, pythons: dict[str, str], setup: Setup, folder: Path, options: argparse.Namespace
) -> Worker:
    script, log = HERE / "peers" / SCRIPTS[name], folder / f"{name}.log"
    try:
        return Worker(pythons[name], script, setup, log, options.timeout)
    except WorkerError as error:
        raise WorkerError(f"{name}: {error} ({log})") from error


def _measure(case: Case, ours: Worker, theirs: Worker, row: Row, rounds: int) -> None:
    texts, chosen = prompts(REQUESTS, PROMPT), case.choose(REQUESTS)
    short = prompts(REQUESTS, 8, seed=3)
    for worker in (ours, theirs):
        worker.run(short, chosen, 4)  # every adapter once
    for _ in range(rounds):
        mine, seconds = ours.run(texts, chosen, OUTPUT)
        row.ours_s.append(seconds)
        other, seconds = theirs.run(texts, chosen, OUTPUT)
        row.peer_s.append(seconds)
    row.same_first = statistics.mean(a[0] == b[0] for a, b in zip(mine, other, strict=True))
    row.ours_bytes, row.peer_bytes = ours.resident(), theirs.resident()


def _first_token(worker: Worker, setup: Setup) -> dict[str, float]:
    """Seconds of single requests for one token, medians: no adapter, one that was never used, that again."""
    texts = prompts(3 * SINGLES + 2, PROMPT, seed=5)
    for text in texts[-2:]:
        worker.run([text], [None], 2)
    times: dict[str, list[float]] = {"none": [], "first use": [], "warm": []}
    for n in range(SINGLES):
        times["none"].append(worker.run([texts[3 * n]], [None], 1)[1])
        if n < len(setup.adapters):
            times["first use"].append(worker.run([texts[3 * n + 1]], [n], 1)[1])
            times["warm"].append(worker.run([texts[3 * n + 2]], [n], 1)[1])
    return {kind: statistics.median(found) for kind, found in times.items() if found}


def _setup(model: str, name: str, count: int, dtype: str, folder: Path) -> Setup:
    """Makes what is not there yet."""
    kept = folder / f"{model}-{dtype}"
    path, (rank, modules) = kept / "model", SETS[name]
    if not path.exists():
        save_model(path, model, dtype)
    adapters = [kept / name / str(n) for n in range(count)]
    for seed, adapter in enumerate(adapters):
        if not adapter.exists():
            save_adapter(adapter, model, rank, modules, seed, dtype)
    length = 2 * (PROMPT + OUTPUT)
    return Setup(str(path), dtype, [str(a) for a in adapters], rank, AT_ONCE, _threads(), length, str(kept))


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _available(options: argparse.Namespace) -> dict[str, str]:
    """Peer -> Python that can import it. Says who is left out."""
    found: dict[str, str] = {}
    for name in (US, *options.peers):
        python = options.python.get(name, sys.executable)
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[name]!r}) is None)"
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            found[name] = python
        else:
            hint = f"--python {name}=PATH names another Python"
            print(f"{name} is left out: {python} has no module {MODULES[name]}; {hint}", file=sys.stderr)
    if US not in found:
        sys.exit(f"{US} itself cannot be imported")
    return found


def _print_table(rows: list[Row], first: list[dict[str, Any]]) -> None:
    tokens, gib = REQUESTS * OUTPUT, 2**30
    print(f"{'model':6} {'case':10} {'peer':13} {'ours tok/s':>10} {'peer tok/s':>10} {'ratio':>6} "
          f"{'first tokens':>12} {'ours GiB':>8} {'peer GiB':>8}")  # fmt: skip
    for row in rows:
        head = f"{row.model:6} {row.case:10} {row.peer:13}"
        if row.error is not None:
            print(f"{head} {row.error}")
            continue
        ours, theirs = (tokens / statistics.median(found) for found in (row.ours_s, row.peer_s))
        print(f"{head} {ours:10.0f} {theirs:10.0f} {row.ratio():6.2f} {row.same_first:12.2f} "
              f"{row.ours_bytes / gib:8.2f} {row.peer_bytes / gib:8.2f}")  # fmt: skip
    print("\ntime to first token, ms, ours / theirs")
    for one in first:
        pairs = (f"{kind} {ours * 1000:.0f} / {one['peer_s'][kind] * 1000:.0f}"
                 for kind, ours in one["ours_s"].items())  # fmt: skip
        print(f"{one['model']:6} {one['set']:10} {one['peer']:13} " + ", ".join(pairs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = [name for name in SCRIPTS if name != US]
    names = [case.name for case in CASES]
    parser.add_argument("--models", type=_some(list(MODELS)), default=["small"], help=",".join(MODELS))
    parser.add_argument("--peers", type=_some(peers), default=peers, help=",".join(peers))
    parser.add_argument("--cases", type=_some(names), default=names, help=",".join(names))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="more than once")
    parser.add_argument(
        "--keep", type=Path, help="folder of models and conversions, made or found; logs, too"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds, for each start and each run")
    options = parser.parse_args()
    options.python = dict(pair.split("=", 1) if "=" in pair else parser.error(f"--python {pair}: no =")
                          for pair in options.python)  # fmt: skip
    if unknown := set(options.python) - set(SCRIPTS):
        parser.error(f"--python: {', '.join(sorted(unknown))} not among {', '.join(SCRIPTS)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        options.keep = options.keep.resolve()
    return options


def _some(known: list[str]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))} not among {', '.join(known)}")
        return chosen

    return parse


if __name__ == "__main__":
    main()

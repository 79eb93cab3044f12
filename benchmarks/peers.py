#!/usr/bin/env python3
"""Compares manylora with other engines on the same random models and adapters.

Each engine and manylora alternate within one run. Each is a separate process, and is idle while the other one
runs. The ratio is the median of the pairs. At concurrency N, a call has N requests that run at once, and the
next call starts when all have ended. Requests have 64 tokens in (--prompt) and 64 out, are greedy and never
end early.
The time to first token is the time of a call with one token of output: until all N requests have their token.

    peers.py                                                          # all engines this Python can import
    peers.py --python openvino=/venvs/ov/bin/python --models small,mid --keep build/peers --json found.json
    peers.py --cases base --at-once 1,16 --dtypes int8,int4 --json found.json   # add rows to the file
    peers.py --models smollm2 --dtypes gguf --peers llama.cpp         # the published file itself
    peers.py --json found.json --show                                 # print its tables without measuring

Cases: r8qkv-N has N distinct adapters of rank 8 on q, k, v, used in turn; r16all-N has rank 16 on all linear
layers. int8 and int4 are weights of 8 and 4 bits, made from the bfloat16 model in each engine's own way
(manylora: W8A8 and W4A8, or W8A16 and W4A16 in a version without them). The first tokens of both engines'
answers are compared. If many differ, an adapter was not applied, or the best tokens are so close that
rounding decides.

Needs an otherwise idle machine. Rows during which other processes used more than a quarter of a CPU are
marked, and --wait waits for an idle machine before each row. The base model at 1, 4, 16 and 32 takes 2
minutes for a small model and one peer.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from limits import measure_machine
from loads import ALL, MODELS, OUTPUT, QKV, Case, numbers_to, save_adapter, save_model, smollm2, some_of
from machine import QUIET, see_machine, wait_for_quiet
from peers import tables
from peers.measure import PROMPT, measure, warm
from peers.process import Worker, WorkerError
from peers.rows import Found, Row, read, write
from peers.worker import Setup

HERE = Path(__file__).parent

US = "manylora"
MODULES = {US: "manylora", "vllm": "vllm", "openvino": "openvino_genai", "llama.cpp": "xllamacpp"}
SCRIPTS = {
    US: "with_manylora.py", "vllm": "with_vllm.py", "openvino": "with_openvino.py",
    "llama.cpp": "with_llamacpp.py",
}  # fmt: skip
DTYPES = ("bfloat16", "float32", "int8", "int4", "gguf")
QUANTISES = (US, "openvino", "llama.cpp")
AT_ONCE = (1, 4, 16, 32)
SETS: dict[str, tuple[int, tuple[str, ...]]] = {"base": (0, ()), "r8qkv": (8, QKV), "r16all": (16, ALL)}
CASES = [
    Case("base"),
    *(Case(f"r8qkv-{n}", (8,), QKV, n) for n in (1, 8, 32)),
    *(Case(f"r16all-{n}", (16,), ALL, n) for n in (1, 8, 32)),
]


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the workers are closed, too
    if options.show:
        _show(read(options.json), options)
        return
    machine = see_machine()
    print(machine, file=sys.stderr)
    share = wait_for_quiet(options.wait)
    bandwidth, rate = measure_machine()
    if share > QUIET:
        print(f"other processes use {share:.2f} CPUs: figures and limits are unreliable", file=sys.stderr)
    found = Found(machine.as_dict(), {"bandwidth": bandwidth, "gemm": rate})
    if options.json and options.json.exists():
        earlier = read(options.json)
        earlier.add(found)
        found = earlier
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        pythons = _available(options)
        for model in options.models:
            for dtype in options.dtypes:
                for peer in pythons:
                    if peer != US and _can(peer, dtype):
                        _compare(model, dtype, peer, pythons, folder, options, found)
    _show(found, options)


def _show(found: Found, options: argparse.Namespace) -> None:
    machine = found.machine
    print(f"{machine['short']}; reads {found.limits['bandwidth'] / 1e9:.1f} GB/s, multiplies "
          f"{found.limits['gemm'] / 1e9:.0f} GFLOP/s; {machine['date']}")  # fmt: skip
    for engine, versions in found.versions.items():
        print(f"- {engine}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"\n{tables.figures(found)}")
    if options.json and not options.show:
        write(options.json, found)


def _compare(
    model: str,
    dtype: str,
    peer: str,
    pythons: dict[str, str],
    folder: Path,
    options: argparse.Namespace,
    found: Found,
) -> None:
    """Measure one peer and manylora in all cases, with a pair of new processes for each set of adapters."""
    for name in SETS:
        cases = [case for case in CASES if case.name in options.cases and case.name.split("-")[0] == name]
        if not cases:
            continue
        setup = _setup(model, name, max(case.adapters for case in cases), dtype, folder, options)
        try:
            with (
                _start(US, pythons, setup, folder, options) as ours,
                _start(peer, pythons, setup, folder, options) as theirs,
            ):
                for engine, worker in ((US, ours), (peer, theirs)):
                    found.versions[engine] = found.versions.get(engine, {}) | worker.versions
                rows = _run_set(cases, ours, theirs, (model, dtype, peer), options)
        except WorkerError as error:
            print(f"{model} {dtype} {peer} {name}: {error}", file=sys.stderr, flush=True)
            rows = [
                Row(model, dtype, case.name, peer, n, options.prompt, error=str(error))
                for case in cases
                for n in options.at_once
            ]
        found.add(Found(found.machine, found.limits, {}, rows))
        if options.json:
            write(options.json, found)


def _run_set(
    cases: list[Case],
    ours: Worker,
    theirs: Worker,
    of: tuple[str, str, str],
    options: argparse.Namespace,
) -> list[Row]:
    model, dtype, peer = of
    warm(ours, theirs, list(range(max(case.adapters for case in cases))) or [None] * 2)
    rows = []
    for case in cases:
        for at_once in options.at_once:
            row = Row(model, dtype, case.name, peer, at_once, options.prompt)
            rows.append(row)
            measure(case, ours, theirs, row, options.rounds, options.wait)
            busy = f", other processes used {row.others:.2f} CPUs" if row.busy else ""
            print(f"{model} {dtype} {peer} {case.name} at {at_once}: {row.ratio():.2f} x, first token "
                  f"{row.first_ratio():.2f} x{busy}", file=sys.stderr, flush=True)  # fmt: skip
    return rows


def _start(
    name: str, pythons: dict[str, str], setup: Setup, folder: Path, options: argparse.Namespace
) -> Worker:
    script, log = HERE / "peers" / SCRIPTS[name], folder / f"{name}.log"
    try:
        return Worker(pythons[name], script, setup, log, options.timeout)
    except WorkerError as error:
        raise WorkerError(f"{name}: {error} ({log})") from error


def _setup(model: str, name: str, count: int, dtype: str, folder: Path, options: argparse.Namespace) -> Setup:
    """Create the model and the adapters that do not exist yet."""
    stored = "float32" if dtype == "float32" else "bfloat16"
    kept = folder / f"{model}-{stored}"
    path, (rank, modules) = kept / "model", SETS[name]
    if not path.exists():
        save_model(path, model, stored)
    adapters = [kept / name / str(n) for n in range(count)]
    for seed, adapter in enumerate(adapters):
        if not adapter.exists():
            save_adapter(adapter, model, rank, modules, seed, stored)
    places, most = [str(a) for a in adapters], max(options.at_once)
    threads, length = torch.get_num_threads(), max(2 * (PROMPT + OUTPUT), options.prompt + 2 * OUTPUT)
    path = smollm2() if dtype == "gguf" else path
    return Setup(str(path), dtype, places, rank, most, threads, length, str(kept))


def _can(peer: str, dtype: str) -> bool:
    if dtype in ("bfloat16", "float32") or peer == "llama.cpp" or (peer in QUANTISES and dtype != "gguf"):
        return True
    print(f"{peer} is skipped for {dtype}: its worker does not support quantised weights", file=sys.stderr)
    return False


def _available(options: argparse.Namespace) -> dict[str, str]:
    """The Python that can import each engine. Prints which engines are skipped."""
    found: dict[str, str] = {}
    for name in (US, *options.peers):
        python = options.python.get(name, sys.executable)
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[name]!r}) is None)"
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            found[name] = python
        else:
            hint = f"--python {name}=PATH names another Python"
            print(f"{name} is skipped: {python} has no module {MODULES[name]}; {hint}", file=sys.stderr)
    if US not in found:
        sys.exit(f"{US} itself cannot be imported")
    return found


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    peers = [name for name, script in SCRIPTS.items() if name != US and (HERE / "peers" / script).exists()]
    names = [case.name for case in CASES]
    parser.add_argument("--models", type=some_of(list(MODELS)), default=["small"], help=",".join(MODELS))
    parser.add_argument("--peers", type=some_of(peers), default=peers, help=",".join(peers))
    parser.add_argument("--cases", type=some_of(names), default=names, help=",".join(names))
    parser.add_argument("--dtypes", type=some_of(list(DTYPES)), default=["bfloat16"], help=",".join(DTYPES))
    parser.add_argument(
        "--at-once", type=numbers_to(256), default=list(AT_ONCE), help="requests per call, such as 1,16"
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="pairs per row; fewer if a row takes over 40 s")
    parser.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS", help="for an idle machine, per row"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--show", action="store_true", help="only print the tables of --json")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="repeatable")
    parser.add_argument("--keep", type=Path, help="folder for models, conversions and logs, which are reused")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each start and each run")
    options = parser.parse_args()
    options.python = dict(pair.split("=", 1) if "=" in pair else parser.error(f"--python {pair}: no =")
                          for pair in options.python)  # fmt: skip
    if unknown := set(options.python) - set(SCRIPTS):
        parser.error(f"--python: {', '.join(sorted(unknown))} must be among {', '.join(SCRIPTS)}")
    if "gguf" in options.dtypes and options.models != ["smollm2"]:
        parser.error("--dtypes gguf is for --models smollm2, whose published file it is")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.show and not (options.json and options.json.exists()):
        parser.error("--show needs --json with a file that exists")
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        options.keep = options.keep.resolve()
    return options


if __name__ == "__main__":
    main()

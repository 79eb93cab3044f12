"""How many files of src a warm request runs through: `python tests/ways.py [--list]`.

With `--list` also which. Every request names an adapter of the demo that is in the cache, and asks for 4
tokens. A file counts when one of its functions is called, on any thread, between the request and the end of
its answer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'src' / 'manylora'}/"
DEMO = ROOT / "examples" / "demo"
BUDGETS = {"LLM.generate": 49, "POST /v1/chat/completions": 66, "Triton tensors": 41}
"""Files; `test_public_names.py` fails above them. Four more than were found, because what else the process
does at the moment, such as returning memory, counts too."""

WARM, TRIED = 2, 4  # requests before those that count, and those

_seen: set[str] = set()
_counting = False


def _record(frame: FrameType, event: str, argument: Any) -> None:
    if _counting and event == "call":
        _seen.add(frame.f_code.co_filename)


def start() -> None:
    """Call this before threads start: others are not seen."""
    threading.setprofile(_record)
    sys.setprofile(_record)


def files_of(request: Callable[[], object]) -> list[str]:
    """The files that a request runs through: the fewest of several, because threads also do other work."""
    global _counting
    counts = []
    for _ in range(WARM + TRIED):
        _seen.clear()
        _counting = True
        try:
            request()
        finally:
            _counting = False
        counts.append(sorted(name.removeprefix(PACKAGE) for name in _seen if name.startswith(PACKAGE)))
    return min(counts[WARM:], key=len)


@contextmanager
def llm() -> Iterator[Callable[[], object]]:
    from manylora.doors.python import LLM, LoraConfig, SamplingParams

    adapters, params = DEMO / "adapters", SamplingParams(max_tokens=4)
    with LLM(
        DEMO / "base", lora_root=adapters, lora_config=LoraConfig(max_lora_rank=64), device="cpu"
    ) as made:
        yield lambda: made.generate("Tokyo is", params, "japanese", use_tqdm=False)


@contextmanager
def chat() -> Iterator[Callable[[], object]]:
    sys.path.insert(0, str(ROOT / "tests" / "cpu"))
    from serving import Running

    server = Running(lora_root=(DEMO / "adapters",))
    body = {"model": "japanese", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    try:
        yield lambda: server.post("/v1/chat/completions", **body).raise_for_status()
    finally:
        server.close()


@contextmanager
def tensors() -> Iterator[Callable[[], object]]:
    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "cpu", "replay")]
    from test_replay_engine import Call, Door

    arrays = {
        "input_ids": np.array([[1, 2, 3]], np.int32),
        "input_lengths": np.array([3], np.int32),
        "request_output_len": np.array([4], np.int32),
        "lora_name": np.array([[b"japanese"]], np.object_),
    }
    with TemporaryDirectory() as folder:
        door = Door(Path(folder))

        def ask() -> None:
            call = Call(arrays)
            door.worker.execute([call])
            assert not isinstance(call.result()[0], str), call.answers

        try:
            yield ask
        finally:
            door.worker.close()


WAYS = {"LLM.generate": llm, "POST /v1/chat/completions": chat, "Triton tensors": tensors}


def main(arguments: list[str]) -> int:
    """Prints a line for each way, and returns 1 if one has more files than its budget."""
    start()
    failed = False
    for name, way in WAYS.items():
        with way() as request:
            found = files_of(request)
        print(f"{name}: {len(found)} files of src, at most {BUDGETS[name]}")
        if "--list" in arguments:
            print(*found, sep="\n")
        failed = failed or len(found) > BUDGETS[name]
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

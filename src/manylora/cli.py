"""The command line `manylora COMMAND …`. A command's module is imported only when it is called."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import manylora

COMMANDS = {
    "bench": ("manylora.commands.bench", "measure throughput and latency with many adapters"),
    "build": ("manylora.commands.build", "write a model directory, quantised and with limits"),
    "chat": ("manylora.commands.chat", "talk to a model and its adapters in this terminal"),
    "convert": ("manylora.commands.convert", "convert an adapter to the tensors that requests carry"),
    "fleet": ("manylora.commands.fleet", "run several OpenAI servers behind one endpoint, on Ray Serve"),
    "inspect": ("manylora.commands.inspect", "show an adapter and whether a base model can serve it"),
    "prepare-dataset": ("manylora.commands.prepare_dataset", "write random requests for bench"),
    "repo": ("manylora.commands.repo", "write a Triton model repository for a model and its adapters"),
    "run-batch": (
        "manylora.commands.run_batch",
        "answer a file of requests in the form of OpenAI's Batch API",
    ),
    "serve": ("manylora.commands.serve", "serve a model and its adapters over HTTP (OpenAI API)"),
    "tool": ("manylora.commands.tool", "run the scripts and clients known from tensorrtllm_backend"),
    "triton": (
        "manylora.commands.triton",
        "start, stop or show a Triton server with a model and its adapters",
    ),
}
"""Name -> module with `main(arguments) -> exit status`, description."""
PAGE = "manylora serve MODEL has a page to try it, http://localhost:8000/, and any OpenAI client works"
OTHERS = {
    "complete": PAGE,
    "run": "manylora chat MODEL talks to it in this terminal, manylora serve MODEL serves it",
    "generate": "in Python, manylora.LLM(MODEL).generate(prompts) answers a batch",
    "eval": "start manylora serve MODEL, and run lm-eval with its address",
    "download": "manylora serve ORG/NAME downloads the model; so does hf download ORG/NAME",
    "launch": "manylora serve MODEL starts the OpenAI server, manylora triton MODEL the Triton server",
    "start": "manylora serve MODEL starts the OpenAI server, manylora triton MODEL the Triton server",
    "stop": "manylora triton --stop ends a Triton server; Ctrl-C or SIGTERM ends manylora serve",
    "list": "GET /v1/models of a running server lists its model and adapters",
    "train": "adapters are trained with PEFT or TRL; manylora serves them",
}
"""Commands of other programs, and what to do here."""
INTERRUPTED = 130  # exit status after Ctrl-C, as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    name = given[0] if given else "--help"
    try:
        try:
            return _run(name, given)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is no error
    except KeyboardInterrupt:
        newline = "\n" if sys.stderr.isatty() else ""  # the terminal has printed ^C on this line
        print(f"{newline}manylora {name}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(INTERRUPTED)  # do not wait for threads that download or compute
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, given: list[str]) -> int:
    if name in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if name in ("-V", "--version"):
        print(f"manylora {manylora.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"manylora: there is no command {name!r}; {_instead_of(name)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(given[1:])


def _instead_of(name: str) -> str:
    if name.startswith("-"):
        return "the command comes first: manylora COMMAND [options]"
    if name in OTHERS:
        return OTHERS[name]
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean manylora {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"


def _usage() -> str:
    lines = [f"  {name:<17}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: manylora COMMAND [options]",
            "       manylora COMMAND --help",
            "       manylora --version",
            "",
            *lines,
            "",
            "To begin: manylora serve MODEL --lora-root FOLDER",
            "MODEL is a Hugging Face folder or id, or a GGUF file; each subfolder of FOLDER is an adapter.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

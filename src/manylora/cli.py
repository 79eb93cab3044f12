"""The command line `manylora COMMAND …`. A command's module is imported only when it is called."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import manylora
from manylora.errors import ManyloraError

COMMANDS = {
    "bench": "measure throughput and latency with many adapters",
    "build": "write a model directory, quantised and with limits",
    "chat": "talk to a model and its adapters in this terminal",
    "convert": "convert an adapter to the tensors that requests carry",
    "fleet": "run several OpenAI servers behind one endpoint, on Ray Serve",
    "inspect": "show an adapter and whether a base model can serve it",
    "prepare-dataset": "write random requests for bench",
    "repo": "write a Triton model repository for a model and its adapters",
    "run-batch": "answer a file of requests in the form of OpenAI's Batch API",
    "serve": "serve a model and its adapters over HTTP (OpenAI API)",
    "tool": "run the scripts and clients known from tensorrtllm_backend",
    "triton": "start, stop or show a Triton server with a model and its adapters",
    "verify": "compare served log probabilities with transformers + PEFT",
}
"""Name -> description. A module of `manylora.doors.cli` has `main(arguments) -> exit status`. What it raises
for its user to mend is printed here, in one line.
"""
EXTRAS = {"fleet": "fleet", "run-batch": "openai", "serve": "openai", "verify": "reference"}
"""What to install for a command that lacks a module."""
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
USAGE = f"""usage: manylora COMMAND [options]
       manylora COMMAND --help
       manylora --version

{"".join(f"  {name:<17}{purpose}{chr(10)}" for name, purpose in COMMANDS.items())}
To begin: manylora serve MODEL --lora-root FOLDER
MODEL is a Hugging Face folder or id, or a GGUF file; each subfolder of FOLDER is an adapter."""
INTERRUPTED = 130  # exit status after Ctrl-C, as shells report it
NOT_COMPARED = 2  # exit status of verify if it failed, as 1 says that something differs


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
    except ImportError as error:
        if name not in EXTRAS:
            raise
        what = f" needs {error.name}" if error.name else f": {error}"  # a package that others do not fit
        print(f"manylora {name}{what}: pip install 'manylora[{EXTRAS[name]}]'", file=sys.stderr)
    except (ManyloraError, ValueError, OSError) as error:
        print(f"manylora {name}: {error}", file=sys.stderr)
    return NOT_COMPARED if name == "verify" else 1


def _run(name: str, given: list[str]) -> int:
    if name in ("-h", "--help"):
        print(USAGE)
        return 0 if given else 2
    if name in ("-V", "--version"):
        print(f"manylora {manylora.__version__}")
        return 0
    if name in COMMANDS:
        return import_module(f"manylora.doors.cli.{name.replace('-', '_')}").main(given[1:])
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean manylora {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    if name.startswith("-"):
        hint = "the command comes first: manylora COMMAND [options]"
    print(f"manylora: there is no command {name!r}; {OTHERS.get(name, hint)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

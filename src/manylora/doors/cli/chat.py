"""manylora chat: a conversation with a model and its adapters in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from manylora.adapters.remote.resolver import is_remote
from manylora.errors import ConfigError, RequestError
from manylora.system.command_line import Parser

HELP = """/lora NAME   answer with this adapter from now on; none: the base model; without NAME: list them
/reset       forget the conversation
/help        show this
/exit        leave, as Ctrl-D does; Ctrl-C stops an answer"""
ADAPTER = "an adapter; the first one answers. Also a PATH, or a NAME in --lora-root; may be repeated"
NONE = ("none", "base", "")  # for the base model
MOST_TOKENS = 2**20  # of an answer: the context ends it earlier
Pieces = Generator[str, None, None]


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="manylora chat",
        description="Talk to a model and its adapters. Piped input is answered line by line.",
        epilog=f"in the conversation:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Callable[..., Any] = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face folder, GGUF file, or hub id org/name")
    add("--lora", action="append", default=[], metavar="NAME=PATH", help=ADAPTER)
    add("--lora-root", action="append", default=[], metavar="FOLDER", help="folder with adapters")
    add("--system", metavar="TEXT", help="system message")
    add("--temperature", type=float, metavar="X", help="default: the model's, or 0.8; 0: greedy")
    add("--max-tokens", type=int, metavar="N", help="of an answer; default: what the context has room for")
    add("--max-seq-len", "--max-model-len", type=int, metavar="N", help="tokens of the whole conversation")
    add("--device", help="auto, cpu, cuda, cuda:N")
    add("--dtype", help="auto, float32, float16, bfloat16")
    add("--url", metavar="ADDRESS", help="use a running server instead; its key: OPENAI_API_KEY")
    options = parser.parse_args(arguments)
    if options.model is None and options.url is None:
        parser.error("give MODEL, or --url ADDRESS of a running server")
    with closing(Server(options) if options.url else InProcess(options)) as model:
        return Conversation(model, options.system, model.first).run(sys.stdin.isatty())


class Conversation:
    """system: text of the system message; None: the template's own. adapter: None: the base model."""

    def __init__(self, model: InProcess | Server, system: str | None, adapter: str | None) -> None:
        self._model = model
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._adapter: str | None = None
        if adapter is not None:
            self._choose(adapter)

    def run(self, terminal: bool) -> int:
        """Until the input ends. Returns status 1 if, without a terminal, a question was not answered."""
        if terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 - input() then has line editing and a history
            print("/help shows what there is besides questions.")
        status = 0
        while (line := self._line(terminal)) is not None:
            if line == "/exit":
                break
            try:
                self._take(line)
            except (RequestError, ValueError) as error:
                print(f"{error}", file=sys.stderr)
                status = 0 if terminal else 1
        return status

    def _line(self, terminal: bool) -> str | None:
        """The next input without white space around it; None at its end."""
        while True:
            try:
                if not terminal:
                    return line.strip() if (line := sys.stdin.readline()) else None
                return input(f"{self._adapter or ''}> ").strip()
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not terminal:
                    raise
                print("\n(/exit or Ctrl-D leaves)")

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self._messages = list(self._system)
        elif command == "/lora" and not rest:
            names = ", ".join(self._model.adapters) or "there are none"
            print(f"now {self._adapter or 'the base model'}; adapters: {names}")
        elif command == "/lora":
            self._choose(rest.strip())
        elif command.startswith("/"):
            raise ValueError(f"there is no {command}\n{HELP}")
        elif line:
            self._ask(line)

    def _choose(self, name: str) -> None:
        names = self._model.adapters
        if name not in names and name not in NONE:
            raise ValueError(f"there is no adapter {name!r}: there are {', '.join(names) or 'none'}")
        self._adapter = name if name in names else None

    def _ask(self, question: str) -> None:
        """Print the answer. A stopped answer stays in the conversation as far as it came."""
        asked = [*self._messages, {"role": "user", "content": question}]
        text = ""
        pieces = self._model.answer(asked, self._adapter)
        try:
            for piece in pieces:
                text += piece
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print("\n(stopped)")
        finally:
            pieces.close()
        self._messages = [*asked, {"role": "assistant", "content": text}]


class InProcess:
    """An LLM in this process. first: its first adapter. Raises ConfigError, ValueError."""

    def __init__(self, options: argparse.Namespace) -> None:
        root = options.lora_root
        given = [adapter_of(one, below_root=bool(root)) for one in options.lora]
        self.first = given[0][0] if given else None
        print(f"Loading {options.model} …", file=sys.stderr, flush=True)  # now: to import torch takes seconds
        from manylora.doors.python.llm import LLM
        from manylora.doors.python.llm_args import LoRARequest
        from manylora.generation.defaults import LLAMA_CPP

        self._named = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(given, 1) if path}
        self._llm = LLM(
            options.model,
            lora_root=root,
            enable_lora=True if given or root else None,
            generation_config="auto",
            max_batch_size=1,
            device=options.device,
            dtype=options.dtype,
            max_seq_len=options.max_seq_len,
        )
        assert self._llm.tokenizer is not None
        if self._llm.tokenizer.chat_template is None:
            self.close()
            raise ConfigError(f"{options.model} has no chat template, so it cannot chat")
        params = self._llm.get_default_sampling_params()
        if params.temperature is None and params.top_k is None and params.top_p is None:
            params = replace(params, **LLAMA_CPP)
        if options.temperature is not None:
            params.temperature = options.temperature
        params.max_tokens = options.max_tokens or MOST_TOKENS
        self._params = params

    @property
    def adapters(self) -> Sequence[str]:
        return sorted({*self._named, *self._llm.lora_names()})

    def answer(self, messages: Sequence[dict[str, str]], adapter: str | None) -> Pieces:
        """The pieces of an answer. Closing it stops the answer. Raises RequestError, ValueError."""
        chosen = None if adapter is None else self._named.get(adapter, adapter)
        params = replace(self._params, seed=secrets.randbits(63))
        result = self._llm.chat_async(messages, params, chosen, streaming=True)
        try:
            for output in result:
                yield output.outputs[0].text_diff
        finally:
            result.abort()

    def close(self) -> None:
        self._llm.shutdown()


class Server:
    """A running server with OpenAI's API. Raises ConfigError, RequestError. first: as in `InProcess`."""

    def __init__(self, options: argparse.Namespace) -> None:
        refused = [name for name in ("lora_root", "device", "dtype", "max_seq_len") if getattr(options, name)]
        if refused or any("=" in one for one in options.lora):
            name = refused[0] if refused else "lora NAME=PATH"
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with --url: the server has its own")
        self.first = options.lora[0] if options.lora else None
        self._url = options.url
        given = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        self._fields = {name: value for name, value in given.items() if value is not None}
        with ask_server(self._url, "models") as answer:
            cards = json.load(answer)["data"]
        bases = [card["id"] for card in cards if not card.get("parent")]
        self._base = options.model or next(iter(bases), "")
        self.adapters = [card["id"] for card in cards if card["id"] not in bases]

    def answer(self, messages: Sequence[dict[str, str]], adapter: str | None) -> Pieces:
        asked = {**self._fields, "model": adapter or self._base, "messages": messages, "stream": True}
        thinks = False
        with ask_server(self._url, "chat/completions", asked) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise RequestError(str(event["error"].get("message")))
                    for choice in event["choices"]:
                        thought, text = (choice["delta"].get(one) or "" for one in ("reasoning", "content"))
                        if thought and not thinks:
                            yield "<think>\n"
                        elif text and thinks:
                            yield "\n</think>\n\n"
                        thinks = bool(thought) or (thinks and not text)
                        yield thought or text

    def close(self) -> None:
        pass


def ask_server(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The answer, opened. body: sent as JSON. The key is OPENAI_API_KEY. Raises RequestError."""
    url, key = url.rstrip("/").removesuffix("/v1") + "/v1", os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, headers)
    try:
        return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        with suppress(ValueError, LookupError, TypeError):
            raise RequestError(json.load(error)["error"]["message"]) from None
        raise RequestError(f"{url}/{path}: {error}") from None
    except OSError as error:
        raise RequestError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None


def adapter_of(given: str, below_root: bool) -> tuple[str, str]:
    """Name and path of NAME=PATH, of a path or of a hub id. No path: a name in --lora-root."""
    name, equals, path = given.partition("=")
    if equals:
        return name, path
    if Path(given).exists() or (is_remote(given) and not below_root):
        return Path(given).resolve().name, given
    if not below_root:
        raise ConfigError(f"--lora {given} does not exist: give NAME=PATH, or --lora-root FOLDER too")
    return given, ""

"""ReplyReader: splits an output into reasoning, content and tool calls while it grows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from manylora.generation.generation import overlap
from manylora.generation.reply_formats import SECTIONS, TOOL_MARKS, Thinking

Kind = Literal["reasoning", "content", "name", "arguments"]
Steps = Generator[None, None, Any]  # yields where it needs more text

# A call until its arguments. Llama and Cohere say parameters, and Cohere tool_name.
FIELD = r'(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
CALL = re.compile(
    rf'\{{\s*{FIELD}"(?:tool_)?name"\s*:\s*"([^"\\]*)"\s*,\s*{FIELD}"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
NAME_ONLY = re.compile(r'\[?\{"name":"([^"\\]*)"(?:,"(?:arguments|parameters)":)?')
WORD = re.compile(r"[\w.-]+")
SPECIAL = re.compile(r'(\\.|["{}\[\],:])', re.DOTALL)
QUOTED = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|\'(?:[^\'\\]|\\.)*+(?:\'|\\?\Z)'
DELIMITER = '<|"|>'  # of Gemma 4's texts
# What JSON writes in another way. A text without an end is searched once.
LITERAL = re.compile(
    rf'<\|"\|>(.*?)(?:<\|"\|>|\Z)|({QUOTED})|\b([A-Za-z_]\w*+)(?=\s*:)|\b(True|False|None)\b', re.DOTALL
)
# What counts next in arguments as Python or Gemma 4 write them, by the quote that is open.
NEXT = {"": re.compile(r'<\|"\|>|["\'(){}\[\],]'), DELIMITER: re.compile(re.escape(DELIMITER))}
NEXT |= {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}
LONGEST_HEAD = 1000  # characters of a call before its arguments
SLICE = 256  # characters that are read at a time: what is searched again stays short
HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which UTF-8 does not have
JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Piece:
    """A part of a reply. name: of a call that begins; its arguments follow. call: its number, from 0."""

    kind: Kind
    text: str
    call: int = -1


@dataclass(frozen=True)
class ReplyFormat:
    """How outputs of one request are read. opened: the prompt ends where the model thinks. tools: the schemas
    of arguments by the names of tools. marks: texts that begin calls. named: the output is the arguments of
    this tool. only_calls: it has no content. parallel: False: only the first call counts. hidden: reasoning
    is left out.
    """

    thinking: Thinking | None = None
    opened: bool = False
    tools: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    named: str | None = None
    only_calls: bool = False
    parallel: bool = True
    hidden: bool = False

    @property
    def shown(self) -> tuple[str, ...]:
        """Texts that must be visible in the output, even if they are special tokens."""
        inner = [one for mark in self.marks for one in (mark, TOOL_MARKS[mark], *SECTIONS.get(mark, ()))]
        inner += ["[ARGS]", "[CALL_ID]"] * ("[TOOL_CALLS]" in self.marks)
        inner += [DELIMITER] * ("<|tool_call>" in self.marks)
        thinking = self.thinking
        return (*inner, *((*thinking.starts, *thinking.ends, *thinking.inner) if thinking else ()))


class _MalformedError(Exception):
    """What began as a call is none."""


class _EndedError(Exception):
    """The output ended within something."""


class ReplyReader:
    """Of one output. A text that begins like a call is withheld until it is known to be one; if it is none,
    it is content. num_reasoning: characters of the output up to the end of the reasoning. num_calls: so far.
    """

    def __init__(self, form: ReplyFormat) -> None:
        self._form = form
        self._text = ""  # not yet read
        self._final = self._cut = False
        self._pieces: list[Piece] = []
        self._num_read = self.num_reasoning = self.num_calls = 0
        # Of the call that is read: its text so far, the first of its pieces, and the calls before it.
        self._raw: list[str] = []
        self._first: int | None = 0  # None: some were returned, so that it cannot be content any more
        self._before = 0
        self._opening = "{"  # of the next argument
        self._steps = self._reply()
        next(self._steps)

    def add(self, text: str, final: bool = False, cut: bool = False) -> list[Piece]:
        """What is new. final: no more text follows. cut: because the token limit was reached: an incomplete
        last call is then returned as far as it goes.
        """
        self._cut = cut
        for at in range(0, len(text) or 1, SLICE):
            self._text += text[at : at + SLICE]
            self._final = final and at + SLICE >= len(text)
            next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        if self._first is not None:
            self._first = None if len(pieces) > self._first else 0
        return pieces

    def _reply(self) -> Steps:
        yield
        thinking = self._form.thinking
        with suppress(_EndedError):
            if thinking is not None and thinking.inner:
                yield from self._channels(thinking.ends)
            elif thinking is not None and (
                (yield from self._optional(*thinking.starts)) is not None or self._form.opened
            ):
                if thinking.label:
                    yield from self._optional(thinking.label)
                yield from self._space()
                end = yield from self._pass("reasoning", thinking.ends)
                yield from self._optional(end)
                yield from self._space()
            yield from self._answer()

    def _channels(self, ends: tuple[str, ...]) -> Steps:
        """gpt-oss: messages, each with a header that says what it is."""
        while (found := (yield from self._optional("<|start|>", "<|channel|>", *ends))) is not None:
            if found in ends:
                continue
            head, _ = yield from self._until("<|message|>")
            to = re.search(r"to=(?:functions\.)?([\w.-]+)", head)
            if to is not None and (yield from self._try(self._json_named(to[1]), "<|message|>")):
                continue
            yield from self._space()
            if "final" in head and self._form.only_calls:
                yield from self._answer()
            yield from self._pass("reasoning" if "analysis" in head else "content", ends)

    def _pass(self, kind: Kind, marks: tuple[str, ...]) -> Steps:
        """Text up to the first of these marks, and the white space before it. Returns the mark."""
        while True:
            at, mark = self._find(marks)
            text = self._text
            if not (mark or self._final):  # what may belong to a mark, or be white space before one, waits
                begun = max((overlap(text, one) for one in marks), default=0)
                at = len(text) - begun
            text = text[:at] if at >= 0 else text
            blank = kind == "reasoning" or (self.num_calls and not text.strip())
            text = text if self._final and not (mark or blank) else text.rstrip()
            self._emit(kind, self._take(len(text)))
            if kind == "reasoning":
                self.num_reasoning = self._num_read
            if mark:
                return mark
            yield from self._more()

    def _answer(self) -> Steps:
        """Content and calls."""
        form = self._form
        if form.named is not None:
            self._call(form.named)
            while True:
                self._emit("arguments", self._take(len(self._text)))
                yield from self._more()
        while not self._text.strip() and not self._final:
            yield
        bare = form.tools and self._text.lstrip()[:1] in ("{", "[")  # JSON or Python without a mark
        mark = "" if bare else (yield from self._pass("content", form.marks))
        while True:
            yield from self._try(self._calls(mark), mark)
            mark = yield from self._pass("content", form.marks)

    def _try(self, calls: Steps, mark: str = "") -> Steps:
        """Read calls. Returns whether they are any: otherwise what was read after the mark is content."""
        self._begin()
        try:
            yield from calls
            return True
        except _MalformedError:
            if self._first is not None:
                text = self._undo()
                if mark:
                    self._emit("content", text)
                else:  # its beginning may be one of a mark
                    self._text = text + self._text
            return False
        except _EndedError:
            keeps = self._cut or self._form.only_calls
            if self._first is not None and not (keeps and self.num_calls > self._before):
                text = self._undo() + self._take(len(self._text))
                if text.strip() and not (keeps and self._is_unfinished(text, mark)):
                    self._emit("content", text)
            raise
        finally:
            self._first = 0

    def _is_unfinished(self, text: str, mark: str) -> bool:
        """Whether this end of the output is the beginning of a call. Its name is returned if it is known."""
        text, names = "".join(text.split()).removeprefix(mark), self._form.tools
        if (found := NAME_ONLY.fullmatch(text)) and found[1] in names:
            self._call(found[1])
            return True
        text = text.removeprefix("[")
        return bool(mark or self._before) or any(f'{{"name":"{one}"'.startswith(text) for one in names)

    def _begin(self) -> None:
        """A call may begin here, and what came before is settled."""
        self._raw, self._first, self._before = [], len(self._pieces), self.num_calls

    def _undo(self) -> str:
        """Forget the pieces of the last call. Returns its text."""
        del self._pieces[self._first :]
        self.num_calls = self._before
        return "".join(self._raw)

    # Formats of calls

    def _calls(self, mark: str) -> Steps:
        """Calls after a mark, and its end."""
        yield from self._space()
        self._take(len(mark))
        end = TOOL_MARKS[mark] if mark else ""
        if mark in SECTIONS:
            return (yield from self._sections(end, *SECTIONS[mark]))
        if mark == "<function=":
            return (yield from self._tagged())
        yield from self._space()
        if mark == "[TOOL_CALLS]" and self._text[0] not in "[{":
            name, found = yield from self._until("[ARGS]", "{")
            if found == "{":
                self._text = self._raw.pop() + self._text
            return (yield from self._json_named(name.partition("[CALL_ID]")[0]))
        closing = "]" if self._text[0] == "[" else ""
        self._take(len(closing))
        after: str | None = ","
        while after not in (closing, end) and (after or (end and self._text.strip())):
            yield from self._space()
            yield from self._one(end)
            self._begin()
            after = yield from self._optional(",", ";", closing, end)
        if after == closing:
            yield from self._optional(end)

    def _one(self, end: str) -> Steps:
        if self._text[0] == "{":
            return (yield from self._json_call())
        if (yield from self._optional("<function=")) is not None:
            return (yield from self._tagged())
        yield from self._optional("call:")
        yield from self._space()
        while (word := WORD.match(self._text)) is not None and word.end() == len(self._text):
            if word.end() > LONGEST_HEAD:
                raise _MalformedError
            yield from self._more()
        name = self._take(word.end()) if word else ""
        found = yield from self._optional("(", "{", "<arg_key>", end)
        if found is None:
            raise _MalformedError
        self._call(name)
        if found in ("(", "{"):
            return (yield from self._pairs("=" if found == "(" else ":", ")" if found == "(" else "}"))
        while found == "<arg_key>":  # GLM
            key, _ = yield from self._until("</arg_key>")
            yield from self._until("<arg_value>")
            yield from self._value(name, key.strip(), "</arg_value>")
            found = yield from self._optional("<arg_key>")
        self._close()

    def _json_call(self) -> Steps:
        scan, at = _Nesting(), 0
        while (call := CALL.match(self._text) if at < LONGEST_HEAD else None) is None:
            at += scan.feed(self._text[at:])[0]
            if scan.done:  # with other fields, or in another order
                found = _loaded(self._take(at))
                found = found["function"] if isinstance(found.get("function"), dict) else found
                given = found.get("arguments", found.get("parameters"))
                given = json.dumps(given) if isinstance(given, dict) else given
                self._call(found.get("name", found.get("tool_name")))
                self._emit("arguments", _dumped(_loaded(given)))
                return
            yield from self._more()
        self._call(call[1])
        self._take(call.end())
        yield from self._json_arguments()
        rest = _Nesting(1)
        while not self._take(rest.feed(self._text)[0]) or not rest.done:
            yield from self._more()

    def _json_named(self, name: str) -> Steps:
        """The arguments of a call whose name comes before them."""
        self._call(name.strip())
        yield from self._json_arguments()
        self._begin()

    def _json_arguments(self) -> Steps:
        yield from self._space()
        if self._text[0] != "{":
            raise _MalformedError
        scan, whole = _Nesting(), list[str]()
        while not scan.done:
            count, shown = scan.feed(self._text)
            whole.append(self._take(count))
            self._emit("arguments", shown)
            if not scan.done:
                yield from self._more()
        if self._first is not None:  # otherwise it was returned as it is
            _loaded("".join(whole))

    def _sections(self, end: str, begin: str, separator: str, call_end: str) -> Steps:
        """DeepSeek, Kimi: a call has its name, a separator, and JSON that may be in a block of Markdown."""
        while (yield from self._until(begin, end))[1] == begin:
            head, _ = yield from self._until(separator)
            if head.strip() == "function":
                head, _ = yield from self._until("\n")
            self._call(re.sub(r"^functions\.|:\d+$", "", head.strip()))
            yield from self._optional("```json")
            yield from self._json_arguments()
            yield from self._until(call_end)
            self._begin()

    def _tagged(self) -> Steps:
        """Qwen3-Coder, and with JSON Llama 3.1: a name, then a tag for each argument."""
        name = (yield from self._until(">"))[0].strip()
        self._call(name)
        yield from self._space()
        if self._text[0] == "{":
            yield from self._json_arguments()
            yield from self._optional("</function>")
            return
        while (yield from self._until("<parameter=", "</function>"))[1] == "<parameter=":
            key, _ = yield from self._until(">")
            yield from self._value(name, key.strip(), "</parameter>")
        self._close()

    def _value(self, name: str, key: str, end: str) -> Steps:
        """The text of one argument. What the schema calls a string is returned while it grows."""
        try:
            is_string = self._form.tools[name]["properties"][key]["type"] == "string"
        except (KeyError, TypeError):
            is_string = False
        if not is_string:
            text, _ = yield from self._until(end)
            return self._argument(key, _literal(text.strip()))
        self._argument(key, '"')
        while not self._text:
            yield from self._more()
        self._take(int(self._text[0] == "\n"))  # a line break at either end belongs to the tags
        while True:
            at = self._text.find(end)
            stop = at if at >= 0 else len(self._text) - overlap(self._text, end)
            line = int(stop > 0 and self._text[stop - 1] == "\n")
            self._emit("arguments", _dumped(self._take(stop - line))[1:-1] + '"' * (at >= 0))
            if at >= 0:
                self._take(line + len(end))
                return
            yield from self._more()

    def _pairs(self, separator: str, closing: str) -> Steps:
        """Arguments as Python's keywords, or as Gemma 4 writes them."""
        at, depth, quote = 0, 0, ""
        while True:
            stop = len(self._text) - overlap(self._text, DELIMITER)
            part = NEXT[quote].search(self._text, at, stop)
            if part is None:
                at = max(at, stop - self._text.endswith("\\"))
                yield from self._more()
                continue
            at, found = part.end(), part[0]
            if quote or found in NEXT:
                quote = "" if found == quote else quote or found
            elif depth == 0 and found in (",", closing):
                item, at = self._take(at)[:-1].strip(), 0
                key, assigns, value = item.partition(separator)
                if assigns:
                    key = key.strip().removeprefix(DELIMITER).removesuffix(DELIMITER)
                    self._argument(key, _literal(value.strip()))
                elif item:
                    raise _MalformedError
                if found == closing:
                    return self._close()
            else:
                depth += (found in "([{") - (found in ")]}")

    # What is emitted

    def _emit(self, kind: Kind, text: str) -> None:
        call = self.num_calls - 1 if kind in ("name", "arguments") else -1
        left_out = {"content": self._form.only_calls, "reasoning": self._form.hidden}
        if not text or left_out.get(kind) or (call > 0 and not self._form.parallel):
            return
        last = self._pieces[-1] if len(self._pieces) > (self._first or 0) else None
        if last is not None and kind == last.kind != "name" and call == last.call:
            self._pieces[-1] = Piece(kind, last.text + text, call)
        else:
            self._pieces.append(Piece(kind, text, call))

    def _call(self, name: Any) -> None:
        if not isinstance(name, str) or name not in self._form.tools:
            raise _MalformedError
        self.num_calls += 1
        self._opening = "{"
        self._emit("name", name)

    def _argument(self, key: str, value: str) -> None:
        """value: JSON, or its beginning."""
        self._emit("arguments", f"{self._opening}{_dumped(key)}: {value}")
        self._opening = ", "

    def _close(self) -> None:
        self._emit("arguments", "{}" if self._opening == "{" else "}")

    # How text is read

    def _take(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        self._raw.append(text)
        self._num_read += len(text)
        return text

    def _more(self) -> Steps:
        if self._final:
            raise _EndedError
        yield

    def _space(self) -> Steps:
        """Skip white space, up to a character."""
        while not self._text.strip():
            yield from self._more()
        self._take(len(self._text) - len(self._text.lstrip()))

    def _find(self, marks: tuple[str, ...], start: int = 0) -> tuple[int, str]:
        """Where the first of them is, and which; -1 and empty if none is there."""
        found = [(at, mark) for mark in marks if (at := self._text.find(mark, start)) >= 0]
        return min(found, default=(-1, ""))

    def _until(self, *marks: str) -> Steps:
        """The text before the first of these marks, and which it was."""
        start, longest = 0, max(map(len, marks))
        while not (found := self._find(marks, start))[1]:
            start = max(0, len(self._text) - longest)
            yield from self._more()
        text = self._take(found[0])
        self._take(len(found[1]))
        return text, found[1]

    def _optional(self, *words: str) -> Steps:
        """Skip white space and one of these words, if it follows. Returns it. Empty ones do not count."""
        while True:
            text = self._text.lstrip()
            word = next((one for one in words if one and text.startswith(one)), None)
            if word is not None:
                self._take(len(self._text) - len(text) + len(word))
                return word
            if self._final or not any(one.startswith(text) for one in words if one):
                return None
            yield


class _Nesting:
    """Finds the end of a JSON value that begins with a bracket."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self.done = depth, False, False

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters belong to it, and the same in the spacing of `json.dumps`."""
        if (len(text) - len(text.rstrip("\\"))) % 2:  # half of an escape
            text = text[:-1]
        shown, count = [], 0
        for piece in SPECIAL.split(text):
            count += len(piece)
            if piece == '"':
                self._quoted = not self._quoted
            elif piece and not self._quoted:
                self._depth += (piece in "{[") - (piece in "}]")
                self.done = self._depth == 0
                piece = "".join(piece.split())
                piece = f"{piece} " if piece in (",", ":") else piece
            shown.append(piece)
            if self.done:
                break
        return count, "".join(shown)


def _loaded(text: Any) -> dict[str, Any]:
    """Raises _MalformedError."""
    try:
        found = json.loads(text)
        _dumped(found)
    except (ValueError, TypeError, RecursionError):
        raise _MalformedError from None
    if not isinstance(found, dict):
        raise _MalformedError
    return found


def _dumped(value: Any) -> str:
    """JSON that is valid UTF-8. Raises ValueError for infinite numbers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if HALVES.search(text) else text


def _literal(text: str) -> str:
    """JSON of a value in JSON, Python or Gemma 4's form; any other text means itself."""

    def in_json(found: re.Match[str]) -> str:
        if found[2] is not None and found[2].startswith("'"):
            with suppress(ValueError, SyntaxError):
                return json.dumps(ast.literal_eval(found[2]))
        if found[1] is not None:
            return json.dumps(found[1])
        return f'"{found[3]}"' if found[3] else JSON_WORDS.get(found[0], found[0])

    with suppress(ValueError, RecursionError):
        return _dumped(json.loads(text))
    with suppress(ValueError, RecursionError):
        return _dumped(json.loads(LITERAL.sub(in_json, text)))
    return _dumped(text)

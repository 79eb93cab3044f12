"""Tokenizer: text to ids and back, without transformers, also for one output as it grows: the pieces of text
concatenate to the text of all ids.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from manylora.config.model_folder import check_tokenizer_folder
from manylora.config.settings import read_settings
from manylora.errors import ConfigError, RequestError, TextTooLongError
from manylora.generation.chat_template import NO_VARIABLES, ChatTemplate, up_to_last_message
from manylora.system.resources import release_free_memory
from manylora.system.threads import LONG

# Characters. Texts up to FREE are always tokenised, so that an error can give their number of tokens.
FREE = 2**14
LONGEST_TEXT = 2**19  # if the minimum number of tokens of a text is unknown
GENEROUS = 16  # per token, four times as many as in English
PER_TOKEN = 128  # as many as the longest tokens of usual vocabularies, runs of spaces, stand for


def longest_text(context: int | None) -> int:
    """Limit in characters for a text that need not fit the context: more than what usually fits."""
    return max(LONGEST_TEXT, GENEROUS * (context or 0))


WINDOW = 128  # ids before a chunk that its text may depend on; only a longer run of byte tokens needs more
LONG_WINDOW = 16  # ids from which a window is cut back to its suffix
POSITIONAL = ("WordPiece", "Metaspace", "BPEDecoder", "CTC")  # depend on a token's place or neighbour
EACH = ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip")  # do not, or make bytes of tokens


@dataclass(frozen=True)
class DecoderRules:
    """What the text of a token depends on, from the `decoder` of a tokenizer.json.

    byte_level: tokens are bytes. only_bytes: and nothing else is done to them. byte_tokens: tokens such as
    `<0xE2>` are bytes. last: whether another token follows changes it. stripped: the text loses characters at
    its start. whole: no rule says which part of the text is final; all of it is held back until the end.
    """

    byte_level: bool = False
    only_bytes: bool = False
    byte_tokens: bool = False
    last: bool = False
    stripped: bool = False
    whole: bool = False

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> DecoderRules:
        steps = _steps(decoder)
        kinds = [step["type"] for step in steps]
        end = next((i + 1 for i, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
        each, fused = steps[:end], [step for step in steps[end:] if step["type"] != "Fuse"]
        rules = cls(
            byte_level="ByteLevel" in kinds,
            only_bytes=kinds == ["ByteLevel"],
            byte_tokens="ByteFallback" in kinds,
            last="BPEDecoder" in kinds,
            stripped=bool(fused),
        )
        certain = (
            all(kind in (*POSITIONAL, *EACH) for kind in kinds)
            and sum(kind in POSITIONAL for kind in kinds) <= 1
            and all(step["type"] == "Strip" and not step["stop"] for step in fused)
            and "ByteLevel" not in kinds[1:]
            and (not rules.byte_tokens or all(map(_keeps_bytes, each[: kinds.index("ByteFallback")])))
            and not (rules.byte_tokens and any(kind in kinds for kind in ("BPEDecoder", "CTC")))
        )
        return rules if certain else cls(whole=True)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a decoder, in order."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [step for one in decoder["decoders"] for step in _steps(one)]
    return [decoder]


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a step leaves tokens such as `<0xE2>` as they are, and makes none."""
    if step["type"] != "Replace":
        return False
    found: str = step["pattern"].get("String") or "a"  # a regular expression may find anything
    return not found.isascii() and len(step["content"]) <= 1


class ByteStream:
    """Every id is bytes of UTF-8 (`bytes_of`), so that only an incomplete character is held back."""

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: Container[int]) -> None:
        self._bytes_of, self._skipped = bytes_of, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, ids: Sequence[int], final: bool) -> str:
        """The text that later ids cannot change any more. With `final`, all remaining text."""
        bytes_of, skipped = self._bytes_of, self._skipped
        return self._decode(b"".join([bytes_of(i) for i in ids if i not in skipped]), final)


class WindowStream:
    """For any tokenizer: a window of the last ids is decoded again with the new ones. skipped: ids without
    text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: Container[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._window: list[int] = []
        self._shown = ""  # final text of the window's ids

    def add(self, ids: Sequence[int], final: bool) -> str:
        tokenizer = self._tokenizer
        new = tokenizer._shown(ids, self._skipped)
        if not (new or final):
            return ""
        self._window += new
        text = tokenizer.decode(self._window, False) if final else tokenizer._stable(self._window, False)
        settled = text[len(self._shown) :]
        self._shown = text
        if settled and len(self._window) > LONG_WINDOW:
            self._window = tokenizer._suffix(self._window, False)
            self._shown = tokenizer._stable(self._window, False)
        return settled


TextStream = ByteStream | WindowStream


LARGE = 2**17  # characters or tokens from which memory is returned to the system
CONTEXT = 8  # ids that determine any transition outside a run of byte tokens
DIGITS = "0123456789ABCDEFabcdef"
BYTE_TOKENS = [f"<0x{a}{b}>" for a in f"+{DIGITS}" for b in DIGITS]  # as the library reads them


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE uses for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


ALPHABET = _byte_alphabet()


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # no Exception, and in no module that can be imported


@contextmanager
def _readable() -> Iterator[None]:
    """Raises RequestError for what the library cannot tokenise."""
    try:
        yield
    except TypeError:  # the library's word for half of a surrogate pair, which UTF-8 does not have
        raise RequestError("text must be valid Unicode: it has half of a surrogate pair") from None
    except BaseException as error:
        if not _is_panic(error):  # of a damaged tokenizer.json
            raise
        raise RequestError("the model's tokenizer cannot read this text") from None


class Tokenizer:
    """Of a Hugging Face directory. Raises ConfigError. settings: tokenizer_config.json."""

    _lower = False  # what sentence-transformers does before it tokenises a text

    def __init__(self, directory: Path, chat_template: Path | None = None) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        check_tokenizer_folder(self.directory)
        try:
            self._open(path.read_text(encoding="utf-8"))
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        release_free_memory()  # a vocabulary of 262,144 takes 325 MiB to read, and 136 afterwards
        self.settings: Mapping[str, Any] = read_settings(self.directory / "tokenizer_config.json")
        self._lower = read_settings(self.directory / "sentence_bert_config.json").get("do_lower_case") is True
        self.template = ChatTemplate.read(self.directory, self.settings, chat_template)

    @classmethod
    def parse(cls, text: str) -> Tokenizer:
        """Create it from a tokenizer.json only, for `with_parts`. Raises ValueError."""
        made = cls.__new__(cls)
        made.directory = Path()
        try:
            made._open(text)
        except BaseException as error:  # the library may panic
            raise ValueError(str(error)[:200]) from None
        return made

    def _open(self, text: str) -> None:
        self._library = Library.from_str(text)
        self._library.no_padding()  # files of sentence-transformers pad every text to one length
        self._library.no_truncation()
        spec = json.loads(text)
        self._rules = DecoderRules.of(spec.get("decoder"))
        added = self._library.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        names = BYTE_TOKENS if self._rules.byte_tokens else []
        self._byte_tokens = {i for i in map(self._library.token_to_id, names) if i is not None}
        self._bytes: dict[int, bytes] = {}

    def with_parts(self, settings: Mapping[str, Any], template: ChatTemplate) -> Tokenizer:
        """The same vocabulary with other settings and another template. Cheap."""
        other = copy(self)
        other.settings, other.template = dict(settings), template
        return other

    def vocabulary(self) -> dict[str, int]:
        """All tokens with their ids, including added ones."""
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    def is_special(self, token_id: int) -> bool:
        """Whether texts leave it out."""
        return token_id in self._special

    @staticmethod
    def check_length(length: int, context: int | None, whole: bool = True) -> None:
        """Raises TextTooLongError for more characters than `context` tokens stand for. whole: False: the text
        need not fit.
        """
        if whole and context is not None:
            most = max(context * PER_TOKEN, FREE)
            reason = f"in the context of {context} tokens there is room for {most} at most"
        else:
            most = longest_text(context)
            reason = f"at most {most} are taken"
        if length > most:
            raise TextTooLongError(f"The text has {length} characters: {reason}")

    @property
    def eos_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding token, or the end token if there is none."""
        pad = self._named_id("pad_token")
        return self.eos_id if pad is None else pad

    @property
    def chat_template(self) -> str | None:
        """The text of the default template."""
        return self.template.source

    @property
    def decoder_start_id(self) -> int | None:
        """The first token of an encoder-decoder model's decoder. None: there is no such model."""
        config = read_settings(self.directory / "config.json")
        if not config.get("is_encoder_decoder"):
            return None
        for settings in (read_settings(self.directory / "generation_config.json"), config):
            if (found := settings.get("decoder_start_token_id")) is not None:
                return int(found)
        return self.pad_id

    def encode(self, text: str, add_special_tokens: bool = True, context: int | None = None) -> list[int]:
        """The text's ids. A long text does not block other Python threads. Raises RequestError.

        context: tokens that fit: a text that certainly has more is not tokenised; the result may have more.
        """
        if context is not None:
            self.check_length(len(text), context)
            size = max(FREE, 4 * context)
            while 2 * size <= len(text):  # its start is cheaper to tokenise than all of it
                _, tokens = self._encode(text[:size], False, 0)
                if tokens > context + context // 4:  # the cut affects only the last tokens
                    raise TextTooLongError(
                        f"The first {size} of the text's {len(text)} characters have {tokens} tokens "
                        f"already: the context has room for {context}"
                    )
                size *= 2
        # Creating a longer list would block other threads, unlike tokenising.
        most = None if context is None else max(context, FREE)
        ids, count = self._encode(text, add_special_tokens, most)
        if most is not None and count > most:
            raise TextTooLongError(f"The text has {count} tokens: the context has room for {context}")
        return ids

    def encode_pair(self, first: str, second: str, context: int | None = None) -> tuple[list[int], int]:
        """The ids of two texts, and how many of them belong to the first. Raises RequestError."""
        self.check_length(len(first) + len(second), context)
        with _readable():
            encoded = self._library.encode(first, second)
        types = encoded.type_ids
        return encoded.ids, types.index(1) if 1 in types else len(types)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) < LONG:
            return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._library.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def delta(
        self, window: Sequence[int], new: Sequence[int], final: bool, skip_special_tokens: bool = True
    ) -> str:
        """The text that `new` ids add to a stream whose preceding ids were `window`.

        Text that may still change is held back unless `final`: an incomplete character, and a run of
        byte-fallback tokens, which are decoded together. All deltas concatenate to the decoded text of all
        ids. With a decoder without such rules, all is held back; it is exact for outputs of up to WINDOW
        tokens.
        """
        if self._rules.whole:  # once ids are missing from the window, its text cannot be exact
            if not final and len(window) + len(new) < WINDOW:
                return ""
            before = self.decode(window, skip_special_tokens) if len(window) >= WINDOW else ""
            return self.decode([*window, *new], skip_special_tokens)[len(before) :]
        new = self._shown(new, self._special if skip_special_tokens else ())
        window = self._suffix(window, skip_special_tokens)
        ids = [*window, *new]
        before = self._stable(window, skip_special_tokens)
        after = self.decode(ids, skip_special_tokens) if final else self._stable(ids, skip_special_tokens)
        return after[len(before) :]

    def stream(self, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> TextStream:
        """The text of one output as it grows: as `delta`, for a caller that sees all of its ids. shown:
        special tokens that are not skipped.
        """
        skipped = self._special - shown if skip_special_tokens else frozenset()
        if self._rules.only_bytes:
            return ByteStream(self._bytes_of, skipped)
        return WindowStream(self, skipped)

    def mark_id(self, text: str) -> int | None:
        """The id of the token with exactly this text, if llguidance takes it as a special one."""
        found = self._library.token_to_id(text)
        return found if found in self._special or text[:1] + text[-1:] == "<>" else None

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those texts that are special tokens."""
        return frozenset(self._special & {self._library.token_to_id(text) for text in texts})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        context: int | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        continues: bool = False,
    ) -> str:
        """Messages through the chat template. continues: the last one goes on. Raises RequestError."""
        if continues:
            variables = {**variables, "add_generation_prompt": False, "continue_final_message": True}
        text = self.template.render(messages, tools, longest_text(context), variables)
        return up_to_last_message(text, messages) if continues else text

    def _encode(self, text: str, special: bool, most: int | None) -> tuple[list[int], int]:
        """Ids, where there are no more than `most`, and how many there are."""
        text = text.lower() if self._lower else text
        with _readable():
            if len(text) < LONG:
                encoded = self._library.encode(text, add_special_tokens=special)
            else:  # the library lets other threads go on in batches only
                encoded = self._library.encode_batch_fast([text], add_special_tokens=special)[0]
        count = len(encoded)
        ids = encoded.ids if most is None or count <= most else []
        if max(len(text), count) >= LARGE:
            del encoded
            release_free_memory()
        return ids, count

    def _shown(self, ids: Sequence[int], skipped: Container[int]) -> list[int]:
        """The ids that the decoder sees: those that are not skipped and have a token."""
        return [i for i in ids if i not in skipped and self._library.id_to_token(i) is not None]

    def _suffix(self, window: Sequence[int], skip: bool) -> list[int]:
        """The last CONTEXT ids, and more until the first is no byte token and the text is not stripped."""
        kept: list[int] = []
        for i in reversed(self._shown(window, self._special if skip else ())):
            kept.append(i)
            if len(kept) < CONTEXT or i in self._byte_tokens:
                continue
            if not self._rules.stripped or self._stable(kept[::-1], skip):
                break
        return kept[::-1]

    def _stable(self, ids: Sequence[int], skip: bool) -> str:
        """The part of the ids' text that later ids cannot change."""
        if self._rules.whole:
            return ""
        end = len(ids)
        while end > 0 and ids[end - 1] in self._byte_tokens:
            end -= 1
        text = self.decode(ids[:end], skip)
        if self._rules.byte_level and text.endswith("\ufffd") and self._ends_inside_character(ids[:end]):
            text = text.removesuffix("\ufffd")
        if self._rules.last and ids:
            last = self.decode(ids[-1:], skip)
            followed = self.decode([ids[-1]] * 2, skip).removesuffix(last)
            same = (one for one in range(len(last), -1, -1) if followed.startswith(last[:one]))
            text = text.removesuffix(last) + last[: next(same)]
        return text

    def _ends_inside_character(self, ids: Sequence[int]) -> bool:
        tail = b"".join(self._bytes_of(i) for i in ids[-4:])[-4:]
        for length in range(1, min(3, len(tail)) + 1):
            if tail[-length] & 0xC0 == 0x80:  # not a character's first byte
                continue
            try:
                tail[-length:].decode()
            except UnicodeDecodeError as error:  # the decoder's own rules say whether it may go on
                return error.reason == "unexpected end of data"
            return False
        return False

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            token = self._library.id_to_token(token_id) or ""
            known = all(c in ALPHABET for c in token)
            found = self._bytes[token_id] = bytes(ALPHABET[c] for c in token) if known else token.encode()
        return found

    def _named_id(self, key: str) -> int | None:
        value = self.settings.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        return self._library.token_to_id(content) if content else None

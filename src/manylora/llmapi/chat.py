"""ChatRequests: the methods of `LLM` that take messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from manylora.errors import ConfigError
from manylora.generation.chat_template import ROLES, ChatTemplate, call_arguments
from manylora.generation.defaults import OwnText
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.llmapi.lora import is_choice
from manylora.llmapi.outputs import GenerationResult, RequestOutput
from manylora.llmapi.prompts import ChatText

Messages = Sequence[Mapping[str, Any]]
OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class _Owner(Protocol):
    """The parts of an LLM that the methods need."""

    _tokenizer: Tokenizer | None
    _max_seq_len: int

    def _named(self, lora_request: Any) -> Any: ...

    def _text_of(self, lora_request: Any) -> OwnText | None: ...

    def generate(
        self, inputs: Any, sampling_params: Any, lora_request: Any, use_tqdm: bool
    ) -> RequestOutput | list[RequestOutput]: ...

    def generate_async(
        self, inputs: Any, sampling_params: Any, lora_request: Any, streaming: bool
    ) -> GenerationResult: ...


class ChatRequests:
    """Mixed into `LLM`."""

    def chat(
        self: _Owner,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation, or several at once, and wait. Returns a list for several.

        messages: each with `role` and `content`, which is a text or a list of parts
            {"type": "text", "text": …}, and `tool_calls` as in OpenAI's API. Other keys are passed to the
            template.
        chat_template: text of a template; None: the adapter's if it has a trusted one, else the model's.
        tools: as in OpenAI's API, shown by the template. For a template that does not know tools, they and
            the calls and results in messages are shown as text.
        add_generation_prompt: end the prompt with the start of an answer.
        continue_final_message: continue the last message instead.
        chat_template_kwargs: further variables of the template.

        The other arguments and the exceptions are those of `generate`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=False")
        variables = {"add_generation_prompt": add_generation_prompt, **_variables(chat_template_kwargs)}
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if single else list(messages)
        adapters = self._named(lora_request)
        each = [adapters] * len(chats) if is_choice(adapters) else list(adapters)
        if len(each) != len(chats):
            raise ValueError(
                f"lora_request must be one, or one for each prompt: got {len(each)} for {len(chats)}"
            )
        how = tools, chat_template, variables, continue_final_message
        prompts = [_prompt(self, chat, adapter, *how) for chat, adapter in zip(chats, each, strict=True)]
        outputs = self.generate(prompts, sampling_params, adapters, use_tqdm)
        assert isinstance(outputs, list)
        return outputs[0] if single else outputs

    def chat_async(
        self: _Owner,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        streaming: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> GenerationResult:
        """Start to answer one conversation, and return at once, as `generate_async`."""
        variables = {"add_generation_prompt": True, **_variables(chat_template_kwargs)}
        adapter = self._named(lora_request)
        prompt = _prompt(self, messages, adapter, tools, chat_template, variables, False)
        return self.generate_async(prompt, sampling_params, adapter, streaming)


def _prompt(
    owner: _Owner,
    chat: Messages,
    adapter: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    template: str | None,
    variables: Mapping[str, Any],
    continues: bool,
) -> ChatText:
    """Raises ValueError, RequestError."""
    if not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise ValueError('tools: each must be like {"type": "function", "function": {"name": "f"}}')
    own = owner._text_of(adapter)
    tokenizer = owner._tokenizer if own is None else own.tokenizer
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer: leave skip_tokenizer_init out")
    if template is not None:
        tokenizer = tokenizer.with_parts(tokenizer.settings, _template(template, tokenizer))
    shown = [_shown(message) for message in chat]
    if not shown:
        raise ValueError("messages: there is none")
    return ChatText(tokenizer.chat(shown, tools or (), owner._max_seq_len, variables, continues))


def _variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """chat_template_kwargs. Raises ValueError."""
    own = sorted(set(given or ()) & set(OWN))
    if own:
        raise ValueError(f"chat_template_kwargs must not have {', '.join(own)}")
    return given or {}


def _template(text: str, tokenizer: Tokenizer) -> ChatTemplate:
    try:
        return ChatTemplate({"default": text}, tokenizer.settings)
    except ConfigError as error:
        raise ValueError(f"chat_template: {error}") from error


def _shown(message: Any) -> dict[str, Any]:
    """A message in the form that templates expect. Raises ValueError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: each must be a dict with a role, got {str(message)[:80]!r}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, Mapping) and one.get("type") == "text"]
        texts = [one["text"] for one in parts if isinstance(one.get("text"), str)]
        if len(texts) < len(content):
            raise ValueError("messages: content must be a text, or parts of type text")
        content = "\n".join(texts)
    elif not (content is None or isinstance(content, str)):
        raise ValueError(f"messages: content must be a text, got {str(content)[:80]!r}")
    shown = {**message, "role": ROLES.get(message["role"], message["role"]), "content": content or ""}
    if message.get("tool_calls"):
        shown["tool_calls"] = _shown_calls(message["tool_calls"])
    return shown


def _shown_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls of OpenAI's form as templates take them. Raises ValueError."""
    try:
        functions = [(call, call["function"]) for call in calls]
        return [
            {**call, "function": {"name": one["name"], "arguments": call_arguments(one.get("arguments"))}}
            for call, one in functions
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            'messages: tool_calls must be like [{"id": "1", "type": "function", "function": '
            '{"name": "f", "arguments": "{}"}}], whose arguments are a JSON object'
        ) from error

"""ChatRequests: the method of `LLM` that takes messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from manylora.errors import ConfigError
from manylora.llmapi.lora import is_choice
from manylora.llmapi.outputs import RequestOutput
from manylora.llmapi.prompts import ChatText
from manylora.llmapi.sampling import SamplingParams
from manylora.lora.text.current import OwnText
from manylora.text.chat_template import ROLES, ChatTemplate
from manylora.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class _Owner(Protocol):
    """The parts of an LLM that the method needs."""

    _tokenizer: Tokenizer | None
    _max_seq_len: int

    def _named(self, lora_request: Any) -> Any: ...

    def _text_of(self, lora_request: Any) -> OwnText | None: ...

    def generate(
        self, inputs: Any, sampling_params: Any, lora_request: Any, use_tqdm: bool
    ) -> RequestOutput | list[RequestOutput]: ...


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
            {"type": "text", "text": …}. Other keys are passed to the template.
        chat_template: text of a template; None: the adapter's if it has a trusted one, else the model's.
        tools: shown by the template.
        add_generation_prompt: end the prompt with the start of an answer.
        continue_final_message: continue the last message instead.
        chat_template_kwargs: further variables of the template.

        The other arguments and the exceptions are those of `generate`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=False")
        given = chat_template_kwargs or {}
        if set(given) & set(OWN):
            raise ValueError(f"chat_template_kwargs must not have {', '.join(sorted(set(given) & set(OWN)))}")
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if single else list(messages)
        adapters = self._named(lora_request)
        each = [adapters] * len(chats) if is_choice(adapters) else list(adapters)
        if len(each) != len(chats):
            raise ValueError(
                f"lora_request must be one, or one for each prompt: got {len(each)} for {len(chats)}"
            )
        variables = {"add_generation_prompt": add_generation_prompt, **given}
        prompts = []
        for chat, adapter in zip(chats, each, strict=True):
            own = self._text_of(adapter)
            tokenizer = self._tokenizer if own is None else own.tokenizer
            if tokenizer is None:
                raise ValueError("chat needs a tokenizer: leave skip_tokenizer_init out")
            if chat_template is not None:
                tokenizer = tokenizer.with_parts(tokenizer.settings, _template(chat_template, tokenizer))
            shown = [_shown(message) for message in chat]
            if not shown:
                raise ValueError("messages: there is none")
            limits = self._max_seq_len, variables, continue_final_message
            prompts.append(ChatText(tokenizer.chat(shown, tools or (), *limits)))
        outputs = self.generate(prompts, sampling_params, adapters, use_tqdm)
        assert isinstance(outputs, list)
        return outputs[0] if single else outputs


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
    return {**message, "role": ROLES.get(message["role"], message["role"]), "content": content or ""}

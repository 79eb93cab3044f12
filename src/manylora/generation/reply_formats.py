"""How families of models write reasoning and tool calls, by the names of vLLM's parsers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thinking:
    """Texts around what a model thinks; where there are several, any of them. label: follows the start, and
    is no reasoning. always: also without a start. inner: further marks, of replies in several messages.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    label: str = ""
    always: bool = False
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parsers:
    """Names of the parsers. auto: the chat template decides. reasoning: none: it stays in the content."""

    reasoning: str = "auto"
    tools: str = "auto"


CHOSEN_BY_TEMPLATE = Parsers()

THINK = Thinking(("<think>",), ("</think>",))
HARMONY = Thinking(
    ("<|channel|>",),
    ("<|end|>", "<|call|>", "<|return|>"),
    inner=("<|start|>", "<|message|>", "<|constrain|>"),
)
REASONING: dict[str, Thinking] = {
    "openai_gptoss": HARMONY,
    "gemma4": Thinking(("<|channel>",), ("<channel|>",), label="thought\n"),
    "mistral": Thinking(("[THINK]",), ("[/THINK]",)),
    "cohere_command3": Thinking(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    "seed_oss": Thinking(("<seed:think>",), ("</seed:think>",)),
    "granite": Thinking(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "deepseek_r1": Thinking(THINK.starts, THINK.ends, always=True),
    "qwen3": THINK,
}
"""The last one whose marks are in a chat template reads its replies. `deepseek_r1` is only chosen by name."""
SAME_REASONING = {
    **dict.fromkeys(
        ("deepseek_v3", "ernie45", "exaone4", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "nemotron_v3"),
        "qwen3",
    ),
    **dict.fromkeys(("deepseek-r1", "minimax_m2", "olmo3", "step3"), "deepseek_r1"),
    **dict.fromkeys(("gpt_oss", "gptoss"), "openai_gptoss"),
}

TOOL_MARKS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "",
    "<|python_tag|>": "",
    "<function=": "</function>",
    "[TOOL_CALLS]": "",
    "<TOOLCALL>": "</TOOLCALL>",
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "",
    "<function_calls>": "</function_calls>",
    "functools": "",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|action_start|><|plugin|>": "<|action_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|python_start|>": "<|python_end|>",
    "<|tool_call>": "<tool_call|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
}
"""Texts that begin calls, and what ends them, where anything does."""
SECTIONS = {
    "<｜tool▁calls▁begin｜>": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "<|tool_calls_section_begin|>": (
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
}  # fmt: skip
"""Marks whose calls have marks of their own: the begin, the one between name and arguments, and the end."""
USUAL = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
PARSERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hermes", "qwen25", "qwen3", "ernie45", "exaone4", "granite4"), ("<tool_call>",)),
    **dict.fromkeys(("glm45", "glm47"), ("<tool_call>",)),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "nemotron_v3"), ("<tool_call>", "<function=")),
    **dict.fromkeys(("llama3_json", "llama4_json"), ("<|python_tag|>", "<function=")),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), ("<｜tool▁calls▁begin｜>",)),
    "llama4_pythonic": ("<|python_start|>",),
    "pythonic": (),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "granite-20b-fc": ("<function_call>",),
    "nemotron_json": ("<TOOLCALL>",),
    "jamba": ("<tool_calls>",),
    "olmo3": ("<function_calls>",),
    "phi4_mini_json": ("functools",),
    "cohere_command3": ("<|START_ACTION|>",),
    "internlm": ("<|action_start|><|plugin|>",),
    "lfm2": ("<|tool_call_start|>",),
    "gemma4": ("<|tool_call>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "openai": (),
}
"""Marks of each parser. Calls without a mark are found in all, if the reply consists of them."""
HINTS = {"<|tool|>": "functools", "<|tool_list_start|>": "<|tool_call_start|>"}
"""Marks of calls that templates do not have, by something that they have."""


def thinking_of(name: str, template: str | None) -> Thinking | None:
    """name: of a parser; auto: the chat template decides; none: there is no reasoning."""
    if name != "auto":
        return REASONING.get(SAME_REASONING.get(name, name))
    text = template or ""
    if all(mark in text for mark in ("<|channel|>", "<|message|>")):
        return HARMONY
    found = (one for one in REASONING.values() if not one.always and any(end in text for end in one.ends))
    return next((one for one in found if one is not HARMONY), None)


def marks_of(name: str, template: str | None) -> tuple[str, ...]:
    """The marks of calls: those of a parser; auto: those in the chat template."""
    if name != "auto":
        return PARSERS[name]
    text = template or ""
    hinted = {mark for hint, mark in HINTS.items() if hint in text}
    return tuple(mark for mark in TOOL_MARKS if mark in text or mark in hinted) or USUAL

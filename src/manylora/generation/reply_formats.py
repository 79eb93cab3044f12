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
    inner=("<|message|>", "<|start|>", "<|constrain|>"),
)
GRANITE = Thinking(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
# fmt: off
REASONING = {name: thinking for names, thinking in (
    ("openai_gptoss gpt_oss gptoss", HARMONY),
    ("gemma4", Thinking(("<|channel>",), ("<channel|>",), label="thought\n")),
    ("mistral", Thinking(("[THINK]",), ("[/THINK]",))),
    ("cohere_command3", Thinking(("<|START_THINKING|>",), ("<|END_THINKING|>",))),
    ("seed_oss", Thinking(("<seed:think>",), ("</seed:think>",))),
    ("granite", GRANITE),
    ("qwen3 deepseek_v3 ernie45 exaone4 glm45 glm47 holo2 kimi_k2 mimo nemotron_v3", THINK),
    ("deepseek_r1 deepseek-r1 minimax_m2 olmo3 step3", Thinking(THINK.starts, THINK.ends, always=True)),
) for name in names.split()}
"""The first one whose marks are in a chat template reads its replies; those with `always` only by name."""
CALLS = (
    ("<tool_call>", "</tool_call>", "hermes qwen25 qwen3 ernie45 exaone4 granite granite4 glm45 glm47 "
     "qwen3_coder qwen3_xml nemotron_v3"),
    ("<function=", "</function>", "qwen3_coder qwen3_xml nemotron_v3 llama3_json llama4_json"),
    ("<|python_tag|>", "", "llama3_json llama4_json"),
    ("[TOOL_CALLS]", "", "mistral"),
    ("<|tool_call|>", "", "granite"),
    ("<function_call>", "", "granite-20b-fc"),
    ("<TOOLCALL>", "</TOOLCALL>", "nemotron_json"),
    ("<tool_calls>", "</tool_calls>", "jamba"),
    ("<function_calls>", "</function_calls>", "olmo3"),
    ("functools", "", "phi4_mini_json"),
    ("<|START_ACTION|>", "<|END_ACTION|>", "cohere_command3"),
    ("<|action_start|><|plugin|>", "<|action_end|>", "internlm"),
    ("<|tool_call_start|>", "<|tool_call_end|>", "lfm2"),
    ("<|python_start|>", "<|python_end|>", "llama4_pythonic"),
    ("<|tool_call>", "<tool_call|>", "gemma4"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "deepseek_v3 deepseek_v31"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "kimi_k2"),
)
"""Texts that begin calls; what ends them, where anything does; and the parsers that look for them. All find
calls without a mark, if the reply begins with them."""
# fmt: on
TOOL_MARKS = {mark: end for mark, end, _ in CALLS}
PARSERS = sorted({"pythonic", "openai", *(name for *_, names in CALLS for name in names.split())})
SECTIONS = {
    "<｜tool▁calls▁begin｜>": ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "<|tool_calls_section_begin|>": [
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
}
"""Marks whose calls have marks of their own: the begin, the one between name and arguments, and the end."""
USUAL = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
HINTS = {"<|tool|>": "functools", "<|tool_list_start|>": "<|tool_call_start|>"}
"""Marks of calls that templates do not have, by something that they have."""


def thinking_of(name: str, template: str | None) -> Thinking | None:
    """name: of a parser; auto: the chat template decides; none: there is no reasoning."""
    if name != "auto":
        return REASONING.get(name)
    text = template or ""
    found = (one for one in REASONING.values() if not one.always and any(end in text for end in one.ends))
    return next((one for one in found if not one.inner or one.inner[0] in text), None)


def marks_of(name: str, template: str | None) -> tuple[str, ...]:
    """The marks of calls: those of a parser; auto: those in the chat template."""
    if name != "auto":
        return tuple(mark for mark, _, names in CALLS if name in names.split())
    text = template or ""
    hinted = {mark for hint, mark in HINTS.items() if hint in text}
    return tuple(mark for mark in TOOL_MARKS if mark in text or mark in hinted) or USUAL

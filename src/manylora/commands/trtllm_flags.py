"""The flags of trtllm-build that `manylora build` does not share.

The flags of TensorRT-LLM 0.17 to 0.20, and older ones that scripts still use.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence

from manylora.config.foreign import TRTLLM_BUILD
from manylora.errors import ConfigError

DISABLED = ("disable", "None")
WITH_MEANING = ("lora_plugin", "max_input_len")


def help_text() -> str:
    listed = {
        "taken": WITH_MEANING,
        "refused unless they change nothing": TRTLLM_BUILD.refused,
        "without effect": TRTLLM_BUILD.ignored,
    }
    return "With --trtllm-flags: " + ". ".join(
        f"{what}: {' '.join(f'--{name}' for name in names)}" for what, names in listed.items()
    )


def take_flags(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split arguments into the trtllm-build flags among them, with their values, and the rest."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*TRTLLM_BUILD, *WITH_MEANING):
        parser.add_argument(f"--{name}", nargs="?", const="", default=SUPPRESS)
    return parser.parse_known_args(arguments)


def check_flags(given: Namespace, wanted: bool) -> None:
    """wanted: whether these flags are accepted at all. Raises ConfigError naming those that are not."""
    names = [f"--{name}" for name in vars(given)]
    if names and not wanted:
        raise ConfigError(
            f"leave out {', '.join(names)}, which trtllm-build takes for its engines, or add --trtllm-flags "
            "to take what has a meaning here"
        )
    for name, value in vars(given).items():
        reason = TRTLLM_BUILD.refused.get(name)
        if reason is not None and not TRTLLM_BUILD.allows(name, value):
            raise ConfigError(f"{f'--{name} {value}'.strip()} cannot be had: {reason}; leave it out")


def enables_lora(given: Namespace) -> bool | None:
    """Whether --lora_plugin enables LoRA. None if it was not given."""
    return given.lora_plugin not in DISABLED if hasattr(given, "lora_plugin") else None


def max_input_len(given: Namespace) -> int | None:
    """The limit in tokens. Raises ConfigError."""
    text = getattr(given, "max_input_len", None)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"--max_input_len must be a whole number, got {text or 'none'}")
    return None if text is None else int(text)


def without_effect(given: Namespace) -> str:
    """A line that names the flags without effect. Empty if there are none."""
    names = [f"--{name}" for name in vars(given) if name != "lora_plugin"]
    return f"without effect here: {', '.join(names)}" if names else ""

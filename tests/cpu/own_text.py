"""Adapters that bring a chat template, generation defaults or a tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from serving import DEMO

LAST = 1535  # the only id that the shortened base tokenizer leaves free

# Gemma 2's: there is no system role, and the roles alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)


def adapter(folder: Path, **files: Any) -> Path:
    """A copy of the Chinese adapter, with more files: texts, or objects as JSON."""
    shutil.copytree(DEMO / "adapters" / "chinese", folder)
    for name, content in files.items():
        suffix = "jinja" if name == "chat_template" else "json"
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.{suffix}").write_text(text)
    return folder


def shortened() -> dict[str, Any]:
    """The demo's tokenizer without its last token."""
    spec = json.loads((DEMO / "base" / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    last = next(token for token, number in vocab.items() if number == LAST)
    del vocab[last]
    pieces = [one if isinstance(one, list) else one.split(" ") for one in spec["model"]["merges"]]
    spec["model"]["merges"] = [one for one in pieces if "".join(one) != last]
    return spec


def with_token(spec: dict[str, Any], content: str, number: int = LAST) -> dict[str, Any]:
    made = copy.deepcopy(spec)
    token = {"id": number, "content": content, "special": True, "normalized": False}
    made["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    return made

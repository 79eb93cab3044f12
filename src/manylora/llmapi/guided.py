"""GuidedDecodingParams: a constraint on the output, with TensorRT-LLM's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manylora.request import Guide


@dataclass(frozen=True)
class GuidedDecodingParams:
    """Set exactly one field; otherwise raises ValueError. A guide that does not compile fails its request.

    json:        a JSON schema, as text, a mapping, or a pydantic model.
    regex:       a regular expression that the whole output matches.
    grammar:     an EBNF grammar in llama.cpp's notation, starting at `root`.
    json_object: any JSON value.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise ValueError("GuidedDecodingParams: structural_tag is not supported; leave it out")
        given = [name for name in ("json", "regex", "grammar") if getattr(self, name) is not None]
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r:.80}")
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            named = f": {', '.join(given)}" if given else ""
            raise ValueError(f"GuidedDecodingParams takes exactly one guide, got {len(given)}{named}")
        self.guide()

    def guide(self) -> Guide:
        """The guide in the engine's form."""
        if self.json_object:
            return Guide("json")
        if self.regex is not None:
            return Guide("regex", self.regex)
        if self.grammar is not None:
            return Guide("ebnf_grammar", self.grammar)
        return Guide("json_schema", self.json if isinstance(self.json, str) else json.dumps(self._schema()))

    def _schema(self) -> Any:
        if isinstance(self.json, Mapping):
            return self.json
        make = getattr(self.json, "model_json_schema", None)
        if make is None:
            raise ValueError(f"json must be a schema or a pydantic model, got {self.json!r:.80}")
        return make()

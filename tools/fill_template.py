#!/usr/bin/env python3
"""Fill the ${…} of a config.pbtxt: fill_template.py [-i] FILE name:value,name:value,…

A backslash escapes the next character; the text is split twice, so a comma in a value is written `\\,` and a
colon `\\\\:`. Placeholders that are not named stay as they are; the models take them as unset.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # in a clone, any Python will do

from manylora.launcher import templates


def split(string: str, delimiter: str) -> list[str]:
    """Split at the delimiter, except where a backslash stands before it; the backslashes are removed."""
    parts, current, escaped = [], "", False
    for character in string:
        if escaped:
            current, escaped = current + character, False
        elif character == "\\":
            escaped = True
        elif character == delimiter:
            parts, current = [*parts, current], ""
        else:
            current += character
    return [*parts, current]


def fill(text: str, substitutions: str, file: str) -> str:
    """Raises ValueError naming the pair or key that is wrong."""
    values = dict(templates.DEFAULTS)
    for pair in split(substitutions, ","):
        fields = split(pair, ":")
        if len(fields) != 2:
            raise ValueError(f"'{pair}' is not name:value (write a colon in a value as \\\\:)")
        key, value = fields
        if key not in text:
            raise ValueError(f"key '{key}' does not exist in the file {file}.")
        values[key] = value
    return templates.fill(text, values)


def main() -> int:
    parser = ArgumentParser(description="Fill the placeholders of a template.")
    parser.add_argument("file_path", help="path of the .pbtxt to modify")
    parser.add_argument("substitutions", help="variables and values as name:value,name:value")
    parser.add_argument("--in_place", "-i", action="store_true", help="write the file instead of printing")
    options = parser.parse_args()
    path = Path(options.file_path)
    try:
        filled = fill(path.read_text(encoding="utf-8"), options.substitutions, options.file_path)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.in_place:
        path.write_text(filled, encoding="utf-8")
    else:
        print(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())

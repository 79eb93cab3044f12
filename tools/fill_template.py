#!/usr/bin/env python3
"""Fill the placeholders ${…} of a config.pbtxt: fill_template.py [-i] FILE name:value,name:value,…

A backslash escapes the next character. The text is split twice, so write a comma in a value as `\\,` and a
colon as `\\\\:`. Placeholders that are not named stay as they are, and the models treat them as unset.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # so that in a clone any Python works

from manylora.doors.triton.launcher import templates


def split(string: str, delimiter: str) -> list[str]:
    """Split at each delimiter that is not escaped by a backslash, and remove the backslashes."""
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
    """Returns `text` with the placeholders filled. Raises ValueError that names the wrong pair or key."""
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

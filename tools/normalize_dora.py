#!/usr/bin/env python3
"""Divide the DoRA magnitudes of a PEFT adapter by the row norms of the updated weights (base plus LoRA)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from manylora.adapters.convert import ALLOW_BIN, normalize_dora
from manylora.errors import AdapterInvalidError, ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--in-dir", "-i", type=Path, required=True, help="adapter directory")
    parser.add_argument("--base-model", "-b", type=Path, required=True, help="model directory")
    parser.add_argument("--out-dir", "-o", type=Path, required=True)
    parser.add_argument("--strip", action="store_true", help="remove the magnitudes instead")
    parser.add_argument("--allow-bin", action="store_true", help=ALLOW_BIN)
    options = parser.parse_args(arguments)
    folders = options.in_dir, options.base_model, options.out_dir
    try:
        count = normalize_dora(*folders, strip=options.strip)
    except (AdapterInvalidError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or options.out_dir}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{count} magnitudes {'removed' if options.strip else 'normalised'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""manylora serve: the OpenAI server on a model and its adapters, in this process."""

from __future__ import annotations

import sys

from manylora.errors import ConfigError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    try:
        # Imported here, so that a missing extra is one line and not a trace.
        from manylora.openai.logs import log_to_stderr
        from manylora.openai.options import parse_options
        from manylora.openai.server import run
    except ImportError as error:
        print(f"manylora serve needs {error.name}: pip install 'manylora[openai]'", file=sys.stderr)
        return 1
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        log_to_stderr(options.log_level)
        run(options)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

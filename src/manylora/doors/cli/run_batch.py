"""manylora run-batch: answer a file of requests, and go on where a killed run stopped."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.errors import ConfigError

if TYPE_CHECKING:
    from manylora.doors.http.options import ServeOptions

PURPOSE = """Answer the requests of the file INPUT, one JSON object per line with custom_id, url and body, as
OpenAI's Batch API and vllm run-batch take them. Requests for one adapter are answered together. If it is
killed, the same command goes on. MODEL and the options are those of manylora serve."""
USAGE = "manylora run-batch INPUT MODEL -o OUTPUT [options]"


def main(arguments: list[str]) -> int:
    from manylora.doors.http.arguments import parse
    from manylora.doors.http.options import ServeOptions
    from manylora.doors.http.serving.logs import log_to_stderr

    source, output, rest = _files(arguments)
    options = parse(rest, ServeOptions, "run-batch", PURPOSE, ("host", "port"), USAGE)
    log_to_stderr(options.log_level)
    return asyncio.run(_answer(source, output, options))


def _files(given: list[str]) -> tuple[Path, Path, list[str]]:
    first = given.pop(0) if given and not given[0].startswith("-") else None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-i", "--input-file", type=Path, default=None if first is None else Path(first))
    parser.add_argument("-o", "--output-file", type=Path)
    files, rest = parser.parse_known_args(given)
    source, output = files.input_file, files.output_file
    if {"-h", "--help"} & set(rest):
        return Path(), Path(), ["--help"]
    if source is None or output is None:
        raise ConfigError(f"{'INPUT' if source is None else '-o OUTPUT'} is missing: {USAGE}")
    if not source.is_file():
        raise ConfigError(f"{source} is not a file: give one with a request per line")
    if output.exists():
        raise ConfigError(f"{output} exists: remove it, or give another file with -o")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output.absolute().parent} is not a folder: make it first")
    return source, output, rest


async def _answer(source: Path, output: Path, options: ServeOptions) -> int:
    from tqdm import tqdm

    from manylora.doors.http.batches.lines import AnswerFile, ServerEndedError, answer_lines, read_lines
    from manylora.doors.http.batches.store import BATCH_KEY
    from manylora.doors.http.server import open_app
    from manylora.doors.http.serving.keys import ApiKey

    lines = read_lines(source, options.max_request_bytes)
    answers = AnswerFile(output.with_name(f"{output.name}.answers"))
    app = open_app(options)
    done = sum(line in answers for line in lines)
    try:
        async with app.router.lifespan_context(app):
            at_once = app.state.routes.context.backend.queue.capacity
            with tqdm(total=len(lines), initial=done, unit="request", disable=None) as progress:
                state, slots = {BATCH_KEY: ApiKey("run-batch", admin=True)}, asyncio.Semaphore(at_once)
                await answer_lines(app, source, lines, answers, slots, at_once, state, progress.update)
    except ServerEndedError:
        print("manylora run-batch: the engine has stopped; the same command goes on", file=sys.stderr)
        return 1
    partial = output.with_name(f"{output.name}.partial")
    with partial.open("wb") as file:
        answers.write(lines, file)
    partial.replace(output)
    failed = sum(not answers.succeeded(line) for line in lines)
    answers.close()
    answers.path.unlink()
    what = "answer" if len(lines) == 1 else "answers"
    print(f"{output}: {len(lines)} {what}{f', {failed} of them errors' if failed else ''}")
    return 0

"""GGUF files in several parts, NAME-00001-of-00003.gguf and so on. The first has the metadata, each has some
of the tensors, and each is a valid GGUF file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from manylora.errors import ConfigError, printable
from manylora.gguf.container import Header, TensorInfo, read_header

NAMED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
MOST_PARTS = 1000
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_paths(path: Path) -> list[Path]:
    """All parts of a file, in order; `path` is any of them. Only the file itself if its name does not
    indicate parts.

    Raises ConfigError that names the first missing part.
    """
    named = NAMED.fullmatch(path.stem)
    if named is None:
        return [path]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count <= MOST_PARTS:
        raise ConfigError(
            f"{path}: its name says that it is part {number} of {count}; read are 1 to {MOST_PARTS} parts"
        )
    parts = [path.with_name(part_name(named["stem"], one, count, path.suffix)) for one in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing ({len(missing)} of the {count} parts of this GGUF file are): put all "
            "of them in one folder"
        )
    return parts


def part_name(stem: str, number: int, count: int, suffix: str = ".gguf") -> str:
    return f"{stem}-{number:05}-of-{count:05}{suffix}"


def read_parts(path: Path) -> Header:
    """The header of the whole file, of which `path` is any part: the first part's metadata, and all tensors.

    Every part is checked against its own size before anything of it is read. Raises ConfigError.
    """
    paths = part_paths(path)
    headers = [read_header(one) for one in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers):
        said = header.metadata.get(NUMBER, 0), header.metadata.get(COUNT, 0) or 1
        if said != (number, len(paths)):
            raise ConfigError(
                f"{header.path}: its {NUMBER} and {COUNT} are {printable(str(said[0]))} and "
                f"{printable(str(said[1]))}, and by its name they are {number} and {len(paths)}: parts are "
                f"called NAME-{1:05}-of-{2:05}.gguf and so on, as llama-gguf-split makes them"
            )
        twice = sorted(tensors.keys() & header.tensors.keys())
        if twice:
            raise ConfigError(f"{header.path}: tensor {printable(twice[0])} is in another part too")
        tensors |= {name: replace(info, part=number) for name, info in header.tensors.items()}
    wanted = headers[0].metadata.get(TENSORS, len(tensors))
    if wanted != len(tensors):
        raise ConfigError(
            f"{paths[0]} says that all parts together have {printable(str(wanted))} tensors, and they have "
            f"{len(tensors)}: they are not of one file"
        )
    return replace(headers[0], tensors=tensors)

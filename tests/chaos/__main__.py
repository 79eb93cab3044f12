"""Attacks on a running service, bounded: kills, hostile requests, clients that wait or are slow.

    make chaos                                    everything, in about 5 minutes
    .venv/bin/python tests/chaos --only kills --kills 100 --seed 7

Prints a line of figures for each part and what went wrong, and ends with 1 if anything did.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import connections
import hostile
import kills

PARTS = {"kills": (kills, 25), "requests": (hostile, 2000), "connections": (connections, 6000)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, help="default: by the clock; it is printed")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given more than once")
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many; default {count}")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"seed {seed}")
    wrong = []
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="manylora-chaos-") as folder:
            found = PARTS[name][0].run(Path(folder), random.Random(f"{seed} {name}"), getattr(options, name))
        wrong += [f"{name}: {text}" for text in found]
    for text in wrong:
        print(f"WRONG {text}")
    print("nothing went wrong" if not wrong else f"{len(wrong)} things went wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

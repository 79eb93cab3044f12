"""One rank of the engine of a Triton model repository, where tritonserver and rank 0 are another process's,
perhaps on another host. The environment says which, as torchrun's or mpirun's does.

`python -m manylora.engine.repository_rank REPOSITORY REPORT`: REPORT is the number of a file that takes one
line: why this rank does not start, or nothing, when it has its part.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from manylora.config.repository import repository_config
from manylora.engine.follower import follow
from manylora.errors import ConfigError
from manylora.ranks.rank_info import RANK_0_GONE, find_rank


def main(arguments: Sequence[str]) -> int:
    """0: rank 0 has ended for good. RANK_0_GONE: it is about to start again."""
    repository, report = Path(arguments[0]), int(arguments[1])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def tell(line: str) -> None:
        os.write(report, f"{' '.join(line.split())}\n".encode()[:4000])

    try:
        config = repository_config(repository)
        for_good = follow(config, find_rank(config.world_size), lambda: tell(""))
    except (ConfigError, ValueError) as error:
        logging.getLogger("manylora").error("%s", error)
        tell(str(error))
        return 1
    return 0 if for_good else RANK_0_GONE


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # a thread may wait for rank 0

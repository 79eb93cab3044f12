"""manylora fleet: several servers of one model behind one endpoint, on Ray Serve."""

from __future__ import annotations

import os
import secrets


def main(arguments: list[str]) -> int:
    # Imported here so that a missing extra prints one line instead of a traceback.
    from manylora.doors.fleet.options import parse_options
    from manylora.doors.http.serving.logs import log_to_stderr

    options = parse_options(arguments)
    log_to_stderr(options.log_level)
    # Only processes with our token may connect to the Ray instance that this process starts; a token of
    # Ray's own would stay in the home folder. A replica that does not answer is killed at once, not after
    # the whole drain time. Set before ray is imported, which reads these variables then.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    os.environ["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] = "1"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    from manylora.doors.fleet.local import run

    run(options)
    return 0

"""manylora serve: the OpenAI server for a model and its adapters, in this process or under a supervisor."""

from __future__ import annotations

import logging
import signal
import sys

from manylora.doors.triton.launcher.supervisor import ServeProgram, Supervisor

logger = logging.getLogger("manylora")

END_S = 10.0  # after the drain time, before the server's process is killed


def main(arguments: list[str]) -> int:
    # Imported here so that a missing extra prints one line instead of a traceback.
    from manylora.doors.http.arguments import parse_options
    from manylora.doors.http.serving.logs import log_to_stderr

    options = parse_options(arguments)
    log_to_stderr(options.log_level)
    shown = options.model
    if options.is_local:
        options = options.located()
    if options.restart:  # serve in a child process, which is restarted when it ends
        command = [sys.executable, "-m", "manylora.cli", "serve", *arguments, "--no-restart"]
        drain_s = options.drain_seconds + END_S
        supervisor = Supervisor(ServeProgram(command, options.host, options.port, drain_s, options.uds))
        code = supervisor.run()
        if supervisor.last_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if code:
            print(f"manylora serve: {supervisor.status['reason']}", file=sys.stderr)
        return code
    logger.info("loading %s", shown)  # before the slow imports
    from manylora.doors.http.server import run

    run(options)
    return 0


if __name__ == "__main__":
    from manylora.cli import main as command

    sys.exit(command(["serve", *sys.argv[1:]]))

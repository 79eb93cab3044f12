#!/usr/bin/env python3
"""Start the Triton server with a filled model repository. See --help."""

from __future__ import annotations

import sys

from manylora.doors.triton.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""A plugin of pytest (`-p sanitized`): the compiled kernels are built with AddressSanitizer and
UndefinedBehaviorSanitizer, for the one level that MANYLORA_NATIVE names. The process must have loaded their
runtimes before all else; `tests/cpu/test_sanitizers.py` starts it so."""

from __future__ import annotations

import dataclasses
import os

import levels

from manylora.kernels import native

# An error ends the process. -O1: what is optimised away is not checked, and it compiles sooner.
OPTIONS = ("-O1", "-g1", "-fno-omit-frame-pointer")
OPTIONS += ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
OPTIONS += native.SOURCE.options[1:]

native.SOURCE = dataclasses.replace(native.SOURCE, name="sanitized", options=OPTIONS)
LEVEL = next(level for level in levels.find_levels() if level.name == os.environ["MANYLORA_NATIVE"])
levels.NAMES, levels.PARAMS = (LEVEL.name,), [LEVEL.name]
levels.find_levels = lambda: [LEVEL]

#!/usr/bin/env python3
"""Convert a PEFT LoRA adapter to the tensors of a request."""

from __future__ import annotations

import sys

from manylora.adapters.convert import main

if __name__ == "__main__":
    sys.exit(main())

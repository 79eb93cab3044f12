"""Without a GPU the kernels in the Triton language run under its interpreter. It must be told before they
are imported, and any test may import them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

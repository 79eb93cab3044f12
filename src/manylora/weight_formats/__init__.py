"""Quantised weights as checkpoints hold them: AWQ, GPTQ, compressed-tensors, FP8, `manylora build`'s."""

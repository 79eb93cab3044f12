"""Paths of TensorRT-LLM; see `moe_layout`."""

"""Tensor, pipeline and expert parallelism, applied to a model from outside: no layer knows of a rank."""

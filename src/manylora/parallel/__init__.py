"""Tensor, pipeline and expert parallelism, from outside: layers do not know about ranks."""

"""Tensor, pipeline and expert parallelism, applied to a model from outside: layers do not know about
ranks.
"""

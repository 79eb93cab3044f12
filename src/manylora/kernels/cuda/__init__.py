"""Kernels in the Triton language, and the tables they read. Imported only where `triton` is installed.

In each file kernels come first, then the functions that launch them. Kernels read a batch from device tables,
and from the host only its shape, so that a step can be recorded in a CUDA graph and replayed on other data.
"""

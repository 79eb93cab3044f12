"""Kernels in the Triton language and the tables they read. Imported only if `triton` is installed.

In each file the kernels come first, then the functions that launch them. Kernels read a batch from device
tables. Only its shape comes from the host, so that a step can be recorded in a CUDA graph and replayed with
other data.
"""

"""Kernels in the Triton language, and the tables they read. Imported only where `triton` is installed.

Each file has the kernels above their launchers. They read device tables alone, never host values of a batch
beyond its shape, so that a step can be recorded in a CUDA graph and run again on other contents.
"""

"""Adapters: their files, tensors and names, and the memory that holds them."""

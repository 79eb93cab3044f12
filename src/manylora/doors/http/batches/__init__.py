"""Batches: many requests in one file, answered in another."""

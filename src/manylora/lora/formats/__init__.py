"""Readers of adapters on disk."""

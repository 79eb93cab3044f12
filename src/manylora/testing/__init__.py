"""Tiny models and adapters for tests, and the comparison with transformers and PEFT."""

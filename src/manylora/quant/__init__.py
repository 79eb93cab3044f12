"""Quantised weights: their settings, and the checkpoints of other tools read value for value."""

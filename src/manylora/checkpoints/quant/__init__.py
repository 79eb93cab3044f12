"""Quantised weights: their settings, and exact reading of other tools' checkpoints."""

"""Engines as processes: `process` is the benchmark's side, `worker` the engine's, a script for each."""

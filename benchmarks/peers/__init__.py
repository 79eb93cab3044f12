"""Engines in separate processes: `process` is the benchmark's side, `worker` the engine's."""

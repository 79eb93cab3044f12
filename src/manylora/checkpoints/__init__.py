"""Base weights as people have them: GGUF files and quantised checkpoints."""

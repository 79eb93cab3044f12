"""GGUF files as base models: the container, its types, and what stands for config.json and tokenizer.json."""

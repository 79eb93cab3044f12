"""GGUF files as base models, with replacements for config.json and tokenizer.json."""

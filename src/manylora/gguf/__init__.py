"""GGUF files as base models: the container, its types, and replacements for config.json and
tokenizer.json.
"""

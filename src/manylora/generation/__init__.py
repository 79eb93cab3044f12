"""Text to tokens and back: the tokenizer, chat templates, streaming detokenisation, length limits."""

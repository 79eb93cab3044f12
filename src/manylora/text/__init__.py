"""Text to tokens and back: the tokenizer, chat templates, streaming detokenization, length limits."""

"""What comes with an adapter besides its tensors: chat template, generation defaults, tokenizer."""

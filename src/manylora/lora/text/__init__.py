"""What comes with an adapter beside its tensors: chat template, generation defaults, tokenizer."""

"""A PEFT directory: its settings, the names of its tensors, and its rows and extras."""

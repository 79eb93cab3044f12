"""Kinds of PEFT adapter beside LoRA: each is brought into the form that a LoRA has, exactly, or refused."""

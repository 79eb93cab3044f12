"""The OpenAI server: HTTP in front of one engine loop, with adapters by name."""

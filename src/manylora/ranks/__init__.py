"""The ranks of one engine: how they find each other, what they exchange, and how a loss is detected."""

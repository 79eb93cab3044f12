"""The ranks of one engine: how they find each other, what they send each other, and who notices a loss."""

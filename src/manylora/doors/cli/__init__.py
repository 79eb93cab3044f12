"""The commands of `manylora`, a module each."""

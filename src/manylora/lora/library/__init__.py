"""Where adapters come from: their names, files and copies, below every API."""

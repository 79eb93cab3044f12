"""Where adapters come from: their names, files and copies. Used by all APIs."""

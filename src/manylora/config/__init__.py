"""The settings of an engine, how they are resolved, and the record that `manylora build` writes."""
